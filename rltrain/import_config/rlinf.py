"""Rules for RLinf's configs for language models. These configs are complete, so defaults seldom matter."""

from math import prod
from typing import Any

from rltrain.config.foreign import RLINF
from rltrain.import_config.influence import Condition, KeyRules, by_pattern, sort_out
from rltrain.import_config.shared_rules import choose_engine, column_of, refuse_action_heads, set_vision
from rltrain.import_config.translation import (
    ALGORITHMS,
    NOTHING,
    WITHOUT_COMPARISON,
    RowCounts,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    estimator,
    number,
    one_of,
    paths,
    real,
    set_clip,
    set_context,
    set_evaluation,
    set_named,
    set_steps,
    set_whitening,
)

SECTIONS = ("cluster", "runner", "algorithm", "actor", "rollout", "data", "reward", "critic", "env", "inference")
PLACED = "cluster.component_placement."
ROLES = {
    "actor": "actor",
    "rollout": "rollout",
    "reward": "reward",
    "critic": "critic",
    "inference": "inference",
    "actor_inference": "inference",
    "env": "env",
    "agent": "env",
}
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "bf16-mixed": "bfloat16", "16": "float16"}
DECAYS = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
TASKS = ("reasoning", "coding_online_rl", "math")
MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
NEVER = 1e6
"""A bound that no mean ratio reaches."""
HARMLESS = by_pattern("""
logs and checkpoint files only: runner.*
ranks are started by torchrun: cluster.*
reading of rows only: data.*
speed or memory of the engine only: rollout.*
speed or memory only: actor.megatron.* actor.optim.*
settings of FSDP: actor.fsdp_config.*
the schedule covers the whole run: actor.lr_sched.*
the checkpoint has the tokenizer: actor.tokenizer.*
shape of the model (read from config.json), or speed: actor.model.*
speed or memory only: actor.* inference.* algorithm.logprob_forward_micro_batch_size
    algorithm.training_batch_size_per_gpu algorithm.rollout_batch_size_per_gpu
    algorithm.val_rollout_batch_size_per_gpu megatron.*
processes of the reward: reward.*
no entropy term: algorithm.entropy_bonus algorithm.calculate_entropy
no penalty: algorithm.kl_penalty_type algorithm.kl_penalty
no correction of weights: algorithm.importance_sampling_clip
no critic: algorithm.gae_lambda algorithm.value_clip algorithm.huber_delta
no discounts: algorithm.gamma
given by clip_ratio_low and clip_ratio_high: algorithm.ratio_clip_eps
steps are given: runner.max_epochs
no critic: critic.*
other sampling settings: algorithm.sampling_params.*
every mini-batch has samples of as many prompts as possible: algorithm.shuffle_rollout
settings of Hydra: hydra.* --*
logs only: profiler.*
""")


SWITCHES = (
    *("algorithm.use_valid_token_scale", "algorithm.normalize_advantages", "algorithm.importance_sampling_fix"),
    *("algorithm.calculate_entropy_loss", "algorithm.recompute_logprobs", "algorithm.max_num_gen_batches"),
)


def conditions(keys: SourceKeys) -> dict[str, Condition]:
    """Returns the checks of reasons that depend on the source's keys."""
    ends = [keys.get(f"algorithm.clip_ratio_{end}") for end in ("low", "high")]
    return {"given by clip_ratio_low and clip_ratio_high": lambda _: not any(end in NOTHING for end in ends)}


def translate(keys: SourceKeys, out: Translation, rows: RowCounts) -> None:
    """Translates a config of RLinf into `out`."""
    refuse_action_heads(keys, "actor.model.model_type", "rollout.model.model_type")
    task = keys.get("runner.task_type", TASKS[0])
    if task not in TASKS:
        raise UntranslatableError(f"expected the task {' or '.join(TASKS)}, which learn from rewards by text")
    keys.get("algorithm.max_num_gen_batches", 1)
    apply(RLINF, keys, out, dtype=one_of(PRECISIONS, "precisions"), decay=one_of(DECAYS, "learning rates"))
    _placement(keys, out)
    _trainer(keys, out)
    _algorithm(keys, out)
    _data(keys, out)
    _reward(keys, out)
    arguments: dict[str, Any] = {}
    if "rollout.gpu_memory_utilization" in keys:
        arguments["mem_fraction_static"] = keys.real("rollout.gpu_memory_utilization")
    if keys.truth("rollout.enforce_eager", False):
        arguments["disable_cuda_graph"] = True
    attention = keys.get("rollout.sglang.attention_backend")
    if attention not in NOTHING:
        arguments["attention_backend"] = str(attention)
    choose_engine(out, keys.text("rollout.rollout_backend", "sglang"), 1, arguments, "rollout.sglang.*, ...")
    steps = keys.get("runner.max_steps")
    named = ("runner.max_steps", "runner.max_epochs")
    set_steps(out, rows, None if steps in NOTHING or number(steps) < 1 else steps, keys.get(named[1]), named)
    _guard(keys, out)
    _scale(keys, out)
    set_vision(out, column_of(keys, out, "data.image_keys"), "data.image_keys")
    if not keys.truth("algorithm.calculate_entropy", True):
        out.settings.pop("loss.entropy_coef", None)
    sort_out(keys, out, KeyRules(HARMLESS, "rlinf", conditions(keys), SWITCHES))


