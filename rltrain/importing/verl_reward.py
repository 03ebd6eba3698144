"""verl's rewards: functions, a model that classifies, and what is taken off long responses."""

from typing import Any

from rltrain.importing.conversions import NOTHING, count, ranks, real, truth
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError

MODEL = "reward.reward_model."
MANAGERS = ("naive", "dapo", "prime", "batch", "rate_limited")


def set_reward(keys: SourceKeys, out: Translation) -> None:
    path = keys.first("reward.custom_reward_function.path", "custom_reward_function.path")[1]
    name = keys.first("reward.custom_reward_function.name", "custom_reward_function.name", default="compute_score")[1]
    function = None if path in NOTHING else f"{path}:{name}"
    manager = keys.first("reward.reward_manager.name", "reward_model.reward_manager", default="naive")[1]
    scored = truth(keys.first(MODEL + "enable", "reward_model.enable", default=False)[1])
    if scored:
        _set_model(keys, out, function)
    elif manager == "gdpo":
        _set_parts(keys, out, function)
    elif function is not None:
        out.set("reward.function", function, "custom_reward_function.path, .name")
    else:
        out.set("reward.function", "math", "verl's by data_source: here answers are compared as mathematics")
    if manager not in (*MANAGERS, "gdpo"):
        out.differs("reward.reward_manager.name", manager, "a manager of one's own is a function here")
    _set_penalty(keys, out)
    if truth(keys.get("actor_rollout_ref.rollout.multi_turn.enable", False)):
        key = "actor_rollout_ref.rollout.multi_turn.enable"
        out.differs(key, True, "turns are those of an environment, env.function here")


def _set_parts(keys: SourceKeys, out: Translation, function: str | None) -> None:
    """Of one function several numbers, each a reward that is compared by itself."""
    named = keys.get("algorithm.gdpo_reward_keys")
    if function is None or not isinstance(named, list) or len(named) < 2:
        raise UntranslatableError("gdpo has a function of its own, and two or more algorithm.gdpo_reward_keys")
    weights = keys.get("algorithm.gdpo_reward_weights") or [1.0] * len(named)
    if len(weights) != len(named):
        raise UntranslatableError(f"{len(weights)} weights for {len(named)} rewards")
    parts = [
        {"function": function, "score_key": str(key), "name": str(key), "weight": real(weight)}
        for key, weight in zip(named, weights, strict=True)
    ]
    out.set("reward.functions", parts, "algorithm.gdpo_reward_keys of custom_reward_function")


def _set_model(keys: SourceKeys, out: Translation, function: str | None) -> None:
    """A classifier's score is the whole reward; it stands on all GPUs, or behind them on its own."""
    if function is not None:
        raise UntranslatableError("a function of one's own beside a reward model asks the model itself")
    path = keys.first(MODEL + "model_path", "reward_model.model.path")[1]
    if path in NOTHING:
        raise UntranslatableError(f"{MODEL}model_path: expected the model's checkpoint")
    out.set("reward_model.path", str(path), MODEL + "model_path: a classifier of one label")
    out.set("reward.functions", [], "the model alone says what responses are worth")
    if truth(keys.get(MODEL + "enable_resource_pool", False)):
        number = count(keys.get(MODEL + "nnodes", 0)) * count(keys.get(MODEL + "n_gpus_per_node", 8))
        out.place(["reward_model"], ranks(out.world_size, number), MODEL + "nnodes x n_gpus_per_node, behind them")
        out.world_size += number
    else:
        first = next(path for path in out.settings if path.startswith("placement.") and "actor" in path)
        out.place(["reward_model"], str(out.settings[first].value), MODEL + "enable_resource_pool is off")
    tp = count(keys.get(MODEL + "rollout.tensor_model_parallel_size", 2))
    out.set("reward_model.backend", "megatron", "a model that is cut by tensor parallelism")
    out.set("reward_model.parallel.tp", tp, MODEL + "rollout.tensor_model_parallel_size")


def _set_penalty(keys: SourceKeys, out: Translation) -> None:
    buffer: dict[str, Any] = {}
    for section in ("reward.reward_kwargs.", "reward_model.reward_kwargs.", "reward.reward_manager.reward_kwargs."):
        buffer |= keys.under(section)
    if truth(buffer.get("overlong_buffer_cfg.enable", False)):
        penalty = {
            "buffer_tokens": count(buffer.get("overlong_buffer_cfg.len")),
            "factor": real(buffer.get("overlong_buffer_cfg.penalty_factor", 1.0)),
        }
        out.set("advantages.overlong_penalty", penalty, "overlong_buffer_cfg")
