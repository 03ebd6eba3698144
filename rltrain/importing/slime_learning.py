"""Of slime's flags what is learned, and how samples are drawn."""

from typing import Any

from rltrain.importing import slime_teacher
from rltrain.importing.conversions import count, estimator, number, real, truth
from rltrain.importing.conversions import top_k as top_k_of
from rltrain.importing.engine import choose_engine
from rltrain.importing.translation import SourceKeys, Translation, UntranslatableError

PROGRAMS = ("train.py", "train_async.py")


MATH = ("math", "dapo", "deepscaler")


REWARDS_DIFFER = "check_reward_nonzero_std"


SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"


OWN_ROLLOUTS = ("slime.rollout.sglang_rollout.generate_rollout", "fully_async_rollout.generate_rollout_fully_async")


NOT_FOR_ARGS = (
    "tp_size",
    "dp_size",
    "ep_size",
    "expert_parallel_size",
    "pp_size",
    "router",
    "server_concurrency",
    "config",
)


def is_supervised(keys: SourceKeys) -> bool:
    return keys.get("loss-type", "policy_loss") == "sft_loss"


def set_algorithm(keys: SourceKeys, out: Translation) -> None:
    name = keys.get("advantage-estimator", "grpo")
    policies = {"gspo": "gspo", "cispo": "cispo"}
    algorithms = ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if name not in (*policies, *algorithms):
        out.differs("advantage-estimator", name, "no algorithm here is called so")
        return
    out.set("algorithm", name if name in algorithms else "grpo", "advantage-estimator")
    if name in policies:
        out.set("loss.policy", policies[name], "advantage-estimator")
    high = keys.get("eps-clip-high", keys.get("eps-clip", 0.2))
    out.set("loss.clip_high", real(high), "eps-clip-high, which is eps-clip where it is missing")
    _set_advantages(keys, out, str(name))
    _set_means(keys, out)


def _set_advantages(keys: SourceKeys, out: Translation, name: str) -> None:
    whitens = truth(keys.get("normalize-advantages", False))
    gamma, gae_lambda = real(keys.get("gamma", 1.0)), real(keys.get("lambd", 1.0))
    if name == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, "lambd, whose default is 1")
        out.set("critic.value_clip", real(keys.get("value-clip", 0.2)), "value-clip")
    if name in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        out.set("advantages.whiten", whitens, "normalize-advantages")
        if name != "reinforce_plus_plus_baseline" and gamma != 1:
            out.set("advantages.gamma", gamma, "gamma")
    elif whitens:
        out.differs("normalize-advantages", True, f"advantages of {name} are not normalised over the batch here")
    alone = out.get("batch.samples_per_prompt") == 1
    if name in ("grpo", "gspo", "cispo"):
        plain = truth(keys.get("disable-grpo-std-normalization", False)) or alone
        out.set("advantages.normalize_std", not plain, "disable-grpo-std-normalization")


def _set_means(keys: SourceKeys, out: Translation) -> None:
    by_token = truth(keys.get("calculate-per-token-loss", False))
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    if truth(keys.get("use-rollout-logprobs", False)):
        out.set("loss.old_logprobs", "rollout", "use-rollout-logprobs")
    selected = keys.get("dynamic-sampling-filter-path")
    if selected is not None and str(selected).endswith(REWARDS_DIFFER):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", "dynamic-sampling-filter-path")
    elif selected is not None:
        out.differs("dynamic-sampling-filter-path", selected, "write it as batch.dynamic_sampling.filter")


