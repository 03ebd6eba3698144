"""Rules for slime's flags of learning, rewards, evaluation and engines, and for other parts of its scripts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rltrain.import_config.influence import ENVIRONMENT, defaults_of
from rltrain.import_config.influence import REWARD as REWARD_HOLE
from rltrain.import_config.shared_rules import WEIGHTS, choose_engine, set_adapters
from rltrain.import_config.translation import (
    NOTHING,
    WITHOUT_COMPARISON,
    SourceKeys,
    Translation,
    UntranslatableError,
    count,
    estimator,
    language_model,
    number,
    ranks,
    real,
    set_signed_math,
    set_whitening,
    truth,
)
from rltrain.import_config.translation import top_k as top_k_of

# Importance weights for the difference between engine and trainer: slime's own, and those of its example of masked
# importance sampling.

FUNCTION, FILE = "custom-tis-function-path", "custom-config-path"
ICEPOP = ".loss.icepop_function"
MIS = ".mis.compute_mis_weights_with_cp"
KNOWN = {
    *("use_tis", "use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize"),
}
LEVELS = ("token", "sequence", "geometric")
UNBOUNDED = 1e9
"""No ratio is larger. The example cuts ratios at exp(20)."""


def set_correction(keys: SourceKeys, out: Translation) -> None:
    """Sets the correction. KL and entropy must be set before, as the example excludes rejected tokens from them."""
    function = keys.text(FUNCTION, "")
    if function.endswith(MIS):
        _set_by_example(_options(keys), keys, out)
    elif keys.truth("use-tis", False):
        out.set("loss.correction.high", keys.real("tis-clip", 2.0), "use-tis, tis-clip")
        if keys.real("tis-clip-low", 0):
            out.set("loss.correction.low", keys.real("tis-clip-low"), "tis-clip-low")
        if function.endswith(ICEPOP):
            out.set("loss.correction.method", "icepop", FUNCTION)
        elif function:
            out.differs(FUNCTION, function, "weights here come from loss.correction: docs/policy_losses.md")
    if FILE in keys and not function.endswith(MIS):
        _set_by_file(keys, out)
    if "use-opsm" in keys:
        out.set("loss.correction.opsm_delta", keys.real("opsm-delta", 1e-4), "use-opsm, opsm-delta")


def _options(keys: SourceKeys) -> Mapping[str, Any]:
    """Returns the options in the file of the example. It is searched in the script's folder and its parents."""
    named = keys.get(FILE)
    found = None if named is None else keys.file(str(named))
    if found is None:
        raise UntranslatableError(f"--{FILE}: {named} not found; it has the settings of {FUNCTION}")
    options = yaml.safe_load(found.read_text(encoding="utf-8")) or {}
    if not isinstance(options, dict):
        raise UntranslatableError(f"--{FILE}: expected keys with values in {named}")
    return options


def _set_by_file(keys: SourceKeys, out: Translation) -> None:
    """Refuses flags of slime that its file of settings overrides. Other settings are for the user's own functions."""
    flags = defaults_of("slime")
    overridden = {name: value for name, value in _options(keys).items() if str(name).replace("_", "-") in flags}
    for name, value in overridden.items():
        out.differs(f"{FILE}: {name}", value, "give it as a flag; the file overrides flags")
    if not overridden:
        out.leave(FILE, keys.get(FILE), "settings of your own functions, which get them by reward.options, env.options")


def _set_by_example(options: Mapping[str, Any], keys: SourceKeys, out: Translation) -> None:
    for name in sorted({*options} - KNOWN):
        out.differs(f"{FILE}: {name}", options[name], "it has no counterpart here")
    if not truth(options.get("use_tis", keys.get("use-tis", False))):
        return
    level, mode = str(options.get("tis_level")), str(options.get("tis_mode"))
    if level not in LEVELS or mode not in ("truncate", "clip", "mask"):
        raise UntranslatableError(f"--{FILE}: tis_level {level}, tis_mode {mode} are not values of the example")
    high = real(options.get("tis_upper_bound"))
    low = _bound(options, "tis_lower_bound", 1 / high)
    out.set("loss.correction.high", high, "tis_upper_bound")
    if mode != "truncate":
        out.set("loss.correction.low", low, "tis_lower_bound")
    if mode == "mask":
        out.set("loss.correction.method", "icepop", "tis_mode: mask")
    if level != "token":
        out.set("loss.correction.level", level, "tis_level")
    if truth(options.get("tis_batch_normalize", False)):
        _normalize(level, mode, out)
    if truth(options.get("use_rs", False)):
        _set_masks(options, low, high, out)