def _guard(keys: SourceKeys, out: Translation) -> None:
    """Sets RLinf's guard for Megatron. It leaves micro-batches with a large mean ratio out of the loss."""
    key = "algorithm.early_stop_imp_ratio"
    bound = keys.get(key)
    if bound in NOTHING:
        return
    if keys.get("actor.training_backend", "megatron") != "megatron" or real(bound) >= NEVER:
        out.leave(key, bound, "only for Megatron, and for bounds within reach of a mean ratio")
    else:
        out.set("on_divergence.max_ratio", real(bound), key)
        out.notes.append(f"{key}: RLinf leaves out one micro-batch of all replicas. Here it is the whole mini-batch")


def _scale(keys: SourceKeys, out: Translation) -> None:
    """Handles RLinf's scale of a mean over tokens, for Megatron.

    If engines have ranks of their own, it divides sums by the longest response times the samples of one replica. Else
    it divides them by the tokens of the whole step.
    """
    key, parallel = "algorithm.use_valid_token_scale", ("tp", "pp", "cp")
    scaled, placed = keys.truth(key, False), out.placed
    if not scaled or keys.get("algorithm.loss_agg_func", "token-mean") != "token-mean":
        return
    longest = keys.count("runner.seq_length", 2048) - out.get("data.max_prompt_tokens")
    if keys.get("actor.training_backend", "megatron") != "megatron":
        out.leave(key, scaled, "only for Megatron")
    elif placed.get("actor") == placed.get("rollout") and out.get("batch.mini_batches") == 1:
        out.leave(key, scaled, "the mean over the tokens of a step with one mini-batch")
    elif placed.get("actor") != placed.get("rollout") and longest == out.get("rollout.sampling.max_response_tokens"):
        replicas = max(out.num_ranks("actor") // prod(out.get(f"actor.parallel.{name}") for name in parallel), 1)
        bound = out.get("actor.optimizer.clip_grad")
        out.set("loss.normalization", "dr_grpo", key)
        out.set("actor.optimizer.clip_grad", bound / replicas, f"{bound} for losses {replicas} times as large there")


def _placement(keys: SourceKeys, out: Translation) -> None:
    """Copies the ranks of RLinf. `placement` accepts all of its forms."""
    nodes = keys.count("cluster.num_nodes", 1)
    largest = 0
    placed_in, groups = keys.under(PLACED), _node_groups(keys.get("cluster.node_groups") or [])
    for name, given in placed_in.items():
        if name.endswith(".node_group"):
            continue
        components, value = name.removesuffix(".placement"), str(given)
        group = str(placed_in.get(f"{components}.node_group", "cluster"))
        if group in groups:
            value = _on_nodes(value, groups[group])
        elif group not in ("cluster", "node"):
            out.differs(PLACED + components, group, "there is no such node group")
        roles = [component.strip() for component in components.split(",")]
        unknown = [role for role in roles if role not in ROLES]
        if unknown:
            out.differs(PLACED + components, given, f"{', '.join(unknown)} is not a role here")
        known = list(dict.fromkeys(ROLES[role] for role in roles if role in ROLES))
        if known:
            out.place(known, value, PLACED + components)
            largest = max([largest, *(int(one) + 1 for one in _numbers(value))])
    placed = out.placed
    if "reward" not in placed and "rollout" in placed:
        out.place(["reward"], placed["rollout"], "on the ranks of the engines")
    if real(keys.get("algorithm.kl_beta", 0) or 0) and "reference" not in placed and "actor" in placed:
        out.place(["reference"], placed["actor"], "algorithm.kl_beta")
    out.world_size = max(largest, 8 * nodes if largest == 0 or nodes > 1 else largest)


RANKS_OF_NODE = 8


def _node_groups(given: Any) -> dict[str, list[int]]:
    """Returns the nodes of each group by its label."""
    groups = {}
    for group in given if isinstance(given, list) else []:
        nodes = [int(one) for one in _listed(str(group.get("node_ranks", "")))]
        groups[str(group.get("label"))] = sorted(nodes)
    return groups


def _listed(text: str) -> list[int]:
    items = [item.strip().partition("-") for item in text.split(",") if item.strip()]
    return [number for first, _, last in items for number in range(count(first), count(last or first) + 1)]


def _on_nodes(value: str, nodes: list[int]) -> str:
    """Converts ranks counted within a group of nodes to ranks of the job."""
    if nodes != [*range(nodes[0], nodes[0] + len(nodes))]:
        raise UntranslatableError(f"the nodes {nodes} of a group are not consecutive; expected a range")
    if value == "all":
        return f"node:{nodes[0]}-{nodes[-1]}" if len(nodes) > 1 else f"node:{nodes[0]}"
    moved = [
        number + nodes[0] * RANKS_OF_NODE
        for number in _listed(",".join(one.partition(":")[0] for one in value.split(",")))
    ]
    return ",".join(map(str, moved)) if moved != [*range(moved[0], moved[-1] + 1)] else f"{moved[0]}-{moved[-1]}"


def _numbers(value: str) -> list[str]:
    ranks = ",".join(item.partition(":")[0] for item in value.split(","))
    return [one for item in ranks.split(",") for one in item.split("-") if one.strip().isdigit()]


def _trainer(keys: SourceKeys, out: Translation) -> None:
    backend = keys.get("actor.training_backend", "megatron")
    if backend != "megatron":
        out.leave("actor.training_backend", backend, "Megatron trains, data-parallel with a distributed optimizer")
    offloads = [key for key in ("enable_offload", "offload_optimizer", "offload_weight", "offload_grad")]
    if any([keys.truth(f"actor.{key}", False) for key in offloads]):
        out.set("actor.offload", True, "actor.enable_offload, ...")
    if keys.truth("rollout.enable_offload", False):
        out.set("rollout.offload", True, "rollout.enable_offload")
    if keys.truth("actor.model.sequence_parallel", False) and out.get("actor.parallel.tp") > 1:
        out.set("actor.parallel.sequence_parallel", True, "actor.model.sequence_parallel")
    granularity = keys.get("actor.model.recompute_granularity")
    if granularity not in NOTHING:
        out.set("model.recompute", str(granularity), "actor.model.recompute_granularity")
    peak = keys.get("actor.lr_sched.max_lr")
    if peak not in NOTHING and real(peak) != out.get("actor.optimizer.lr"):
        out.set("actor.optimizer.lr", real(peak), "actor.lr_sched.max_lr, instead of actor.optim.lr")
    tokens = keys.get("runner.max_tokens_per_mbs")
    if keys.truth("runner.enable_dynamic_batch_size", False) and tokens not in NOTHING:
        out.set("actor.micro_batch_tokens", count(tokens), "runner.max_tokens_per_mbs")
    else:
        samples = keys.count("algorithm.training_batch_size_per_gpu", keys.get("actor.micro_batch_size", 1))
        longest = keys.count("runner.seq_length", 2048)
        out.set("actor.micro_batch_tokens", samples * longest, "training_batch_size_per_gpu x runner.seq_length")


def _algorithm(keys: SourceKeys, out: Translation) -> None:
    name = keys.text("algorithm.adv_type", "grpo")
    if name not in ALGORITHMS:
        out.differs("algorithm.adv_type", name, "no algorithm here has this estimator")
        return
    algorithm = ALGORITHMS[name]
    out.set("algorithm", algorithm, "algorithm.adv_type")
    if algorithm == "ppo":
        out.set("advantages.gae_lambda", keys.real("algorithm.gae_lambda", 0.95), "algorithm.gae_lambda")
    elif "advantages.gamma" in out.settings:
        del out.settings["advantages.gamma"]
    _normalize(keys, out, algorithm)
    kind = keys.text("algorithm.loss_type", "actor")
    if kind not in ("actor", "actor_critic", "math_ppo_actor"):
        out.differs("algorithm.loss_type", kind, "only the loss of PPO is supported")
    clip = keys.get("algorithm.ratio_clip_eps", 0.2)
    ends = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    bounds = [clip if keys.get(end) in NOTHING else keys.get(end) for end in ends]
    for end in ends:
        if keys.get(end) not in NOTHING and real(keys.get(end)) == real(clip):
            out.leave(end, keys.get(end), "the same as ratio_clip_eps")
    set_clip(out, *bounds, *(f"{end}, ratio_clip_eps" for end in ends))
    bound = keys.get("algorithm.clip_ratio_c")
    if bound not in NOTHING:
        out.set("loss.dual_clip", real(bound), "algorithm.clip_ratio_c")
    beta = real(keys.get("algorithm.kl_beta", 0) or 0)
    if beta:
        out.set("loss.kl.coef", beta, "algorithm.kl_beta")
        out.set("loss.kl.estimator", estimator(keys.get("algorithm.kl_penalty_type", "low_var_kl")), "kl_penalty_type")
        out.set("loss.kl.unbiased", False, "RLinf does not multiply it by the ratio")
    keys.get("algorithm.kl_penalty_type")
    key = "algorithm.loss_agg_func"
    set_named(out, "loss.normalization", MEANS, key, keys.text(key, "token-mean"), "means")
    recomputes = keys.truth("algorithm.recompute_logprobs", True)
    out.set("loss.old_logprobs", "actor" if recomputes else "rollout", "algorithm.recompute_logprobs")
    cap = keys.get("algorithm.importance_sampling_clip")
    if keys.truth("algorithm.importance_sampling_fix", False) and cap not in NOTHING:
        out.set("loss.correction.high", real(cap), "algorithm.importance_sampling_clip")


def _normalize(keys: SourceKeys, out: Translation, algorithm: str) -> None:
    """Sets the normalisation of advantages over the batch. RLinf has it for every algorithm."""
    key = "algorithm.normalize_advantages"
    normalizes = keys.truth(key, algorithm == "ppo")
    set_whitening(out, algorithm, normalizes, key)


def _data(keys: SourceKeys, out: Translation) -> None:
    set_context(out, keys.get("runner.seq_length"), "runner.seq_length")
    if keys.truth("data.filter_prompt_by_length", False):
        out.set("data.on_bad_row", "skip", "data.filter_prompt_by_length")
    if not keys.truth("data.apply_chat_template", True):
        out.set("data.chat_template", "never", "data.apply_chat_template")
    if keys.truth("algorithm.sampling_params.do_sample", True) is False:
        out.set("rollout.sampling.temperature", 0.0, "algorithm.sampling_params.do_sample")
    files = keys.get("data.val_data_paths")
    if files in NOTHING or not out.get("evaluation.interval"):
        out.settings.pop("evaluation.interval", None)
        return
    data = {"path": paths(files)}
    for name in ("prompt_key", "label_key"):
        data[name] = out.get(f"data.train.{name}")
    set_evaluation(out, data, {}, 1, "data.val_data_paths")


def _reward(keys: SourceKeys, out: Translation) -> None:
    kind = keys.get("reward.reward_type", "math")
    if kind == "math":
        _set_values(keys, out)
    else:
        out.differs("reward.reward_type", kind, "set your function as reward.function: docs/rewards.md")
    if keys.truth("reward.use_reward_model", False):
        out.differs("reward.use_reward_model", True, "place role reward_model: docs/rewards.md")


def _set_values(keys: SourceKeys, out: Translation) -> None:
    """Sets the rewards of right and wrong answers, which are scale and -scale by default."""
    ends = {name: real(keys.get(f"reward.reward_{name}_val", value)) for name, value in (("max", 1.0), ("min", -1.0))}
    scale, algorithm = real(keys.get("reward.reward_scale", 1.0) or 1.0), out.get("algorithm")
    right, wrong = ends["max"] * scale, ends["min"] * scale
    origin = f"reward.reward_scale: {right:g} and {wrong:g} there, {right - wrong:g} and 0 here"
    if wrong and (algorithm == "ppo" or (algorithm in WITHOUT_COMPARISON and not out.get("advantages.whiten"))):
        reason = f"a wrong answer has {wrong:g} there and 0 here, which {algorithm} learns from"
        out.differs("reward.reward_min_val", ends["min"], reason)
    if right - wrong == 1:
        out.set("reward.function", "math", "reward.reward_type")
    else:
        out.set("reward.functions", [{"function": "math", "weight": right - wrong}], origin)
        out.notes.append(f"{origin}. Advantages, which compare samples, are equal")