def set_kl(keys: SourceKeys, out: Translation) -> None:
    in_loss, coef = truth(keys.get("use-kl-loss", False)), real(keys.get("kl-loss-coef", 0))
    in_reward = real(keys.get("kl-coef", 0))
    kind = keys.get("kl-loss-type", "k1")
    if in_loss and coef:
        out.set("loss.kl.coef", coef, "kl-loss-coef")
        out.set("loss.kl.estimator", estimator(kind), "kl-loss-type")
        out.set("loss.kl.unbiased", truth(keys.get("use-unbiased-kl", False)), "use-unbiased-kl")
    if in_reward and in_loss and coef:
        out.differs("kl-coef", in_reward, "the penalty stands in the loss already, and here is in one place")
    elif in_reward:
        out.set("loss.kl.coef", in_reward, "kl-coef")
        out.set("loss.kl.where", "reward", "kl-coef")
        out.set("loss.kl.estimator", "k1", "kl-coef")
    refresh = keys.get("ref-update-interval")
    if refresh is not None and in_loss:
        out.set("reference.refresh_every", count(refresh), "ref-update-interval")


def set_schedule(keys: SourceKeys, out: Translation) -> None:
    every = count(keys.get("update-weights-interval", 1))
    function = str(keys.get("rollout-function-path", OWN_ROLLOUTS[0]))
    fully = truth(keys.get("fully-async", False)) or function.endswith("fully_async")
    if function not in OWN_ROLLOUTS and not fully:
        out.differs(
            "rollout-function-path", function, "a loop of one's own is an environment here: docs/environments.md"
        )
    if keys.get(PROGRAM) == PROGRAMS[1] or fully:
        out.set("schedule.mode", "asynchronous", PROGRAMS[1])
        staleness = count(keys.get("max-weight-staleness", every))
        out.set("schedule.max_staleness", max(staleness, every), "max-weight-staleness" if fully else PROGRAMS[1])
    if every > 1:
        out.set("schedule.sync_every", every, "update-weights-interval")
    if keys.get("update-weight-mode") == "delta":
        out.set("weight_sync.delta", {}, "update-weight-mode")
    if truth(keys.get("partial-rollout", False)) or fully:
        out.set("schedule.partial_rollouts", True, "rollout-function-path" if fully else "partial-rollout")
        masks = truth(keys.get("mask-offpolicy-in-partial-rollout", False))
        if masks or not out.get("schedule.max_staleness"):
            out.set("schedule.on_stale", "mask", "mask-offpolicy-in-partial-rollout")
        more = count(keys.get("over-sampling-batch-size", 0)) / out.get("batch.prompts_per_step") - 1
        if more > 0:
            out.set("schedule.oversampling", more, "over-sampling-batch-size / rollout-batch-size - 1")


PROGRAM = "program"
"""The key under which the program's name stands among the flags."""


def set_reward(keys: SourceKeys, out: Translation) -> None:
    kind, own = keys.get("rm-type"), keys.get("custom-rm-path")
    generate = keys.get("custom-generate-function-path")
    if generate is not None:
        out.set("env.function", _function(generate), "custom-generate-function-path")
        out.place(["env"], ranks_of(out, "rollout"), "custom-generate-function-path")
    if own == slime_teacher.REWARD:
        out.set("reward.function", "environment", "custom-rm-path: the teacher is asked by it, and the reward is 0")
        keys.get("custom-reward-post-process-path")
    elif own is not None:
        out.set("reward.function", _function(own), "custom-rm-path")
    elif kind in MATH and keys.get("label-key") is None:
        out.set("reward.function", "environment", f"rm-type {kind} without label-key: the reward is always 0")
    elif kind in MATH:
        out.set("reward.function", "math", "rm-type")
    elif kind == "remote_rm":
        out.set("reward.function", str(keys.get("rm-url")), "rm-url")
    elif generate is not None and kind is None:
        out.set("reward.function", "environment", "custom-generate-function-path: the sample has its reward")
    else:
        out.differs("rm-type", kind, "a reward of one's own is reward.function: docs/rewards.md")
    scored = keys.get("reward-key")
    if scored is not None and own is not None:
        out.set("reward.options", {"reward_key": scored}, "reward-key")
    keys.get("rm-url")


def _function(dotted: object) -> str:
    module, _, name = str(dotted).rpartition(".")
    return f"{module}:{name}"


def ranks_of(out: Translation, role: str) -> str:
    return next(
        str(setting.value)
        for path, setting in out.settings.items()
        if path.startswith("placement.") and role in path.removeprefix("placement.").split(", ")
    )