def _normalize(level: str, mode: str, out: Translation) -> None:
    if mode == "mask":
        out.differs("tis_batch_normalize", True, "the mean includes excluded weights there, but not here")
    elif level == "geometric":
        raise UntranslatableError("tis_batch_normalize needs level token or sequence in the example")
    out.set("loss.correction.normalize", "mini_batch", "tis_batch_normalize")
    out.notes.append("tis_batch_normalize: the mean is over a rank's micro-batch there, and over the mini-batch here")


def _set_masks(options: Mapping[str, Any], low: float, high: float, out: Translation) -> None:
    """Sets masks. Rejected tokens have no gradient there, and still count in the divisors."""
    level = str(options.get("rs_level"))
    if level not in LEVELS:
        raise UntranslatableError(f"--{FILE}: rs_level {level} is not a value of the example")
    bounds = {"low": _bound(options, "rs_lower_bound", low), "high": _bound(options, "rs_upper_bound", high)}
    masks = [{"level": level, **bounds}]
    if options.get("rs_veto_threshold") not in NOTHING:
        veto = {"low": real(options["rs_veto_threshold"]), "high": UNBOUNDED}
        masks.append({"level": "every_token", **veto})
    out.set("loss.correction.masks", masks, "use_rs, rs_*")
    out.set("loss.correction.rejected", "weight_0", "use_rs: divisors count all tokens")
    if out.get("loss.entropy_coef") or out.get("loss.kl.coef"):
        out.differs("use_rs", True, "rejected tokens are also excluded from entropy and KL there, but not here")


def _bound(options: Mapping[str, Any], name: str, otherwise: float) -> float:
    return otherwise if options.get(name) in NOTHING else real(options[name])


# Other parts of a slime script: a server, and variables of the training.

SERVER = "sglang.launch_server"
MODEL, CUT = "served-model", "served-tp"
"""Keys among the flags for the model of a server and its tensor-parallel size."""
ROUNDS, GROUP = "variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "variable OPEN_TRAINING_INT4_GROUP_SIZE"
"""Keys among the flags for variables that enable rounded weights in training. No flag of slime enables them."""
GROUP_SIZE = 128
"""Default group size without a variable."""
VARIABLE = re.compile(r'"?(OPEN_TRAINING_INT4_\w+)"?\s*[:=]\s*"?(\d+)\b')


