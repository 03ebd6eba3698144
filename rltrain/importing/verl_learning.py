"""Of verl's keys what is learned: algorithm, loss, optimizer."""

from rltrain.importing.batches import (
    ALGORITHMS,
    DISCOUNTED,
    WHITENED,
    WITH_STD,
    take_rewards,
)
from rltrain.importing.conversions import NOTHING, count, estimator, one_of, pair, real, text, truth
from rltrain.importing.translation import Rule, SourceKeys, Translation, UntranslatableError, apply
from rltrain.importing.verl_model import set_lora

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
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
    """Micro-batches: by tokens, else by samples, of which each may be the longest."""
    most, per_gpu = keys.get(tokens), keys.get(sequences)
    if dynamic:
        of_critic = 32768 if role == "critic" else 16384
        out.set(f"{role}.micro_batch_tokens", count(of_critic if most is None else most), tokens)
    elif per_gpu not in NOTHING:
        out.set(f"{role}.micro_batch_tokens", count(per_gpu) * longest, f"{sequences} x {longest} tokens")


def named_estimator(keys: SourceKeys) -> str:
    return str(keys.get("algorithm.adv_estimator", "gae"))


ALONE = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Which in verl leave a sample that is alone its reward, where there is nothing to compare it with."""


def set_algorithm(keys: SourceKeys, out: Translation) -> None:
    name = named_estimator(keys)
    if name not in ALGORITHMS:
        out.differs("algorithm.adv_estimator", name, "no algorithm here estimates advantages so")
        return
    algorithm = ALGORITHMS[name]
    if algorithm in ALONE and out.get("batch.samples_per_prompt") == 1:
        _take_rewards(keys, out, name)
        return
    out.set("algorithm", algorithm, "algorithm.adv_estimator")
    if algorithm == "pass_at_k":
        out.set("advantages.k", out.get("batch.samples_per_prompt"), "algorithm.adv_estimator: of all samples the best")
    by_std = truth(keys.get("algorithm.norm_adv_by_std_in_grpo", True))
    if algorithm in WITH_STD and not by_std:
        out.set("advantages.normalize_std", False, "algorithm.norm_adv_by_std_in_grpo")
    if algorithm in WHITENED:
        out.set("advantages.whiten", True, "verl whitens always")
    if algorithm == "gpg":
        out.set("advantages.scale_by", "rewarded", "algorithm.adv_estimator: verl counts rewards that are not 0")
    if algorithm == "optimal_token_baseline" and not truth(keys.get(A + "calculate_sum_pi_squared", False)):
        raise UntranslatableError(f"{name} requires {A}calculate_sum_pi_squared=True")
    gamma, gae_lambda = real(keys.get("algorithm.gamma", 1.0)), real(keys.get("algorithm.lam", 1.0))
    if algorithm in DISCOUNTED and gamma != 1:
        out.set("advantages.gamma", gamma, "algorithm.gamma")
    if algorithm == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, "algorithm.lam, whose default is 1")
    _set_selection(keys, out)


def _take_rewards(keys: SourceKeys, out: Translation, name: str) -> None:
    if truth(keys.get("algorithm.use_kl_in_reward", False)):
        out.differs("algorithm.use_kl_in_reward", True, "a sample that is alone has its KL token by token here")
    whitens = ALGORITHMS[name] in WHITENED
    take_rewards(out, f"algorithm.adv_estimator {name}", R + "n", whitens=whitens)
    for key in ("norm_adv_by_std_in_grpo", "gamma", "lam"):
        keys.get("algorithm." + key)


def _set_selection(keys: SourceKeys, out: Translation) -> None:
    if truth(keys.get("algorithm.filter_groups.enable", False)):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", "algorithm.filter_groups.enable")
        most = count(keys.get("algorithm.filter_groups.max_num_gen_batches", 0))
        size = count(keys.get("data.gen_batch_size") or out.get("batch.prompts_per_step"))
        if most > 0:
            drawn = max(most * size / out.get("batch.prompts_per_step"), 1)
            out.set(
                "batch.dynamic_sampling.max_drawn", drawn, "max_num_gen_batches x gen_batch_size / train_batch_size"
            )


def set_loss(keys: SourceKeys, out: Translation) -> None:
    policy = one_of(POLICIES, "policy losses")
    mode = keys.get(A + "policy_loss.loss_mode", "vanilla")
    try:
        out.set("loss.policy", policy(mode), A + "policy_loss.loss_mode")
    except UntranslatableError as reason:
        out.differs(A + "policy_loss.loss_mode", mode, str(reason))
        return
    bound = keys.get(A + "clip_ratio_c", 3.0)
    if mode == "vanilla" and bound not in NOTHING:
        given = A + "clip_ratio_c" in keys
        out.set("loss.dual_clip", real(bound), A + "clip_ratio_c" + ("" if given else ", on by default"))
    if str(mode).startswith("dppo_"):
        out.set("loss.dppo.divergence", str(mode).removeprefix("dppo_"), A + "policy_loss.loss_mode")
        if bound not in NOTHING:
            out.set("loss.dppo.ratio_max", real(bound), A + "clip_ratio_c, by default 3")
    mean = str(keys.get(A + "loss_agg_mode", "token-mean"))
    if mode in ("gspo", "geo_mean"):
        mean = "seq-mean-token-mean"
    if mean not in MEANS:
        out.differs(A + "loss_agg_mode", mean, f"means here are those of {', '.join(MEANS)}")
    else:
        out.set("loss.normalization", MEANS[mean], A + "loss_agg_mode")
    factor = keys.get(A + "loss_scale_factor")
    if mean == "seq-mean-token-sum-norm" and factor not in (None, out.get("rollout.sampling.max_response_tokens")):
        out.differs(A + "loss_scale_factor", factor, "sums are divided by the longest response here")


def set_kl(keys: SourceKeys, out: Translation) -> None:
    in_loss, in_reward = truth(keys.get(A + "use_kl_loss", False)), truth(keys.get("algorithm.use_kl_in_reward", False))
    coef = real(keys.get(A + "kl_loss_coef", 0.001))
    kind = keys.get(A + "kl_loss_type", "low_var_kl")
    other, reward_kind = keys.get("algorithm.kl_ctrl.kl_coef", 0.001), keys.get("algorithm.kl_penalty", "kl")
    if in_loss and in_reward and coef and real(other):
        out.differs("algorithm.use_kl_in_reward", True, "the penalty stands in the loss already, and here in one place")
    if in_loss and coef:
        out.set("loss.kl.coef", coef, A + "kl_loss_coef")
        out.set("loss.kl.estimator", estimator(kind), A + "kl_loss_type")
        out.set("loss.kl.unbiased", False, "verl does not weigh it by the ratio")
    elif in_reward and real(other):
        out.set("loss.kl.coef", real(other), "algorithm.kl_ctrl.kl_coef")
        out.set("loss.kl.estimator", estimator(reward_kind), "algorithm.kl_penalty")
        out.set("loss.kl.where", "reward", "algorithm.use_kl_in_reward")
        if keys.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            target = {
                "target": real(keys.get("algorithm.kl_ctrl.target_kl", 0.1)),
                "horizon": count(keys.get("algorithm.kl_ctrl.horizon", 10000)),
            }
            out.set("loss.kl.adaptive", target, "algorithm.kl_ctrl.type")
    if in_loss or in_reward:
        tokens = keys.get("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", out.get("actor.micro_batch_tokens"))
        out.set("reference.micro_batch_tokens", count(tokens), "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu")
        _reference_parallel(keys, out)


def _reference_parallel(keys: SourceKeys, out: Translation) -> None:
    names = {
        "tensor_model": "tp",
        "pipeline_model": "pp",
        "context": "cp",
        "expert_model": "ep",
        "expert_tensor": "etp",
    }
    prefix = "actor_rollout_ref.ref.megatron."
    given = {here: keys.get(f"{prefix}{name}_parallel_size") for name, here in names.items()}
    own = {here: count(size) for here, size in given.items() if size not in NOTHING}
    actor = {here: out.get(f"actor.parallel.{here}") for here in names.values()}
    if any(actor[here] != size for here, size in own.items()):
        for here, size in {**actor, **own}.items():
            if size is not None:
                out.set(f"reference.parallel.{here}", size, prefix + "*")


def set_optimizer(keys: SourceKeys, out: Translation, prefix: str, role: str, lr: float) -> None:
    """verl's learning rate follows training steps, of which each has several updates here."""
    here = f"{role}.optimizer."
    decay = str(keys.first(prefix + "lr_scheduler_type", prefix + "lr_decay_style", default="constant")[1])
    rules = (
        Rule(prefix + "lr", here + "lr", lr, real),
        Rule(prefix + "weight_decay", here + "weight_decay", 0.01, real),
        Rule(prefix + "clip_grad", here + "clip_grad", 1.0, real),
        Rule(prefix + "min_lr", here + "min_lr", None, real),
    )
    apply(rules, keys, out)
    if decay in DECAYS:
        out.set(here + "decay", DECAYS[decay], prefix + "lr_scheduler_type")
    else:
        out.differs(prefix + "lr_scheduler_type", decay, f"learning rates here are {', '.join(DECAYS)}")
    least = keys.get(prefix + "min_lr_ratio")
    if least not in NOTHING and real(least):
        out.set(here + "min_lr", real(least) * out.get(here + "lr"), prefix + "min_lr_ratio")
    first, second = pair(keys.get(prefix + "betas", [0.9, 0.999]))
    out.set(here + "beta1", first, prefix + "betas")
    out.set(here + "beta2", second, prefix + "betas")
    steps = keys.get(prefix + "lr_warmup_steps", -1)
    ratio = real(keys.get(prefix + "lr_warmup_steps_ratio", 0.0) or 0)
    warmup = count(steps) if steps not in NOTHING and count(steps) >= 0 else int(ratio * out.get("steps"))
    if warmup:
        updates = out.get("batch.mini_batches") * out.get("batch.epochs")
        out.set(here + "warmup_steps", warmup * updates, f"{warmup} training steps of {updates} updates")


