"""Rules for verl's keys of learning, models, rewards, correction and teachers."""

import math
from pathlib import Path
from typing import Any

from rltrain.config.foreign import ACTOR, ROLLOUT, Pair
from rltrain.import_config.influence import ENVIRONMENT, REWARD
from rltrain.import_config.shared_rules import (
    megatron_options,
    set_adapters,
    set_megatron_optimizer,
    set_sizes_of_frozen,
)
from rltrain.import_config.translation import (
    ALGORITHMS,
    DISCOUNTED,
    NOTHING,
    WHITENED,
    WITH_STD,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    estimator,
    ranks,
    real,
    set_betas,
    set_clip,
    set_named,
    set_overlong_penalty,
    take_rewards,
    truth,
)
from rltrain.import_config.verl_trees import file_of_tree, set_selected_reward

# Rollout correction: weights and masks for tokens from other weights or other arithmetic.

PREFIX = "algorithm.rollout_correction."
LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "every_token"}
"""Levels of masks by ratio: verl's k1, and bounds on every token's own ratio."""
PER_TOKEN = ("token", "seq_max")
HALVINGS = 60


def set_correction(keys: SourceKeys, out: Translation) -> None:
    """Sets importance weights and masks."""
    bypass = keys.truth(PREFIX + "bypass_mode", False)
    kind = keys.text(PREFIX + "loss_type", "ppo_clip")
    if bypass:
        out.set("loss.old_logprobs", "rollout", PREFIX + "bypass_mode")
        if kind not in ("ppo_clip", "reinforce"):
            raise UntranslatableError("bypass_mode supports the losses ppo_clip and reinforce")
        if kind == "reinforce":
            out.set("loss.policy", "reinforce", PREFIX + "loss_type")
            out.settings.pop("loss.dual_clip", None)
    _set_weights(keys, out, bypass and kind == "ppo_clip")
    given, bounds = keys.get(PREFIX + "rollout_rs"), keys.get(PREFIX + "rollout_rs_threshold")
    if given not in NOTHING:
        _set_masks(str(given), bounds, out)


def _set_weights(keys: SourceKeys, out: Translation, by_ratio: bool) -> None:
    """Sets the weights. With `by_ratio` the policy's own ratio compares with the engine, and no weights are applied."""
    level, threshold = keys.get(PREFIX + "rollout_is"), keys.get(PREFIX + "rollout_is_threshold", 2.0)
    normalised = keys.truth(PREFIX + "rollout_is_batch_normalize", False)
    if level in NOTHING:
        return
    if by_ratio:
        out.leave(PREFIX + "rollout_is", level, "metrics only: with bypass_mode ppo_clip applies no weights")
        return
    low, _, high = str(threshold).rpartition("_")
    out.set("loss.correction.level", str(level), PREFIX + "rollout_is")
    out.set("loss.correction.high", real(high), PREFIX + "rollout_is_threshold")
    if low:
        out.set("loss.correction.method", "icepop", PREFIX + "rollout_is_threshold")
        out.set("loss.correction.low", real(low), PREFIX + "rollout_is_threshold")
    if normalised and keys.truth(PREFIX + "bypass_mode", False):
        out.set("loss.correction.normalize", "mini_batch", PREFIX + "rollout_is_batch_normalize")
        out.notes.append(
            f"{PREFIX}rollout_is_batch_normalize: with bypass_mode the mean is over a micro-batch of all ranks there, "
            "and over the mini-batch here"
        )
    elif normalised:
        out.set("loss.correction.normalize", "step", PREFIX + "rollout_is_batch_normalize")


def _set_masks(named: str, thresholds: Any, out: Translation) -> None:
    options = [option.strip() for option in named.split(",")]
    values = [value.strip() for value in str(thresholds).split(",")]
    values = values * len(options) if len(values) == 1 else values
    masks = []
    for option, value in zip(options, values, strict=True):
        level, _, kind = option.rpartition("_")
        if level == "seq_mean" and kind in ("k2", "k3"):
            out.set("loss.correction.reject_above", real(value), PREFIX + "rollout_rs_threshold")
            out.set("loss.correction.reject_by", kind, PREFIX + "rollout_rs")
        elif level in PER_TOKEN or (level in LEVELS and kind == "k1"):
            masks.append({"level": LEVELS[level], **_bounds(kind, value)})
        else:
            out.differs(PREFIX + "rollout_rs", option, "bounds on a sum of k2 or k3 over a sequence are not supported")
    if masks:
        out.set("loss.correction.masks", masks, PREFIX + "rollout_rs, rollout_rs_threshold")


