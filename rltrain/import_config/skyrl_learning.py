"""Rules for SkyRL's keys of learning and models, and for functions registered by a program."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rltrain.config.foreign import ENGINE, Pair
from rltrain.import_config.influence import ENVIRONMENT, TO_COMPLETE
from rltrain.import_config.shared_rules import WEIGHTS, set_adapters
from rltrain.import_config.translation import (
    ALGORITHMS,
    DISCOUNTED,
    NOTHING,
    WHITENED,
    WITH_STD,
    WITHOUT_COMPARISON,
    SourceKeys,
    Translation,
    UntranslatableError,
    apply,
    count,
    estimator,
    real,
    set_clip,
    set_named,
    set_overlong_penalty,
    set_signed_math,
    set_whitening,
    take_rewards,
    truth,
)

# The text of a program and of its modules. No code is run.


def texts_of(module: str, near: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yields (name, parsed text) of the program `module`, followed by its imported modules in the same tree.

    The file is searched from `near` and its parents. Yields nothing if there is none.
    """
    file = _file_of(module, near) if module else None
    if file is None:
        return
    tree = file
    for _ in module.split("."):
        tree = tree.parent
    program = _parsed(file)
    yield module, program
    for name in _imports(program):
        imported = _file_of(name, tree)
        if imported is not None:
            yield name, _parsed(imported)


def texts(*nodes: ast.AST | None) -> list[str] | None:
    """Returns the texts of constant nodes, or None if one is not a text."""
    found = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return found if len(found) == len(nodes) else None


def last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name."""
    return ast.unparse(node).rsplit(".", 1)[-1]


def _file_of(module: str, near: Path) -> Path | None:
    path = Path(*module.split("."))
    for folder in (near.resolve(), *near.resolve().parents):
        for name in (path.with_suffix(".py"), path / "__init__.py"):
            if (folder / name).is_file():
                return folder / name
    return None


def _parsed(file: Path) -> ast.AST:
    """Returns the parsed file. Empty if it is not readable Python."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _imports(program: ast.AST) -> Iterator[str]:
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Generators of a program's own.


def refuse_own_generator(keys: SourceKeys, out: Translation) -> None:
    """Names a program that replaces SkyRL's generator, as an agent's harness does. Its turns are an environment's."""
    module = keys.text("-m", "")
    if module.startswith(("skyrl.", "skyrl_train.")):
        return
    programs = [program for name, program in texts_of(module, keys.folder) if name == module]
    defined = (node for program in programs for node in ast.walk(program) if isinstance(node, ast.FunctionDef))
    if any(node.name == "get_generator" for node in defined):
        reason = "it has a generator of its own, whose turns come from an environment here"
        out.differs("-m", module, reason, ENVIRONMENT)


# Environments registered with SkyRL-Gym.


def entry_point_of(environment: str, module: str, near: Path) -> str | None:
    """Returns the "module:class" registered under the id `environment` by the program `module` or its imported modules.
    None if there is none."""
    for _, program in texts_of(module, near):
        for identifier, entry_point in _registered_environments(program):
            if identifier == environment:
                return entry_point
    return None