def set_critic(keys: SourceKeys, out: Translation) -> None:
    set_optimizer(keys, out, "critic.optim.", "critic", 1e-5)
    rules = (
        Rule("critic.model.path", "critic.path", None, text),
        Rule("critic.cliprange_value", "critic.value_clip", 0.5, real),
        Rule("trainer.critic_warmup", "critic.critic_warmup_steps", 0, count),
        Rule("critic.megatron.tensor_model_parallel_size", "critic.parallel.tp", None, count),
        Rule("critic.megatron.pipeline_model_parallel_size", "critic.parallel.pp", None, count),
    )
    apply(rules, keys, out)
    dynamic = truth(keys.get("critic.use_dynamic_bsz", keys.get(A + "use_dynamic_bsz", False)))
    longest = out.get("rollout.max_context_tokens")
    tokens, sequences = "critic.ppo_max_token_len_per_gpu", "critic.ppo_micro_batch_size_per_gpu"
    set_micro(keys, out, "critic", tokens, sequences, dynamic, longest)
    set_lora(keys, out, "critic.model.", out.get("actor.backend") != "fsdp", "critic.lora")
    own = keys.get("critic.ppo_mini_batch_size")
    if own not in (None, keys.get(A + "ppo_mini_batch_size", 256)):
        out.differs("critic.ppo_mini_batch_size", own, "actor and critic have the same mini-batches here")