def _bounds(kind: str, threshold: str) -> dict[str, float]:
    """Returns bounds of the ratio actor / engine. It is verl's r, and k1 is -log r. With k1 its thresholds are of the
    inverse."""
    if kind == "k1":
        first, _, last = threshold.rpartition("_")
        highest = real(last)
        lowest = real(first) if first else 1 / highest
        return {"low": 1 / highest, "high": 1 / lowest}
    most = real(threshold)
    if kind == "k2":
        return {"low": math.exp(-math.sqrt(2 * most)), "high": math.exp(math.sqrt(2 * most))}
    return {"low": math.exp(_root(most, -1.0)), "high": math.exp(_root(most, 1.0))}


def _root(most: float, sign: float) -> float:
    """Returns log r of the given sign with r - 1 - log r = `most`, by bisection. The estimate grows with the distance
    from 0."""
    near, far = 0.0, sign * (most + 2 + math.sqrt(2 * most))
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if math.expm1(middle) - middle < most else (near, middle)
    return near


# Adapters and routers.

REPLAYS = {"R2": "recompute", "R3": "rollout"}
REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
REPLAY_KEYS = (REPLAY, "actor_rollout_ref.actor.router_replay.mode")
RETURNED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def is_megatron(keys: SourceKeys) -> bool:
    strategy = keys.text("actor_rollout_ref.actor.strategy", keys.get("model_engine", "dp"))
    return "megatron" in strategy + keys.text("--config-name", "")


def slices_of(keys: SourceKeys) -> int:
    """Returns the number of ranks that share a sequence."""
    actor = "actor_rollout_ref.actor."
    if is_megatron(keys):
        return keys.count(actor + "megatron.context_parallel_size", 1)
    names = (actor + "fsdp_config.ulysses_sequence_parallel_size", actor + "ulysses_sequence_parallel_size")
    return count(keys.first(*names, default=1)[1])


def set_lora(keys: SourceKeys, out: Translation, prefix: str, megatron: bool, section: str = "model.lora") -> None:
    """Sets the adapters. FSDP has keys such as `lora_rank`. Megatron has a section `lora` with a default alpha of 32
    instead of 16."""
    names = {"rank": "rank", "alpha": "alpha"}
    given = {here: keys.first(f"{prefix}lora_{name}", f"{prefix}lora.{name}")[1] for here, name in names.items()}
    given["targets"] = keys.first(prefix + "target_modules", prefix + "lora.target_modules")[1]
    given["exclude"] = keys.first(prefix + "exclude_modules", prefix + "lora.exclude_modules")[1]
    given["path"] = keys.first(prefix + "lora_adapter_path", prefix + "lora.adapter_path")[1]
    given["dropout"] = keys.get(prefix + "lora.dropout")
    given["type"] = keys.get(prefix + "lora.type")
    init = keys.get(prefix + "lora.lora_A_init_method", "xavier" if megatron else None)
    set_adapters({**given, "init": init}, out, prefix + "lora.", 32 if megatron else 16, megatron, section)


def set_router_replay(keys: SourceKeys, out: Translation) -> None:
    """Sets the router replay. R2 repeats the experts of the pass for the old log-probs. R3 repeats those of the
    engine."""
    key, mode = keys.first(*REPLAY_KEYS, default="disabled")
    returned = keys.truth(RETURNED, False)
    if mode != "disabled":
        set_named(out, "model.router_replay", REPLAYS, key, mode, "modes")
    elif returned:
        out.leave(RETURNED, returned, "the engine's choices are not used")


def set_kind_of_optimizer(keys: SourceKeys, out: Translation, prefix: str) -> None:
    """Sets the optimizer. `optimizer` is a class of torch or a name of Megatron. Options of Megatron alone have a
    separate section."""
    own = prefix + "override_optimizer_config."
    given = {"optimizer": keys.get(prefix + "optimizer", "adam"), **megatron_options(keys, own)}
    set_megatron_optimizer(given, out, own)


# Algorithm, loss and optimizer.

A, R = ACTOR, ROLLOUT
POLICIES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geometric_mean",
    "gpg": "reinforce",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "dr_grpo"}
DECAYS = {"constant": "constant", "cosine": "cosine", "linear": "linear"}