def _registered_environments(program: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (id, entry point) of every call `register(id=..., entry_point=...)` with constant texts."""
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and last_name(node.func) == "register":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            found = texts(given.get("id"), given.get("entry_point"))
            if found:
                yield found[0], found[1]


# Losses and advantage estimators registered with SkyRL.

LOSSES = ("PolicyLossRegistry", "register_policy_loss")
ADVANTAGES = ("AdvantageEstimatorRegistry", "register_advantage_estimator")
"""The class with the method `register`, and the decorator with the same effect."""


def function_of(name: str, registry: tuple[str, str], module: str, near: Path) -> str | None:
    """Returns the "module:function" registered under `name` by the program `module` or its imported modules. None if
    there is none."""
    for found_in, program in texts_of(module, near):
        for registered, function in _registered(program, *registry):
            if registered == name:
                return f"{found_in}:{function}"
    return None


def _registered(program: ast.AST, registry: str, decorator: str) -> Iterator[tuple[str, str]]:
    """Yields (name, function) of every `registry.register("name", function)`, and of functions with the decorator
    `@decorator("name")`."""
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register":
            named = texts(*node.args[:1])
            if last_name(node.func.value) == registry and named and len(node.args) > 1:
                function = node.args[1]
                if isinstance(function, ast.Name):
                    yield named[0], function.id
        elif isinstance(node, ast.FunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and last_name(call.func) == decorator:
                    yield from ((named, node.name) for named in texts(*call.args[:1]) or ())


# Algorithm, loss and reward.

T, G, ALG = "trainer.", "generator.", "trainer.algorithm."
GYM = {
    "gsm8k_multi_turn": "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv",
    "text2sql": "skyrl_gym.envs.sql.env:SQLEnv",
    "search": "skyrl_gym.envs.search.env:SearchEnv",
    "lcb": "skyrl_gym.envs.lcb.env:LCBEnv",
    "searchcode": "skyrl_gym.envs.searchcode.env:SearchCodeEnv",
}
POLICIES = {
    "regular": "clip",
    "dual_clip": "clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo": "dppo",
    "rollout_is": "reinforce",
    "importance_sampling": "clip",
}
UNCLIPPED = 1e9
"""A bound without effect on ratios."""
MEANS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "dr_grpo",
    "token_mean_legacy": "token_mean",
}
DECAYS = {"constant_with_warmup": "constant", "constant": "constant", "cosine": "cosine", "linear": "linear"}
DISTILLATION = "on_policy_distill"
"""Part of the name of SkyRL's distillation program. Its rewards are the differences to the log-probs of the reference
per token. The estimator `no_op` uses them as advantages."""


def distills(keys: SourceKeys) -> bool:
    """Returns whether the program is SkyRL's on-policy distillation."""
    named = keys.text(ALG + "advantage_estimator", "grpo")
    return named == "no_op" and DISTILLATION in keys.text("-m", "")


def set_algorithm(keys: SourceKeys, out: Translation) -> None:
    """Sets the algorithm and its advantages."""
    if distills(keys):
        out.set("algorithm", "distillation", f"{ALG}advantage_estimator no_op of {keys.get('-m')}")
        for key in ("use_kl_loss", "use_kl_in_reward"):
            keys.get(ALG + key)
        return
    name = keys.text(ALG + "advantage_estimator", "grpo")
    if name not in ALGORITHMS:
        _set_own_advantages(name, keys, out)
        return
    algorithm = ALGORITHMS[name]
    by_std, whitens = (
        keys.truth(ALG + key, default)
        for key, default in (("grpo_norm_by_std", True), ("advantage_batch_normalize", False))
    )
    if algorithm in ALONE and out.get("batch.samples_per_prompt") == 1:
        _take_rewards(name, whitens, keys, out)
        return
    out.set("algorithm", algorithm, ALG + "advantage_estimator")
    if algorithm in WITH_STD and not by_std:
        out.set("advantages.normalize_std", False, ALG + "grpo_norm_by_std")
    always = algorithm in WHITENED and algorithm != "gdpo"
    set_whitening(out, algorithm, whitens or always, ALG + "advantage_batch_normalize")
    _set_returns(keys, out, algorithm)
    _set_selection(keys, out)


ALONE = ("grpo", "maxrl")
"""Algorithms of SkyRL that give a single sample of a prompt its reward as advantage. Its rloo gives 0, as rltrain
does."""


def _take_rewards(name: str, whitens: bool, keys: SourceKeys, out: Translation) -> None:
    if keys.truth(ALG + "use_kl_in_reward", False):
        out.differs(ALG + "use_kl_in_reward", True, "a single sample per prompt has its KL per token here")
    take_rewards(out, f"{ALG}advantage_estimator {name}", G + "n_samples_per_prompt", whitens=whitens)
    for key in ("gamma", "lambd"):
        keys.get(ALG + key)
    _set_selection(keys, out)


def _set_own_advantages(name: str, keys: SourceKeys, out: Translation) -> None:
    """Sets an advantage estimator registered by the program."""
    key = ALG + "advantage_estimator"
    function = function_of(name, ADVANTAGES, keys.text("-m", ""), keys.folder)
    if function is None:
        out.differs(key, name, "no algorithm here has this estimator")
        return
    out.set("algorithm", "own", key)
    out.set("advantages.function", function, f"{key}: registered by the program")
    gamma, gae_lambda = keys.real(ALG + "gamma", 1.0), keys.real(ALG + "lambd", 1.0)
    out.set("advantages.gamma", gamma, ALG + "gamma")
    out.set("advantages.gae_lambda", gae_lambda, ALG + "lambd, default 1")
    if keys.truth(ALG + "advantage_batch_normalize", False):
        out.differs(ALG + "advantage_batch_normalize", True, "your own advantages are used unchanged here")
    _set_selection(keys, out)


def _set_returns(keys: SourceKeys, out: Translation, algorithm: str) -> None:
    gamma, gae_lambda = keys.real(ALG + "gamma", 1.0), keys.real(ALG + "lambd", 1.0)
    if algorithm in DISCOUNTED and gamma != 1:
        out.set("advantages.gamma", gamma, ALG + "gamma")
    if algorithm == "ppo":
        out.set("advantages.gae_lambda", gae_lambda, ALG + "lambd, default 1")
        rules = (
            Pair(ALG + "value_clip", "critic.value_clip", 0.2),
            Pair(T + "critic.model.path", "critic.path"),
            Pair(T + "critic.optimizer_config.lr", "critic.optimizer.lr", 5e-6),
            Pair(T + "critic.optimizer_config.weight_decay", "critic.optimizer.weight_decay", 1e-2),
        )
        apply(rules, keys, out)
        out.set("critic.optimizer.beta2", 0.999, T + "critic.optimizer_config.adam_betas")
        out.set("critic.micro_batch_tokens", out.get("actor.micro_batch_tokens"), T + "micro_train_batch_size_per_gpu")


def _set_selection(keys: SourceKeys, out: Translation) -> None:
    selected = keys.get(ALG + "dynamic_sampling.type")
    if selected in ("filter",):
        out.set("batch.dynamic_sampling.filter", "rewards_differ", ALG + "dynamic_sampling.type")
        most = keys.count(ALG + "dynamic_sampling.max_sample_batches", 30)
        if most > 0:
            out.set("batch.dynamic_sampling.max_drawn", float(most), ALG + "dynamic_sampling.max_sample_batches")
    elif selected not in NOTHING:
        out.differs(ALG + "dynamic_sampling.type", selected, "only filter is supported, with new groups as replacement")
    filters = keys.truth(ALG + "zero_variance_filter", False)
    if filters and out.get("algorithm") == "own":
        out.differs(ALG + "zero_variance_filter", True, "your own advantages may differ from 0 for filtered groups")
    elif filters:
        out.leave(ALG + "zero_variance_filter", True, "groups with equal rewards have advantage 0")


def set_loss(keys: SourceKeys, out: Translation) -> None:
    """Sets the policy loss with its KL penalty."""
    kind = keys.text(ALG + "policy_loss_type", "regular")
    own = None if kind in POLICIES else function_of(kind, LOSSES, keys.text("-m", ""), keys.folder)
    if own is not None:
        out.set("loss.policy", "own", ALG + "policy_loss_type")
        out.set("loss.function", own, f"{ALG}policy_loss_type: registered by the program")
        out.notes.append(
            f"{ALG}policy_loss_type {kind}: {own} is called for each micro-batch, as there. Micro-batches are limited "
            "by tokens here (docs/policy_losses.md)"
        )
    else:
        set_named(out, "loss.policy", POLICIES, ALG + "policy_loss_type", kind, "policy losses")
    _set_policy(keys, out, kind)
    mean = keys.text(ALG + "loss_reduction", "token_mean")
    set_named(out, "loss.normalization", MEANS, ALG + "loss_reduction", mean, "means")
    if mean == "token_mean_legacy":
        out.leave(ALG + "loss_reduction", mean, "token_mean: it does not depend on micro-batches here")
    if keys.truth(ALG + "use_entropy_loss", False):
        out.set("loss.entropy_coef", keys.real(ALG + "entropy_loss_coef", 0.01), ALG + "entropy_loss_coef")
    if not distills(keys):
        _set_kl(keys, out)
    elif keys.truth(ALG + "use_kl_loss", True):
        out.differs(ALG + "use_kl_loss", True, "the teacher is not a reference here: the distance would count twice")


def _set_policy(keys: SourceKeys, out: Translation, kind: str) -> None:
    """Sets further settings of a policy loss."""
    bound = keys.real(ALG + "clip_ratio_c", 3.0)
    if kind == "dual_clip" or (out.get("loss.policy") == "own" and ALG + "clip_ratio_c" in keys):
        out.set("loss.dual_clip", bound, ALG + "clip_ratio_c")
    if kind == "cispo":
        bounds = [keys.get(f"{ALG}cispo.cispo_eps_clip_{end}", most) for end, most in (("low", 1.0), ("high", 4.0))]
        set_clip(out, *bounds, ALG + "cispo.*")
    if kind == "cispo" and keys.get(ALG + "cispo.cispo_anchor", "old") == "rollout":
        out.set("loss.old_logprobs", "rollout", ALG + "cispo.cispo_anchor")
    if kind == "rollout_is":
        ends = [keys.real(ALG + name, 0.2) for name in ("eps_clip_low", "eps_clip_high")]
        out.set("loss.old_logprobs", "rollout", "rollout_is uses the ratio to the engine")
        out.set("loss.correction.method", "icepop", "rollout_is: weight 0 outside the bounds")
        out.set("loss.correction.low", max(1 - ends[0], 0.0), "1 - eps_clip_low")
        out.set("loss.correction.high", 1 + ends[1], "1 + eps_clip_high")
        for end in ("low", "high"):
            out.settings.pop(f"loss.clip_{end}", None)
    if kind == "importance_sampling":
        set_clip(out, 1.0, UNCLIPPED, "importance_sampling has no clip")
    if kind == "dppo":
        out.set("loss.old_logprobs", "rollout", "dppo: the engine is the old policy")
        measure = keys.text(ALG + "dppo.dppo_type", "binary_tv")
        out.set("loss.dppo.divergence", measure.removeprefix("binary_"), ALG + "dppo.dppo_type")
        deltas = (f"{ALG}dppo.delta_low", f"{ALG}dppo.delta_high")
        set_clip(out, *(keys.get(delta, 0.2) for delta in deltas), *deltas)
    if kind == "kl_cov":
        out.set("loss.kl_cov.ratio", keys.real(ALG + "kl_cov.kl_cov_frac", 0.2), ALG + "kl_cov.*")
        out.set("loss.kl_cov.coef", keys.real(ALG + "kl_cov.ppo_kl_coef", 1.0), ALG + "kl_cov.*")


def _set_kl(keys: SourceKeys, out: Translation) -> None:
    in_loss, in_reward = keys.truth(ALG + "use_kl_loss", True), keys.truth(ALG + "use_kl_in_reward", False)
    coef = keys.real(ALG + "kl_loss_coef", 0.001)
    kind_of_kl = keys.get(ALG + "kl_estimator_type", "k3")
    if in_loss and in_reward and coef:
        out.differs(ALG + "use_kl_in_reward", True, "the penalty is already in the loss; one place is possible")
    if (in_loss or in_reward) and coef:
        out.set("loss.kl.coef", coef, ALG + "kl_loss_coef" + ("" if ALG + "kl_loss_coef" in keys else ", default"))
        out.set("loss.kl.estimator", estimator(kind_of_kl), ALG + "kl_estimator_type")
        if in_loss:
            out.set("loss.kl.unbiased", False, "SkyRL does not multiply it by the ratio")
        else:
            out.set("loss.kl.where", "reward", ALG + "use_kl_in_reward")


def set_correction(keys: SourceKeys, out: Translation) -> None:
    """Sets importance weights and masks. The policy loss must be set before."""
    prefix = ALG + "off_policy_correction."
    level = keys.get(prefix + "tis_ratio_type")
    high = keys.get(prefix + "token_tis_ratio_clip_high", 2.0)
    if level == "sequence":
        high = keys.get(prefix + "sequence_tis_ratio_clip_high", 5.0)
    if keys.truth(ALG + "use_tis", False):
        level, high = "token", keys.get(ALG + "tis_imp_ratio_cap", 2.0)
    by_engine = out.get("loss.old_logprobs") == "rollout"
    if level not in NOTHING and by_engine:
        out.differs(prefix + "tis_ratio_type", level, "the policy loss already uses the same ratio")
    elif level not in NOTHING:
        out.set("loss.correction.level", str(level), prefix + "tis_ratio_type")
        out.set("loss.correction.high", real(high), prefix + "*_tis_ratio_clip_high")
    masks = _masks(keys, prefix)
    if out.get("loss.policy") == "own" and (masks or level not in NOTHING):
        out.differs(prefix + "*", "given", "your own loss weights its tokens itself")
    if masks:
        out.set(
            "loss.correction.masks", masks, prefix + "sequence_mask_metric, *_mask_*, outlier_token_*, token_mask_*"
        )
    if masks and by_engine and out.get("batch.mini_batches") * out.get("batch.epochs") > 1:
        reason = "it uses the weights at the step's start there, and the trained ones here; equal for one mini-batch"
        out.differs(prefix + "sequence_mask_metric", keys.get(prefix + "sequence_mask_metric"), reason)
    keys.under(prefix)


UNBOUNDED = 1e9
"""No ratio exceeds it. SkyRL cuts ratios at e^20."""
SEQUENCE_MASKS = {"geometric": ("geo", "geometric", 0.99, 1.01), "product": ("product", "sequence", 0.5, 2.0)}
"""SkyRL's metrics of masks: the short name, the level in rltrain, and the default bounds."""


def _masks(keys: SourceKeys, prefix: str) -> list[dict[str, Any]]:
    masks = []
    metric = keys.get(prefix + "sequence_mask_metric")
    if metric not in NOTHING:
        if metric not in SEQUENCE_MASKS:
            raise UntranslatableError(f"sequence_mask_metric must be {' or '.join(SEQUENCE_MASKS)}")
        name, level, low, high = SEQUENCE_MASKS[metric]
        bounds = (keys.get(f"{prefix}{name}_mask_low", low), keys.get(f"{prefix}{name}_mask_high", high))
        masks.append({"level": level, "low": real(bounds[0]), "high": real(bounds[1])})
    for name, level in (("outlier_token_is_threshold", "every_token"), ("token_mask_is_threshold", "token")):
        bounds = (keys.get(f"{prefix}{name}_low"), keys.get(f"{prefix}{name}_high"))
        if any(bound not in NOTHING for bound in bounds):
            low, high = (0.0 if bounds[0] in NOTHING else real(bounds[0])), bounds[1]
            masks.append({"level": level, "low": low, "high": UNBOUNDED if high in NOTHING else real(high)})
    return masks


def set_reward(keys: SourceKeys, out: Translation) -> None:
    """Sets the reward function or the environment."""
    env, turns = keys.text("environment.env_class", "gsm8k"), keys.count(G + "max_turns", 1)
    buffer = keys.get(ALG + "overlong_buffer_len")
    if buffer not in NOTHING and count(buffer):
        factor = keys.get(ALG + "overlong_buffer_penalty_factor", 1.0)
        set_overlong_penalty(out, buffer, factor, ALG + "overlong_buffer_len")
    if env == "gsm8k" and turns == 1:
        out.set("reward.function", "math", f"environment.env_class {env}")
        out.set("reward.options", {"after": ["####"]}, f"environment.env_class {env}: the number after ####")
        return
    if env == "aime" and turns == 1:
        set_signed_math(out, "environment.env_class", env, WITHOUT_COMPARISON)
        return
    out.place(["env"], out.placed["rollout"], "environment.env_class")
    out.set("env.max_turns", turns, G + "max_turns")
    out.set("reward.function", "environment", "environment.env_class")
    registered = GYM.get(env) or entry_point_of(env, keys.text("-m", ""), keys.folder)
    if registered is not None:
        out.set("env.function", registered, "environment.env_class")
        options = keys.under(f"environment.skyrl_gym.{env}.")
        if options:
            out.set("env.options", {"env_config": options}, f"environment.skyrl_gym.{env}")
    else:
        out.set("env.function", f"{env}.env:Env", f"environment.env_class: {TO_COMPLETE}")
        out.differs("environment.env_class", env, "set your own environment as env.function: module:class", ENVIRONMENT)


# Adapters, routers and rounded experts.

REPLAY = T + "policy.megatron_config.moe_enable_routing_replay"
INT4 = T + "policy.model.fake_int4_qat."
SMALLEST = {7.0: -7.0, 7.5: -8.0}
"""Smallest integer of INT4 by the divisor of scales."""
RETURNED = ENGINE + "enable_return_routed_experts"


def slices_of(keys: SourceKeys) -> int:
    """Returns the number of ranks that share a sequence."""
    if keys.text(T + "strategy", "fsdp") == "megatron":
        return keys.count(T + "policy.megatron_config.context_parallel_size", 1)
    return keys.count(T + "policy.sequence_parallel_size", 1)


def set_lora(keys: SourceKeys, out: Translation, prefix: str, kind: str | None, section: str = "model.lora") -> None:
    """Sets the adapters. `prefix` is the prefix of their keys. `kind` is the key for Megatron's kind of adapters, or
    None for FSDP."""
    names = {"rank": "rank", "alpha": "alpha", "dropout": "dropout", "targets": "target_modules"}
    names |= {"exclude": "exclude_modules", "init": "init_method"}
    given = {here: keys.get(prefix + name) for here, name in names.items()}
    own = kind and keys.get(kind)
    set_adapters({**given, "type": own}, out, prefix, 16, kind is not None, section)


def set_critic_lora(keys: SourceKeys, out: Translation) -> None:
    if keys.get(ALG + "advantage_estimator") == "gae":
        set_lora(keys, out, T + "critic.model.lora.", None, "critic.lora")


def set_router_replay(keys: SourceKeys, out: Translation) -> None:
    replays, returned = keys.truth(REPLAY, False), keys.truth(RETURNED, False)
    if replays:
        out.set("model.router_replay", "rollout", REPLAY)
    elif returned:
        out.leave(RETURNED, returned, "the engine's choices are not used")


def set_fake_quantization(keys: SourceKeys, out: Translation) -> None:
    """Sets fake quantization. SkyRL's trainer rounds the weights of a second checkpoint. Its engines load one in
    INT4."""
    given = keys.under(INT4)
    if not truth(given.get("enabled", False)):
        return
    divisor = real(given.get("scale_divisor", 7.5))
    out.set("model.fake_quantization.group_size", count(given.get("group_size", 32)), INT4 + "group_size")
    out.set("model.fake_quantization.scale_divisor", divisor, INT4 + "scale_divisor")
    smallest = real(given.get("q_min", -8))
    if smallest != SMALLEST.get(divisor):
        out.differs(INT4 + "q_min", smallest, "it is -8 here for scale_divisor 7.5, and -7 for 7")
    if not truth(given.get("symmetric", True)):
        out.differs(INT4 + "symmetric", False, "groups have no zero point here")
    path = given.get("bf16_base_path")
    if path in NOTHING:
        out.notes.append(WEIGHTS)
    else:
        out.set("model.path", str(path), INT4 + "bf16_base_path: loaded by the trainer")