def beside_training(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns keys from all commands of a script: a server's model and variables."""
    return {**_served(commands), **_variables(commands)}


def _served(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    for words in commands:
        if SERVER in words or f"-m {SERVER}" in words:
            following = dict(zip(words, words[1:], strict=False))
            tp = following.get("--tp", following.get("--tp-size", following.get("--tensor-parallel-size", 1)))
            return {MODEL: following["--model-path"], CUT: tp} if "--model-path" in following else {}
    return {}


def _variables(commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    found = (one for words in commands for word in words for one in VARIABLE.finditer(word))
    given = {f"variable {one[1]}": int(one[2]) for one in found}
    return given if given.get(ROUNDS) == 1 else {}


def set_fake_quantization(keys: SourceKeys, out: Translation) -> None:
    """Sets fake quantization of experts for INT4. slime rounds in training as in its engines."""
    if not keys.get(ROUNDS):
        return
    name = ROUNDS.removeprefix("variable ")
    out.set("model.fake_quantization.group_size", keys.count(GROUP, GROUP_SIZE), name)
    out.notes.append(WEIGHTS)


# On-policy distillation with a teacher in Megatron or on a server of the same script.

REWARD = "slime.rollout.on_policy_distillation.reward_func"


def set_teacher(keys: SourceKeys, out: Translation, actor: str) -> None:
    """Sets the teacher. `actor` is the range of the actor's ranks. A teacher on a server gets new ranks after all
    others."""
    model, tp = keys.get(MODEL), keys.get(CUT, 1)
    if not keys.get("use-opd"):
        return
    kind = keys.get("opd-type", "sglang")
    if kind == "sglang" and model is None:
        out.differs("opd-type", kind, "the weights of the server at rm-url are unknown: docs/roles.md")
        return
    out.set("teacher.coef", keys.real("opd-kl-coef", 1.0), "opd-kl-coef")
    if kind == "sglang":
        out.set("teacher.path", str(model), f"the model of {SERVER}")
        out.set("teacher.parallel.tp", count(tp), f"the same as for {SERVER}")
        out.place(["teacher"], ranks(out.world_size, count(tp)), f"{SERVER}: after the others")
        out.world_size += count(tp)
        keys.get("rm-url")
        return
    out.set("teacher.path", keys.text("opd-teacher-load"), "opd-teacher-load: in Hugging Face format here")
    out.place(["teacher"], actor, "use-opd")


# Learning and sampling.

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
        out.differs("advantage-estimator", name, "there is no algorithm of this name here")
        return
    out.set("algorithm", name if name in algorithms else "grpo", "advantage-estimator")
    if name in policies:
        out.set("loss.policy", policies[name], "advantage-estimator")
    high = keys.get("eps-clip-high", keys.get("eps-clip", 0.2))
    out.set("loss.clip_high", real(high), "eps-clip-high, or eps-clip if it is missing")
    if name in (*policies, "grpo", "reinforce_plus_plus_baseline") and keys.truth(UNCOMPARED, False):
        out.set("algorithm", "reinforce_plus_plus", f"{UNCOMPARED}: the advantage is the reward")
        set_whitening(out, "reinforce_plus_plus", keys.truth("normalize-advantages", False), "normalize-advantages")
    else:
        _set_advantages(keys, out, str(name))
    _set_means(keys, out)


UNCOMPARED = "disable-rewards-normalization"
"""The flag for rewards that are not compared within a prompt's samples."""


def _set_advantages(keys: SourceKeys, out: Translation, name: str) -> None:
    whitens = keys.truth("normalize-advantages", False)
    gamma, gae_lambda = keys.real("gamma", 1.0), keys.real("lambd", 1.0)
    if name == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, "lambd, default 1")
        out.set("critic.value_clip", keys.real("value-clip", 0.2), "value-clip")
    set_whitening(out, name, whitens, "normalize-advantages")
    if name in ("ppo", "reinforce_plus_plus") and gamma != 1:
        out.set("advantages.gamma", gamma, "gamma")
    alone = out.get("batch.samples_per_prompt") == 1
    if name in ("grpo", "gspo", "cispo"):
        plain = keys.truth("disable-grpo-std-normalization", False) or alone
        out.set("advantages.normalize_std", not plain, "disable-grpo-std-normalization")


def _set_means(keys: SourceKeys, out: Translation) -> None:
    by_token = keys.truth("calculate-per-token-loss", False)
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    if keys.truth("use-rollout-logprobs", False):
        out.set("loss.old_logprobs", "rollout", "use-rollout-logprobs")
    selected = keys.get("dynamic-sampling-filter-path")
    if selected is not None and str(selected).endswith(REWARDS_DIFFER):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", "dynamic-sampling-filter-path")
    elif selected is not None:
        out.differs("dynamic-sampling-filter-path", selected, "set it as batch.dynamic_sampling.filter")


def set_lora(keys: SourceKeys, out: Translation) -> None:
    """Sets the adapters of miles, a fork of slime, and of forks with FSDP, which need a switch."""
    if keys.get("lora-rank") in NOTHING:
        return
    sharded = keys.text("train-backend", "megatron") != "megatron"
    if not keys.truth("use-lora", not sharded):
        return
    names = {"rank": "lora-rank", "alpha": "lora-alpha", "dropout": "lora-dropout", "type": "lora-type"}
    given = {here: keys.get(name) for here, name in {**names, "path": "lora-adapter-path"}.items()}
    keys.assumed |= {"lora-alpha": 16, "lora-dropout": 0, "lora-type": "lora"}
    targets = keys.first("target-modules", "lora-target-modules")[1]
    split = targets.split(",") if isinstance(targets, str) and "," in targets else targets
    init = None if sharded else keys.get("lora-A-init-method", "xavier")
    given |= {"targets": split, "exclude": keys.get("exclude-modules"), "init": init}
    set_adapters(given, out, "lora-", 16, not sharded)


def set_kl(keys: SourceKeys, out: Translation) -> None:
    in_loss, coef = keys.truth("use-kl-loss", False), keys.real("kl-loss-coef", 0)
    in_reward = keys.real("kl-coef", 0)
    kind = keys.get("kl-loss-type", "k1")
    if in_loss and coef:
        out.set("loss.kl.coef", coef, "kl-loss-coef")
        out.set("loss.kl.estimator", estimator(kind), "kl-loss-type")
        out.set("loss.kl.unbiased", keys.truth("use-unbiased-kl", False), "use-unbiased-kl")
    if in_reward and in_loss and coef:
        out.differs("kl-coef", in_reward, "the penalty is already in the loss; only one place is possible here")
    elif in_reward:
        out.set("loss.kl.coef", in_reward, "kl-coef")
        out.set("loss.kl.where", "reward", "kl-coef")
        out.set("loss.kl.estimator", "k1", "kl-coef")
    refresh = keys.get("ref-update-interval")
    if refresh is not None and "reference" in out.placed:
        out.set("reference.refresh_every", count(refresh), "ref-update-interval")


def set_schedule(keys: SourceKeys, out: Translation) -> None:
    every = keys.count("update-weights-interval", 1)
    function = keys.text("rollout-function-path", OWN_ROLLOUTS[0])
    fully = keys.truth("fully-async", False) or function.endswith("fully_async")
    if function not in OWN_ROLLOUTS and not fully:
        out.differs(
            "rollout-function-path",
            function,
            "your own rollout loop becomes an environment here: docs/environments.md",
            ENVIRONMENT,
        )
    if keys.get(PROGRAM) == PROGRAMS[1] or fully:
        out.set("schedule.mode", "asynchronous", PROGRAMS[1])
        staleness = keys.count("max-weight-staleness", every)
        out.set("schedule.max_staleness", max(staleness, every), "max-weight-staleness" if fully else PROGRAMS[1])
    if every > 1:
        out.set("schedule.sync_every", every, "update-weights-interval")
    if keys.get("update-weight-mode") == "delta":
        out.set("weight_sync.delta", {}, "update-weight-mode")
    if keys.truth("partial-rollout", False) or fully:
        out.set("schedule.partial_rollouts", True, "rollout-function-path" if fully else "partial-rollout")
        masks = keys.truth("mask-offpolicy-in-partial-rollout", False)
        if masks:
            out.set("schedule.on_stale", "mask", "mask-offpolicy-in-partial-rollout")
        elif out.get("schedule.mode") != "asynchronous":
            out.set("schedule.max_staleness", UNLIMITED, "partial-rollout: tokens of any age are trained on")
        more = keys.count("over-sampling-batch-size", 0) / out.get("batch.prompts_per_step") - 1
        if more > 0:
            out.set("schedule.oversampling", more, "over-sampling-batch-size / rollout-batch-size - 1")


UNLIMITED = 1000
"""More steps than an unfinished prompt waits."""
PROGRAM = "program"
"""The key among the flags for the name of the program."""


def set_reward(keys: SourceKeys, out: Translation) -> None:
    kind, own = keys.get("rm-type"), keys.get("custom-rm-path")
    generate = keys.get("custom-generate-function-path")
    if generate is not None:
        out.set("env.function", _function(generate), "custom-generate-function-path")
        out.place(["env"], out.placed["rollout"], "custom-generate-function-path")
    if own == REWARD:
        out.set("reward.function", "environment", "custom-rm-path: it only queries the teacher, and the reward is 0")
    elif own is not None:
        out.set("reward.function", _function(own), "custom-rm-path")
    elif kind in MATH and keys.get("label-key") is None:
        out.set("reward.function", "environment", f"rm-type {kind} without label-key: the reward is always 0")
    elif kind in MATH:
        _set_math(str(kind), keys, out)
    elif kind == "remote_rm":
        out.set("reward.function", keys.text("rm-url"), "rm-url")
    elif generate is not None and kind is None:
        out.set("reward.function", "environment", "custom-generate-function-path: it sets the reward of the sample")
    else:
        out.differs("rm-type", kind, "set your function as reward.function: docs/rewards.md", REWARD_HOLE)
    scored = keys.get("reward-key")
    if scored is not None and own is not None:
        out.set("reward.options", {"reward_key": scored}, "reward-key")


THOUGHT, OF_DEEPSCALER = "</think>", "slime/rollout/rm_hub/deepscaler.py"


def _set_math(kind: str, keys: SourceKeys, out: Translation) -> None:
    """Sets the built-in comparison of answers, with the parts of a response where slime looks for one. If the tree of
    slime beside the script was changed, its function is set."""
    tree = keys.file(OF_DEEPSCALER) if kind == "deepscaler" else None
    if tree is not None and THOUGHT not in tree.read_text(encoding="utf-8"):
        name = "slime.rollout.rm_hub.deepscaler:get_deepscaler_rule_based_reward"
        out.set("reward.function", name, f"{OF_DEEPSCALER} beside the script was changed; needs that package slime")
    elif kind == "dapo":
        set_signed_math(out, "rm-type", kind, WITHOUT_COMPARISON)
    else:
        out.set("reward.function", "math", "rm-type")
        options: dict[str, Any] = {"last_number": False}
        if kind == "deepscaler":
            options["after"] = [THOUGHT, "###Response"]
        out.set("reward.options", options, f"rm-type {kind}: where slime looks for a marked answer")


def _function(dotted: object) -> str:
    module, _, name = str(dotted).rpartition(".")
    return f"{module}:{name}"


def set_evaluation(keys: SourceKeys, out: Translation) -> None:
    given, file = keys.get("eval-prompt-data"), keys.get("eval-config")
    if file is not None:
        _set_evaluation_of_file(str(file), keys, out)
        return
    if given is None:
        out.settings.pop("evaluation.interval", None)
        return
    words = [given] if isinstance(given, str) else [*given]
    words = words if len(words) > 1 else ["eval_set", words[0]]
    sampling = {
        "temperature": keys.real("eval-temperature", out.get("rollout.sampling.temperature")),
        "top_p": keys.real("eval-top-p", out.get("rollout.sampling.top_p")),
        "top_k": top_k_of(keys.get("eval-top-k", out.get("rollout.sampling.top_k"))),
        "max_response_tokens": keys.count("eval-max-response-len", out.get("rollout.sampling.max_response_tokens")),
    }
    files = {
        "prompt_key": keys.text("eval-input-key", out.get("data.train.prompt_key")),
        "label_key": keys.get("eval-label-key", out.get("data.train.label_key")),
    }
    samples = keys.count("n-samples-per-eval-prompt", 1)
    sets = [
        {"name": _name(name), "data": {"path": path, **files}, "sampling": sampling, "samples_per_prompt": samples}
        for name, path in zip(words[::2], words[1::2], strict=False)
    ]
    _set_evaluation_sets(sets, "eval-prompt-data, n-samples-per-eval-prompt, eval-*", out)


def _set_evaluation_of_file(file: str, keys: SourceKeys, out: Translation) -> None:
    """Sets the evaluation from slime's file of evaluation sets, with its defaults, and those of the flags."""
    found = keys.file(file)
    if found is None:
        raise UntranslatableError(f"--eval-config: {file} not found beside the script; it has the evaluation sets")
    data = yaml.safe_load(found.read_text(encoding="utf-8")) or {}
    data = data.get("eval", data) if isinstance(data, dict) else {}
    common, listed = data.get("defaults") or {}, data.get("datasets") or []
    sets = []
    for one in listed:
        given = {**common, **one}
        for name in sorted({*given} - {*OF_SETS}):
            if given[name] not in NOTHING and given[name] != keys.get(name.replace("_", "-")):
                out.differs(
                    f"eval-config: {given.get('name')}: {name}", given[name], "evaluation sets here have no such key"
                )

        def value(name: str, *flags: str, given: dict[str, Any] = given) -> Any:
            told = given.get(name)
            return told if told is not None else next((keys.get(flag) for flag in flags if flag in keys), None)

        sampling = {
            "temperature": real(value("temperature", "eval-temperature", "rollout-temperature") or 1.0),
            "top_p": real(value("top_p", "eval-top-p", "rollout-top-p") or 1.0),
            "top_k": top_k_of(value("top_k", "eval-top-k", "rollout-top-k") or -1),
            "max_response_tokens": count(
                value("max_response_len", "eval-max-response-len", "rollout-max-response-len")
            ),
        }
        files = {"path": str(given["path"]), "prompt_key": value("input_key", "eval-input-key") or out.get(KEY)}
        files["label_key"] = value("label_key", "eval-label-key", "label-key")
        samples = count(value("n_samples_per_eval_prompt", "n-samples-per-eval-prompt") or 1)
        sets.append(
            {"name": _name(str(given["name"])), "data": files, "sampling": sampling, "samples_per_prompt": samples}
        )
    _set_evaluation_sets(sets, "eval-config", out)


OF_SETS = (
    *("name", "path", "n_samples_per_eval_prompt", "temperature", "top_p", "top_k", "max_response_len"),
    *("input_key", "label_key", "metadata_key", "metadata_overrides"),
)
"""Keys of slime's file of evaluation sets that are translated, or only pass columns on."""
KEY = "data.train.prompt_key"


def _set_evaluation_sets(sets: list[dict[str, Any]], origin: str, out: Translation) -> None:
    out.set("evaluation.sets", sets, origin)
    needed = max((one["sampling"]["max_response_tokens"] for one in sets), default=0) + out.get(
        "data.max_prompt_tokens"
    )
    if needed > out.get("rollout.max_context_tokens"):
        out.set("rollout.max_context_tokens", needed, "prompt and eval-max-response-len")


def set_contexts(keys: SourceKeys, out: Translation) -> None:
    """Passes the longest contexts of training and evaluation to a function for generation, if they differ here."""
    own, here = "rollout-max-context-len", "rollout.max_context_tokens"
    given, evaluated = keys.get(own), keys.get("eval-max-context-len", keys.get(own))
    if "env.function" not in out.settings:
        return
    if given in NOTHING:
        longest = language_model(out.get("model.path")).get("max_position_embeddings")
        if longest is not None:
            out.set(here, max(count(longest), out.get(here)), "the model's: slime has no limit for conversations")
        elif here not in out.fixed:
            out.differs(own, given, f"slime has no limit for conversations without it; --set {here}=TOKENS")
        return
    most = max(out.get("rollout.max_context_tokens"), count(evaluated))
    if most != count(given):
        options = {"rollout_max_context_len": count(given), "eval_max_context_len": count(evaluated)}
        out.set("env.options", options, f"{own}, eval-max-context-len")
        out.set("rollout.max_context_tokens", most, "the longest context of training and evaluation")


def _name(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def set_engine(keys: SourceKeys, out: Translation) -> None:
    requests = keys.get("sglang-max-running-requests")
    if requests is not None:
        out.set("rollout.max_running_requests", count(requests), "sglang-max-running-requests")
    ep = number(keys.first("sglang-ep-size", "sglang-expert-parallel-size", default=1)[1])
    if keys.truth("sglang-enable-dp-attention", False):
        out.leave("sglang-enable-dp-attention", True, "an engine here splits attention over its tp ranks")
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
    by_token = keys.truth("calculate-per-token-loss", False)
    out.set("loss.normalization", "token_mean" if by_token else "sequence_mean", "calculate-per-token-loss")
    function = keys.get("rollout-function-path", SFT_ROLLOUT)
    if function != SFT_ROLLOUT:
        out.differs("rollout-function-path", function, "conversations come from files here")
    for path in ("rollout.max_context_tokens", "rollout.sampling.max_response_tokens", "evaluation.interval"):
        out.settings.pop(path, None)
    if "rollout-max-context-len" not in keys and "rollout-max-prompt-len" not in keys:
        most = out.get("actor.micro_batch_tokens") * out.get("actor.parallel.cp")
        out.set("data.max_prompt_tokens", most, "slime has no limit: as many tokens as a micro-batch")
        out.set("data.max_response_tokens", most, "slime has no limit: as many tokens as a micro-batch")