def set_micro(
    keys: SourceKeys, out: Translation, role: str, tokens: str, sequences: str, dynamic: bool, longest: int
) -> None:
    """Sets the micro-batches by tokens, or else by samples of the longest length."""
    most, per_gpu = keys.get(tokens), keys.get(sequences)
    of_all = keys.get(sequences.removesuffix("_per_gpu"))
    if per_gpu in NOTHING and of_all not in NOTHING:
        gpus = keys.count("trainer.nnodes", 1) * keys.count("trainer.n_gpus_per_node", 8)
        per_gpu = max(count(of_all) * slices_of(keys) // gpus, 1)
    if dynamic:
        of_critic = 32768 if role == "critic" else 16384
        out.set(f"{role}.micro_batch_tokens", count(of_critic if most is None else most), tokens)
    elif per_gpu not in NOTHING:
        out.set(f"{role}.micro_batch_tokens", count(per_gpu) * longest, f"{sequences} x {longest} tokens")


def named_estimator(keys: SourceKeys) -> str:
    return keys.text("algorithm.adv_estimator", "gae")


ALONE = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Algorithms of verl that give a single sample of a prompt its reward as advantage."""


def set_algorithm(keys: SourceKeys, out: Translation) -> None:
    """Sets the algorithm and its advantages."""
    name = named_estimator(keys)
    if name not in ALGORITHMS:
        out.differs("algorithm.adv_estimator", name, "no algorithm here has this estimator")
        return
    algorithm = ALGORITHMS[name]
    if algorithm in ALONE and out.get("batch.samples_per_prompt") == 1:
        _take_rewards(keys, out, name)
        return
    out.set("algorithm", algorithm, "algorithm.adv_estimator")
    if algorithm == "pass_at_k":
        out.set("advantages.k", out.get("batch.samples_per_prompt"), "algorithm.adv_estimator: the best of all samples")
    by_std = keys.truth("algorithm.norm_adv_by_std_in_grpo", True)
    if algorithm in WITH_STD and not by_std:
        out.set("advantages.normalize_std", False, "algorithm.norm_adv_by_std_in_grpo")
    if algorithm in WHITENED:
        out.set("advantages.whiten", True, "verl always whitens")
    if algorithm == "gpg":
        out.set("advantages.scale_by", "rewarded", "algorithm.adv_estimator: verl counts rewards other than 0")
    if algorithm == "optimal_token_baseline" and not keys.truth(A + "calculate_sum_pi_squared", False):
        raise UntranslatableError(f"{name} requires {A}calculate_sum_pi_squared=True")
    gamma, gae_lambda = keys.real("algorithm.gamma", 1.0), keys.real("algorithm.lam", 1.0)
    if algorithm in DISCOUNTED and gamma != 1:
        out.set("advantages.gamma", gamma, "algorithm.gamma")
    if algorithm == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, "algorithm.lam, default 1")
    _set_selection(keys, out)


def _take_rewards(keys: SourceKeys, out: Translation, name: str) -> None:
    if keys.truth("algorithm.use_kl_in_reward", False):
        out.differs("algorithm.use_kl_in_reward", True, "a single sample per prompt has its KL per token here")
    whitens = ALGORITHMS[name] in WHITENED
    take_rewards(out, f"algorithm.adv_estimator {name}", R + "n", whitens=whitens)
    for key in ("norm_adv_by_std_in_grpo", "gamma", "lam"):
        keys.get("algorithm." + key)


SELECTING = "main_dapo"
"""The only program of verl that selects groups of samples."""


def selects_groups(keys: SourceKeys) -> bool:
    """Returns whether the program selects groups. A config without a program is taken for one that does."""
    return keys.truth("algorithm.filter_groups.enable", False) and keys.text("-m", SELECTING).endswith(SELECTING)


def _set_selection(keys: SourceKeys, out: Translation) -> None:
    if keys.truth("algorithm.filter_groups.enable", False) and not selects_groups(keys):
        out.leave("algorithm.filter_groups.enable", True, f"only verl's program {SELECTING} reads it")
        out.notes.append(
            f"algorithm.filter_groups: only {SELECTING} reads it. Set batch.dynamic_sampling to select here"
        )
    elif selects_groups(keys):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", "algorithm.filter_groups.enable")
        most = keys.count("algorithm.filter_groups.max_num_gen_batches", 0)
        size = count(keys.get("data.gen_batch_size") or out.get("batch.prompts_per_step"))
        if most > 0:
            drawn = max(most * size / out.get("batch.prompts_per_step"), 1)
            out.set(
                "batch.dynamic_sampling.max_drawn", drawn, "max_num_gen_batches x gen_batch_size / train_batch_size"
            )


def set_loss(keys: SourceKeys, out: Translation) -> None:
    """Sets the policy loss."""
    mode = keys.get(A + "policy_loss.loss_mode", "vanilla")
    if not set_named(out, "loss.policy", POLICIES, A + "policy_loss.loss_mode", mode, "policy losses"):
        return
    bound = keys.get(A + "clip_ratio_c", 3.0)
    if mode == "vanilla" and bound not in NOTHING:
        given = A + "clip_ratio_c" in keys
        out.set("loss.dual_clip", real(bound), A + "clip_ratio_c" + ("" if given else ", default"))
    if str(mode).startswith("dppo_"):
        out.set("loss.dppo.divergence", str(mode).removeprefix("dppo_"), A + "policy_loss.loss_mode")
        if bound not in NOTHING:
            out.set("loss.dppo.ratio_max", real(bound), A + "clip_ratio_c, default 3")
    mean = keys.text(A + "loss_agg_mode", "token-mean")
    if mode in ("gspo", "geo_mean"):
        out.leave(A + "loss_agg_mode", mean, f"the loss {mode} always has the mean over sequences")
        mean = "seq-mean-token-mean"
    for bound in ("tau_pos", "tau_neg"):
        given = keys.get(f"{A}policy_loss.{bound}")
        if given not in NOTHING and real(given) == out.get(f"loss.sapo.{bound}"):
            out.leave(f"{A}policy_loss.{bound}", given, f"loss.sapo.{bound} has the same value")
    set_named(out, "loss.normalization", MEANS, A + "loss_agg_mode", mean, "means")
    factor = keys.get(A + "loss_scale_factor")
    if mean == "seq-mean-token-sum-norm" and factor not in (None, out.get("rollout.sampling.max_response_tokens")):
        out.differs(A + "loss_scale_factor", factor, "sums are always divided by the longest response here")


OLD_KEYS = (
    *(A + "ppo_micro_batch_size", R + "log_prob_micro_batch_size", "critic.ppo_micro_batch_size"),
    *("actor_rollout_ref.ref.log_prob_micro_batch_size", "critic.forward_micro_batch_size", "data.val_batch_size"),
    *(A + "fsdp_config.grad_offload", "critic.model.fsdp_config.grad_offload", R + "micro_batch_size"),
    *(R + "n_agent", R + "n_val", R + "val_temperature"),
)
"""Keys of scripts for versions before 0.4."""
NEW_KEYS = (
    *("algorithm.use_kl_in_reward", A + "clip_ratio_low", A + "clip_ratio_high", A + "clip_ratio_c"),
    *(A + "loss_agg_mode", "trainer.device", "algorithm.norm_adv_by_std_in_grpo", A + "strategy", R + "mode"),
    *("actor_rollout_ref.model.lora_rank", R + "multi_turn.enable", R + "calculate_log_probs", "data.return_raw_chat"),
    *("actor_rollout_ref.model.use_fused_kernels", "trainer.resume_from_path"),
)
"""Keys that version 0.4 added, or that scripts began to use then."""
VERSIONS = "--source-version"
TREE = "verl/trainer/config/ppo_trainer.yaml"


def is_older(keys: SourceKeys, out: Translation) -> bool:
    """Returns whether the source is for verl before version 0.4, and says how that was decided.

    There the penalty is in the reward unless it is in the loss. Nothing bounds the loss of negative advantages, and
    the entropy has the coefficient 0.001.
    """
    given, tree = keys.get(VERSIONS), file_of_tree(keys.folder, TREE)
    if given not in NOTHING:
        older, why = _is_before_0_4(str(given)), f"{VERSIONS} {given}"
    elif tree is not None:
        older, why = "use_kl_in_reward" not in tree.read_text(encoding="utf-8"), f"{TREE} beside the script"
    else:
        new = [key for key in NEW_KEYS if key in keys]
        old = [key for key in OLD_KEYS if key in keys]
        older = bool(old) and not new
        why = f"its key {(old if older else new or ['?'])[0]}" if old or new else "no key of an older one"
    if older or given not in NOTHING or tree is not None:
        name = "before 0.4" if older else "0.4 or later"
        out.notes.append(f"verl {name} is assumed, by {why} ({VERSIONS} X.Y says another)")
    return older


def _is_before_0_4(version: str) -> bool:
    parts = version.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise UntranslatableError(f"{VERSIONS} {version}: expected a version such as 0.3")
    return (int(parts[0]), int(parts[1])) < (0, 4)


def has_kl_in_reward(keys: SourceKeys) -> bool:
    """Returns whether rewards have a KL penalty. Before version 0.4 they have one unless the loss has one."""
    if keys.older:
        return not keys.truth(A + "use_kl_loss", False)
    return keys.truth("algorithm.use_kl_in_reward", False)


def set_kl(keys: SourceKeys, out: Translation) -> None:
    """Sets the KL penalty and the sizes of the reference."""
    in_loss, in_reward = keys.truth(A + "use_kl_loss", False), has_kl_in_reward(keys)
    coef = keys.real(A + "kl_loss_coef", 0.001)
    kind = keys.get(A + "kl_loss_type", "low_var_kl")
    other, reward_kind = keys.get("algorithm.kl_ctrl.kl_coef", 0.001), keys.get("algorithm.kl_penalty", "kl")
    if in_loss and in_reward and coef and real(other):
        out.differs("algorithm.use_kl_in_reward", True, "the penalty is already in the loss; one place is possible")
    if in_loss and coef:
        out.set("loss.kl.coef", coef, A + "kl_loss_coef")
        out.set("loss.kl.estimator", estimator(kind), A + "kl_loss_type")
        out.set("loss.kl.unbiased", False, "verl does not multiply it by the ratio")
    elif in_reward and real(other):
        out.set("loss.kl.coef", real(other), "algorithm.kl_ctrl.kl_coef")
        out.set("loss.kl.estimator", estimator(reward_kind), "algorithm.kl_penalty")
        origin = "algorithm.use_kl_in_reward"
        out.set("loss.kl.where", "reward", "verl before 0.4 without use_kl_loss" if keys.older else origin)
        if keys.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            target = {
                "target": keys.real("algorithm.kl_ctrl.target_kl", 0.1),
                "horizon": keys.count("algorithm.kl_ctrl.horizon", 10000),
            }
            out.set("loss.kl.adaptive", target, "algorithm.kl_ctrl.type")
    if in_loss or in_reward:
        tokens = keys.get("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", out.get("actor.micro_batch_tokens"))
        out.set("reference.micro_batch_tokens", count(tokens), "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
        set_sizes_of_frozen(keys, out, "reference", "actor_rollout_ref.ref.megatron.")


def set_older_defaults(keys: SourceKeys, out: Translation) -> None:
    """Sets the clip and the entropy of verl before version 0.4."""
    if not keys.older:
        return
    bound = keys.get(A + "clip_ratio", 0.2)
    for end in ("low", "high"):
        if f"{A}clip_ratio_{end}" not in keys:
            out.set(f"loss.clip_{end}", real(bound), A + "clip_ratio")
    if A + "clip_ratio_c" not in keys:
        out.settings.pop("loss.dual_clip", None)
    if A + "entropy_coeff" not in keys:
        out.set(
            "loss.entropy_coef",
            keys.tree.defaults.get(A + "entropy_coeff", 0.001),
            A + "entropy_coeff, default before 0.4",
        )
    keys.assumed[A + "entropy_coeff"] = 0.001


def set_optimizer(keys: SourceKeys, out: Translation, prefix: str, role: str, lr: float) -> None:
    """Sets the optimizer. verl's learning rate follows training steps. A step has several updates here."""
    here = f"{role}.optimizer."
    names = ("lr_scheduler_type", "lr_decay_style", "warmup_style")
    decay_key, decay = keys.first(*(prefix + name for name in names), default="constant")
    decay = "constant" if decay in NOTHING else str(decay)
    rules = (
        Pair(prefix + "lr", here + "lr", lr),
        Pair(prefix + "weight_decay", here + "weight_decay", 0.01),
        Pair(prefix + "clip_grad", here + "clip_grad", 1.0),
        Pair(prefix + "min_lr", here + "min_lr"),
    )
    apply(rules, keys, out)
    if decay in DECAYS:
        out.set(here + "decay", DECAYS[decay], decay_key)
    else:
        out.differs(decay_key, decay, f"schedules of the learning rate here: {', '.join(DECAYS)}")
    _set_clip_of_gradients(keys, out, prefix, role)
    least = keys.get(prefix + "min_lr_ratio")
    if least not in NOTHING and real(least):
        out.set(here + "min_lr", real(least) * out.get(here + "lr"), prefix + "min_lr_ratio")
    set_betas(keys, out, prefix + "betas", role)
    steps = keys.get(prefix + "lr_warmup_steps", -1)
    ratio = real(keys.get(prefix + "lr_warmup_steps_ratio", 0.0) or 0)
    warmup = count(steps) if steps not in NOTHING and count(steps) >= 0 else int(ratio * out.get("steps"))
    if warmup:
        updates = out.get("batch.mini_batches") * out.get("batch.epochs")
        out.set(here + "warmup_steps", warmup * updates, f"{warmup} training steps with {updates} updates each")
    elif steps not in NOTHING and not ratio:
        out.leave(prefix + "lr_warmup_steps", steps, "no warm-up")


def _set_clip_of_gradients(keys: SourceKeys, out: Translation, prefix: str, role: str) -> None:
    """Sets the bound of the gradient's norm from its other name. One of both counts, by backend and version."""
    key = prefix.removesuffix("optim.") + "grad_clip"
    bound = keys.get(key)
    if bound in NOTHING:
        return
    if prefix + "clip_grad" in keys and real(bound) != real(keys.get(prefix + "clip_grad")):
        out.differs(key, bound, f"{prefix}clip_grad has another value; expected one bound of the gradient's norm")
    else:
        out.set(f"{role}.optimizer.clip_grad", real(bound), key)


def set_critic(keys: SourceKeys, out: Translation) -> None:
    """Sets the critic with its optimizer."""
    set_optimizer(keys, out, "critic.optim.", "critic", 1e-5)
    rules = (
        Pair("critic.model.path", "critic.path"),
        Pair("critic.cliprange_value", "critic.value_clip", 0.5),
        Pair("trainer.critic_warmup", "critic.critic_warmup_steps", 0),
        Pair("critic.megatron.tensor_model_parallel_size", "critic.parallel.tp"),
        Pair("critic.megatron.pipeline_model_parallel_size", "critic.parallel.pp"),
        Pair("critic.megatron.context_parallel_size", "critic.parallel.cp"),
        Pair("critic.megatron.expert_model_parallel_size", "critic.parallel.ep"),
        Pair("critic.megatron.expert_tensor_parallel_size", "critic.parallel.etp"),
    )
    apply(rules, keys, out)
    dynamic = keys.truth("critic.use_dynamic_bsz", keys.get(A + "use_dynamic_bsz", False))
    longest = out.get("rollout.max_context_tokens")
    tokens, sequences = "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size_per_gpu"
    set_micro(keys, out, "critic", tokens, sequences, dynamic, longest)
    set_lora(keys, out, "critic.model.", out.get("actor.backend") != "fsdp", "critic.lora")
    own = keys.get("critic.ppo_mini_batch_size")
    if own not in (None, keys.get(A + "ppo_mini_batch_size", 256)):
        out.differs("critic.ppo_mini_batch_size", own, "actor and critic have the same mini-batches here")


# Rewards: functions, a classifier, and penalties for long responses.

MODEL = "reward.reward_model."
MANAGER_KEYS = ("reward_manager.name", "reward_model.reward_manager")
MANAGERS = ("naive", "dapo", "prime", "batch", "rate_limited")


def set_reward(keys: SourceKeys, out: Translation) -> None:
    """Sets reward functions, a reward model, and penalties."""
    usual = "dapo" if keys.text("-m", "").endswith(SELECTING) else "naive"
    manager_key, manager = keys.first("reward.reward_manager.name", *MANAGER_KEYS, default=usual)
    path_key, path = keys.first("reward.custom_reward_function.path", "custom_reward_function.path")
    name = keys.first("reward.custom_reward_function.name", "custom_reward_function.name", default="compute_score")[1]
    near = None if path in NOTHING or Path(str(path)).is_file() else keys.file(str(path))
    function = None if path in NOTHING else f"{near or path}:{name}"
    scored = truth(keys.first(MODEL + "enable", "reward_model.enable", default=False)[1])
    if scored:
        _set_model(keys, out)
        if function is not None:
            out.differs(path_key, path, "a reward model gives the whole reward here, without a function")
    elif manager == "gdpo":
        _set_parts(keys, out, function)
    elif function is not None:
        out.set("reward.function", function, "custom_reward_function.path, .name")
        options = keys.under("custom_reward_function.reward_kwargs.")
        options |= keys.under("reward.custom_reward_function.reward_kwargs.")
        if options:
            out.set("reward.options", options, "custom_reward_function.reward_kwargs")
    else:
        set_selected_reward(keys, out)
    if manager not in (*MANAGERS, "gdpo"):
        out.differs(manager_key, manager, "your own manager becomes a reward function here", REWARD)
    elif manager_key in keys:
        out.leave(manager_key, manager, "it only calls the reward functions")
    _set_penalty(keys, out, manager)
    if keys.truth("actor_rollout_ref.rollout.multi_turn.enable", False):
        key = "actor_rollout_ref.rollout.multi_turn.enable"
        out.differs(key, True, "turns come from an environment here: env.function", ENVIRONMENT)


def _set_parts(keys: SourceKeys, out: Translation, function: str | None) -> None:
    """Sets several numbers of one function as separate rewards."""
    named = keys.get("algorithm.gdpo_reward_keys")
    if function is None or not isinstance(named, list) or len(named) < 2:
        raise UntranslatableError("gdpo needs a custom reward function and at least two algorithm.gdpo_reward_keys")
    weights = keys.get("algorithm.gdpo_reward_weights") or [1.0] * len(named)
    if len(weights) != len(named):
        raise UntranslatableError(f"{len(weights)} weights for {len(named)} rewards")
    parts = [
        {"function": function, "score_key": str(key), "name": str(key), "weight": real(weight)}
        for key, weight in zip(named, weights, strict=True)
    ]
    out.set("reward.functions", parts, "algorithm.gdpo_reward_keys of custom_reward_function")


def _set_model(keys: SourceKeys, out: Translation) -> None:
    """Sets a classifier as the whole reward. It is placed on all GPUs, or on separate GPUs after them."""
    path = keys.first(MODEL + "model_path", "reward_model.model.path")[1]
    if path in NOTHING:
        raise UntranslatableError(f"{MODEL}model_path: expected the model's checkpoint")
    out.set("reward_model.path", str(path), MODEL + "model_path: a classifier with one label")
    out.set("reward.functions", [], "the model gives the whole reward")
    if keys.truth(MODEL + "enable_resource_pool", False):
        number = keys.count(MODEL + "nnodes", 0) * keys.count(MODEL + "n_gpus_per_node", 8)
        out.place(["reward_model"], ranks(out.world_size, number), MODEL + "nnodes x n_gpus_per_node, after the others")
        out.world_size += number
    else:
        out.place(["reward_model"], out.placed["actor"], MODEL + "enable_resource_pool is off")
    size = "rollout.tensor_model_parallel_size"
    tp = count(keys.first(MODEL + size, "reward_model." + size, default=2)[1])
    out.set("reward_model.backend", "megatron", "the model is split by tensor parallelism")
    out.set("reward_model.parallel.tp", tp, MODEL + "rollout.tensor_model_parallel_size")


WITH_PENALTY = ("seq_reward", "seq_final_reward")
"""Metrics that select groups, with the penalty for long responses."""


def _set_penalty(keys: SourceKeys, out: Translation, manager: Any) -> None:
    """Sets the penalty for long responses. In verl only the reward manager `dapo` has it."""
    buffer: dict[str, Any] = {}
    for section in ("reward.reward_kwargs.", "reward_model.reward_kwargs.", "reward.reward_manager.reward_kwargs."):
        given = keys.under(section + "overlong_buffer_cfg.")
        buffer |= {name: (section + "overlong_buffer_cfg.", value) for name, value in given.items()}
    for section in ("reward_model.overlong_buffer.", "reward.overlong_buffer."):
        buffer |= {name: (section, value) for name, value in keys.under(section).items()}
    for key in ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"):
        longest = keys.get(key)
        if longest not in NOTHING and count(longest) == out.get("rollout.sampling.max_response_tokens"):
            out.leave(key, longest, "the longest response")
        elif longest not in NOTHING:
            out.differs(key, longest, "a penalty for long responses is measured from the longest response here")
    active = "enable" in buffer and truth(buffer["enable"][1])
    if active and manager == "dapo":
        tokens, factor = (buffer.get(name, ("", None))[1] for name in ("len", "penalty_factor"))
        set_overlong_penalty(out, tokens, 1.0 if factor is None else factor, buffer["enable"][0] + "*")
        metric = keys.get("algorithm.filter_groups.metric")
        if selects_groups(keys) and metric in WITH_PENALTY:
            reason = "rewards without the penalty for long responses select groups here, like acc"
            out.differs("algorithm.filter_groups.metric", metric, reason)
        keys.assumed |= {section + "penalty_factor": 1.0 for section, _ in buffer.values()}
        for name in {*buffer} - {"enable", "len", "penalty_factor"}:
            out.leave(buffer[name][0] + name, buffer[name][1], "logs only")
        return
    reason = "only the reward manager dapo uses it" if active else "enable is not true"
    for name, (section, value) in buffer.items():
        out.leave(section + name, value, reason)


# On-policy distillation from a teacher.

TEACHER_PREFIX = "distillation."
LOSS = TEACHER_PREFIX + "distillation_loss."
TEACHERS = TEACHER_PREFIX + "teacher_models."
MAX_LOSS = 10.0
FORWARD = "forward_kl_topk"
DRAWN = ("kl", "k1")
"""Distances that are, as an advantage, log p - log q of the sampled token."""
SPEED = "settings of the teacher's server there; here it is an evaluated model"


def set_teacher(keys: SourceKeys, out: Translation) -> None:
    """Sets the teacher. It must be called last, as the teacher's ranks follow all others."""
    if not keys.truth(TEACHER_PREFIX + "enabled", False):
        keys.under(TEACHER_PREFIX)
        return
    _set_models(keys, out)
    if keys.truth(LOSS + "use_task_rewards", True):
        out.differs(LOSS + "use_task_rewards", True, "two losses with separate clips are not supported")
    else:
        out.set("algorithm", "distillation", LOSS + "use_task_rewards: rewards are not used")
        for path in [path for path in out.settings if path.startswith("advantages.")]:
            del out.settings[path]
    _set_distance(keys, out)
    own = keys.text(LOSS + "policy_loss_mode", "vanilla")
    if own != "vanilla":
        out.differs(LOSS + "policy_loss_mode", own, "the policy loss is always loss.policy")
    ends = (LOSS + "clip_ratio_low", LOSS + "clip_ratio_high")
    set_clip(out, *(keys.get(end, 0.2) for end in ends), *ends)


def _set_distance(keys: SourceKeys, out: Translation) -> None:
    mode, by_gradient = keys.text(LOSS + "loss_mode", "k3"), keys.truth(LOSS + "use_policy_gradient", False)
    if mode == FORWARD and not by_gradient:
        _set_forward(keys, out)
        return
    out.set("teacher.where", "advantage", LOSS + "use_policy_gradient")
    if mode not in DRAWN or not by_gradient:
        reason = "supported: k1 with use_policy_gradient (teacher.where: advantage), and docs/roles.md"
        out.differs(LOSS + "loss_mode", f"{mode}, use_policy_gradient {by_gradient}", reason)
    elif out.get("batch.mini_batches") * out.get("batch.epochs") > 1:
        reason = "it uses the weights of each mini-batch there, and of the step's start here; equal for one mini-batch"
        out.differs(LOSS + "use_policy_gradient", True, reason)
    bound = keys.get(LOSS + "loss_max_clamp", MAX_LOSS)
    if bound not in NOTHING:
        out.set("teacher.max_distance", real(bound), f"{LOSS}loss_max_clamp, default {MAX_LOSS}")
    for key in ("topk", "log_prob_min_clamp"):
        if LOSS + key in keys:
            out.leave(LOSS + key, keys.get(LOSS + key), "only for losses over several tokens")


def _set_forward(keys: SourceKeys, out: Translation) -> None:
    """Sets a loss over the teacher's likeliest tokens. It replaces the policy loss with all its terms."""
    out.set("teacher.where", "loss", LOSS + "use_policy_gradient: off")
    out.set("teacher.kl", "forward", LOSS + "loss_mode")
    out.set("teacher.rest", False, LOSS + "loss_mode: the sum over the topk tokens only")
    out.set("teacher.top_k", keys.count(LOSS + "topk", 128), LOSS + "topk, default 128")
    bounds = (("loss_max_clamp", "max_distance", MAX_LOSS), ("log_prob_min_clamp", "min_logprob", -10.0))
    for key, path, default in bounds:
        bound = keys.get(LOSS + key, default)
        if bound not in NOTHING:
            out.set(f"teacher.{path}", real(bound), f"{LOSS}{key}, default {default}")
    for key in ("use_chunked_topk", "chunked_topk_chunk_size"):
        if LOSS + key in keys:
            out.leave(LOSS + key, keys.get(LOSS + key), "memory only")
    for path in [path for path in out.settings if path.startswith(("loss.kl.", "loss.entropy_coef"))]:
        del out.settings[path]


def _set_models(keys: SourceKeys, out: Translation) -> None:
    given = keys.under(TEACHERS)
    names = {name.split(".")[0] for name in given if name.endswith(".model_path")}
    if not names:
        raise UntranslatableError(f"{TEACHERS}*.model_path: expected a teacher's checkpoint")
    nodes, per_node = (keys.count(TEACHER_PREFIX + "nnodes", 0), keys.count(TEACHER_PREFIX + "n_gpus_per_node", 8))
    sizes = [f"{name}.inference.tensor_model_parallel_size" for name in sorted(names)]
    keys.assumed |= {TEACHERS + size: 2 for size in sizes}
    tp = count(given.get(sizes[0], 2))
    for size in (size for size in sizes[1:] if size in given):
        out.leave(TEACHERS + size, given[size], "speed only: all teachers have the size of the first one")
    out.place(
        ["teacher"],
        ranks(out.world_size, nodes * per_node),
        f"{TEACHER_PREFIX}nnodes x n_gpus_per_node, after the others",
    )
    out.world_size += nodes * per_node
    out.set("teacher.parallel.tp", tp, TEACHERS + "*.inference.tensor_model_parallel_size")
    out.set("teacher.parallel.sequence_parallel", tp > 1, "with tensor parallelism")
    out.set("teacher.backend", "megatron", "the model is split by tensor parallelism")
    if len(names) == 1:
        out.set("teacher.path", str(given[f"{min(names)}.model_path"]), TEACHERS + "*.model_path")
    else:
        paths = {str(given.get(f"{name}.key", name)): str(given[f"{name}.model_path"]) for name in sorted(names)}
        out.set("teacher.path", paths, TEACHERS + "*.key, *.model_path")
        out.set(
            "teacher.column", keys.text(TEACHER_PREFIX + "teacher_key", "data_source"), TEACHER_PREFIX + "teacher_key"
        )
    for name, value in given.items():
        if not name.endswith((".model_path", ".key", ".tensor_model_parallel_size")):
            out.leave(TEACHERS + name, value, SPEED)