def set_evaluation(keys: SourceKeys, out: Translation) -> None:
    given = keys.get("eval-prompt-data")
    if given is None:
        out.settings.pop("evaluation.interval", None)
        return
    words = [given] if isinstance(given, str) else [*given]
    words = words if len(words) > 1 else ["eval_set", words[0]]
    sampling = {
        "temperature": real(keys.get("eval-temperature", out.get("rollout.sampling.temperature"))),
        "top_p": real(keys.get("eval-top-p", out.get("rollout.sampling.top_p"))),
        "top_k": top_k_of(keys.get("eval-top-k", -1)),
        "max_response_tokens": count(
            keys.get("eval-max-response-len", out.get("rollout.sampling.max_response_tokens"))
        ),
    }
    files = {
        "prompt_key": str(keys.get("eval-input-key", out.get("data.train.prompt_key"))),
        "label_key": keys.get("eval-label-key", out.get("data.train.label_key")),
    }
    samples = count(keys.get("n-samples-per-eval-prompt", 1))
    sets = [
        {"name": _name(name), "data": {"path": path, **files}, "sampling": sampling, "samples_per_prompt": samples}
        for name, path in zip(words[::2], words[1::2], strict=False)
    ]
    out.set("evaluation.sets", sets, "eval-prompt-data, n-samples-per-eval-prompt, eval-*")
    needed = sampling["max_response_tokens"] + out.get("data.max_prompt_tokens")
    if needed > out.get("rollout.max_context_tokens"):
        out.set("rollout.max_context_tokens", needed, "prompt and eval-max-response-len")


def _name(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def set_engine(keys: SourceKeys, out: Translation) -> None:
    requests = keys.get("sglang-max-running-requests")
    if requests is not None:
        out.set("rollout.max_running_requests", count(requests), "sglang-max-running-requests")
    ep = number(keys.first("sglang-ep-size", "sglang-expert-parallel-size", default=1)[1])
    if truth(keys.get("sglang-enable-dp-attention", False)):
        out.leave("sglang-enable-dp-attention", True, "an engine here cuts attention over its tp ranks")
    arguments = {
        name.removeprefix("sglang-").replace("-", "_"): value
        for name, value in keys.left().items()
        if name.startswith("sglang-") and not name.startswith("sglang-speculative")
    }
    taken = {
        name: _typed(value)
        for name, value in arguments.items()
        if not name.startswith(NOT_FOR_ARGS) and not {"dp", "moe", "deepep", "disaggregation"} & {*name.split("_")}
    }
    choose_engine(out, "sglang", ep, taken, "sglang-*")
    for name in taken:
        keys.get("sglang-" + name.replace("_", "-"))


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(one) for one in value]
    try:
        return number(value)
    except UntranslatableError:
        return value


def set_supervised(keys: SourceKeys, out: Translation) -> None:
    out.set("algorithm", "sft", "loss-type")
    out.set("data.train.response_key", None, "messages are whole conversations")
    by_token = truth(keys.get("calculate-per-token-loss", False))
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    function = keys.get("rollout-function-path", SFT_ROLLOUT)
    if function != SFT_ROLLOUT:
        out.differs("rollout-function-path", function, "conversations come from files here")
    for path in ("rollout.max_context_tokens", "rollout.sampling.max_response_tokens", "evaluation.interval"):
        out.settings.pop(path, None)
    if "rollout-max-context-len" not in keys and "rollout-max-prompt-len" not in keys:
        most = out.get("actor.micro_batch_tokens") * out.get("actor.parallel.cp")
        out.set("data.max_prompt_tokens", most, "slime has no limit: as many as a micro-batch")
        out.set("data.max_response_tokens", most, "slime has no limit: as many as a micro-batch")
    for name in (
        "rollout-num-gpus",
        "colocate",
        "advantage-estimator",
        "eps-clip",
        "entropy-coef",
        "n-samples-per-prompt",
    ):
        keys.get(name)
