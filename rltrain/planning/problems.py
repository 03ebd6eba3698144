"""The form of refusals, text lengths, and the rules for adapters, SGLang, servers at URLs and rewards."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.evaluation import SHORT_FORM, EvaluationPlan
from rltrain.config.models import Lora
from rltrain.config.rollout import Served
from rltrain.config.schema import Config, Reward
from rltrain.errors import ConfigError, listed
from rltrain.models import Architecture, DynamicScaling, YarnScaling
from rltrain.models.canonical import adaptable_table
from rltrain.models.lora import adapters_of, targets_in
from rltrain.models.registry import BY_NAMES_IN_SGLANG, FAMILIES, TOWERS
from rltrain.tasks.metrics import OF_ALL_REWARDS
from rltrain.tasks.roles import rewarding_roles, served_roles, trained_roles

# Refusals. Each names the keys, the given values and the accepted ones. One error has all refusals of a check.


def refuse(
    problems: Iterable[str], error: type[ConfigError] = ConfigError, several: str = "mistakes in the config"
) -> None:
    """Raises `error` with all of `problems`, if there are any. `several` is the heading of two or more."""
    messages = list(dict.fromkeys(problems))
    if len(messages) == 1:
        raise error(messages[0])
    if messages:
        raise error(f"{len(messages)} {several}:\n" + "\n".join(f"  {message}" for message in messages))


def longest_text(config: Config) -> tuple[int, str]:
    """Returns (tokens, the sum in words) of the longest prompt and response together in training."""
    prompt = config.data.max_prompt_tokens
    if algorithm_of(config).reads_responses:
        limit = config.data.max_response_tokens
        at_least = f"data.max_response_tokens {limit}" if limit else "1 token of a response"
        total = prompt + (limit or 1)
        return total, f"data.max_prompt_tokens {prompt} + {at_least} = {total}"
    response = config.rollout.sampling.max_response_tokens
    words = f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = {prompt + response}"
    return prompt + response, words


def evaluated_text(config: Config, plan: EvaluationPlan) -> tuple[int, str]:
    """Returns (tokens, the sum in words) of the longest prompt and response together in an evaluation."""
    prompt, response = config.data.max_prompt_tokens, plan.sampling.max_response_tokens
    section = "rollout." if plan.name == SHORT_FORM else plan.config_key.removesuffix("data")
    words = f"data.max_prompt_tokens {prompt} + {section}sampling.max_response_tokens {response} = {prompt + response}"
    return prompt + response, words


# Low-rank adapters: their settings, and the matrices that get them.


def lora_problems(config: Config) -> Iterator[str]:
    """Yields the problems of adapters found from the config alone."""
    yield from _apart_problems(config)
    if config.critic.lora is not None and config.critic.lora.path is not None:
        yield (
            f"critic.lora.path: got {config.critic.lora.path}; expected null: a critic begins from the checkpoint "
            "critic.path, which may have adapters merged"
        )
    if config.model.lora is None:
        return
    if config.model.moe.bias_update_rate:
        yield (
            f"model.moe.bias_update_rate: got {config.model.moe.bias_update_rate} with model.lora; expected 0, because "
            "routers are part of the frozen base"
        )


def _apart_problems(config: Config) -> Iterator[str]:
    """Yields the problems of adapters that engines keep separate from the base weights."""
    if config.weight_sync.adapters != "apart":
        return
    if config.model.lora is None:
        yield "weight_sync.adapters: got apart without model.lora; expected merged, because there are no adapters"
        return
    if config.rollout.engine == "http" and config.rollout.http.weights != "folder":
        yield (
            f"weight_sync.adapters: got apart with rollout.http.weights {config.rollout.http.weights}, but servers at "
            "URLs load adapters from files; expected merged, or rollout.http.weights: folder"
        )
    if config.rollout.engine == "http" and config.rollout.protocol == "openai":
        yield (
            "weight_sync.adapters: got apart with rollout.engine http and rollout.protocol openai, whose servers get "
            "merged weights; expected merged, or servers of SGLang or vLLM"
        )
    if config.weight_sync.delta is not None:
        yield (
            "weight_sync.delta: got a section with weight_sync.adapters apart, but syncs then send only adapters, and "
            "all of these change; expected null, or weight_sync.adapters: merged"
        )


def lora_key(role: str) -> str:
    """Returns the config key of the adapters of a role's model."""
    return "model.lora" if role == "actor" else f"{role}.lora"


def adapted_model_problems(config: Config, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    """Yields the problems of models with adapters. `architectures` are by role."""
    for role in trained_roles():
        if (lora := config.lora_of(role)) and role in architectures:
            yield from _problems_of_model(lora_key(role), lora, architectures[role])
            if role == "actor":
                yield from _served_expert_problems(config, lora, architectures[role])
                yield from _served_tower_problems(config, lora)


def _problems_of_model(key: str, lora: Lora, model: Architecture) -> Iterator[str]:
    if model.unlisted:
        yield (
            f"{key}: got adapters for {model.family}, but rltrain has no table of this family's matrices; expected null"
        )
        return
    known = targets_in(adaptable_table(model))
    if lora.targets is not None and (not lora.targets or set(lora.targets) - set(known)):
        yield f"{key}.targets: got {[*lora.targets]}; expected null, or some of {listed(known)}"


def _served_tower_problems(config: Config, lora: Lora) -> Iterator[str]:
    engine = config.rollout.engine
    if lora.vision and engine != "embedded" and config.keeps_adapters_apart("rollout"):
        yield (
            f"weight_sync.adapters: got apart with rollout.engine {engine} and model.lora.vision, but its servers "
            "adapt only the language model; expected merged, or rollout.engine: embedded"
        )


def _served_expert_problems(config: Config, lora: Lora, model: Architecture) -> Iterator[str]:
    engine = config.rollout.engine
    if engine == "embedded" or not config.keeps_adapters_apart("rollout") or model.moe is None:
        return
    sparse = adapters_of(adaptable_table(model), lora.targets).sparse
    if sparse is not None and sparse.experts:
        yield (
            f"weight_sync.adapters: got apart with rollout.engine {engine} and adapters of experts, which is untested "
            "with the kernels of its servers; expected merged, or rollout.engine: embedded, or model.lora.targets of "
            "attention only"
        )


# Models that SGLang serves.

NOT_IN_SGLANG = {
    "gemma": "SGLang computes its GELU exactly, but training by tanh",
    "nemotron": "SGLang has no class of it",
}
"""Why SGLang 0.5.23 does not serve a family."""


def sglang_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of a model served by SGLang."""
    path, key = config.checkpoint_of(role)
    if architecture.family in BY_NAMES_IN_SGLANG:
        yield from _named_weights_problems(config, role, architecture)
    if lacks := _lacking_in_sglang(architecture):
        yield (
            f"{role}.engine: got sglang, but the model in {path} ({key}) has {lacks}, which only the embedded engine "
            "supports; expected embedded"
        )


def _lacking_in_sglang(architecture: Architecture) -> str | None:
    """Returns a mechanism of the model that SGLang (0.5.23) lacks or computes differently, or that is untested."""
    scaling, family, in_sglang = architecture.rope_scaling, architecture.family, FAMILIES[architecture.family].sglang
    heeds_windows, is_direct = (in_sglang.windows, in_sglang.way == "direct") if in_sglang else (False, True)
    found = {
        f"model_type {family} ({NOT_IN_SGLANG.get(family)})": in_sglang is None,
        "sliding windows, which SGLang's class of the family ignores": (
            architecture.windows is not None and not heeds_windows
        ),
        "a head of its own, but SGLang's class of the family ties it to the embedding": (
            family.startswith("gemma") and not architecture.tied_embeddings
        ),
        "layers without experts, which SGLang's class of the family lacks": (
            architecture.moe is not None and _has_odd_dense_layers(architecture)
        ),
        "gated delta nets in other layers than SGLang expects": not _alternates(architecture),
        "a vision tower, but no model.vision": (
            architecture.family in TOWERS and architecture.vision is None and is_direct
        ),
        "biases in MLPs (mlp_bias)": architecture.mlp_bias,
        "dynamic RoPE scaling (SGLang scales short texts too)": isinstance(scaling, DynamicScaling),
        "an attention_factor of YaRN": isinstance(scaling, YarnScaling) and scaling.attention_factor is not None,
    }
    return next((what for what, is_there in found.items() if is_there), None)


def _has_odd_dense_layers(architecture: Architecture) -> bool:
    """Returns whether a layer without experts follows one with them. Qwen's classes have no layers without experts."""
    sparse = architecture.sparse_layers
    return not all(sparse) if architecture.family.startswith("qwen") else sorted(sparse) != [*sparse]


def _alternates(architecture: Architecture) -> bool:
    """Returns whether every n-th layer has attention, and all others a gated delta net."""
    delta = [kind.delta for kind in architecture.layer_kinds]
    every = delta.index(False) + 1 if False in delta else len(delta) + 1
    return all(is_delta == (number % every > 0) for number, is_delta in enumerate(delta, start=1))


def _named_weights_problems(config: Config, role: str, architecture: Architecture) -> Iterator[str]:
    """Yields the problems of weights that SGLang's own loader puts in place, by names of the checkpoint."""
    served, family = config.served(role), f"a model of {architecture.family}, whose weights SGLang's own loader takes"
    in_sglang = FAMILIES[architecture.family].sglang
    if served.dtype == "fp8" and in_sglang and not in_sglang.fp8:
        yield (
            f"{role}.dtype: got fp8 with {role}.engine sglang and a model of {architecture.family}, whose loader in "
            "SGLang drops the scales of FP8 blocks; expected auto, or embedded"
        )
    if config.keeps_adapters_apart(role):
        yield (
            f"weight_sync.adapters: got apart with {role}.engine sglang and {family} merged; expected merged, or "
            f"{role}.engine: embedded"
        )
    if config.synced_delta and role == "rollout" and not served.sglang.keep_weights:
        yield (
            f"weight_sync.delta: got a section without {role}.sglang.keep_weights and with {family} whole; expected "
            f"null, or {role}.sglang.keep_weights: true"
        )
    if role == "rollout" and config.model.router_replay == "rollout" and architecture.moe is not None:
        yield (
            f"model.router_replay: got rollout with {role}.engine sglang and {family}: its record of experts is "
            f"untested there; expected recompute or off, or {role}.engine: embedded"
        )


# Servers at URLs, started by others: their settings and their limits.


def http_problems(config: Config) -> Iterator[str]:
    """Yields the problems of every role with engine http."""
    for role in (role for role in served_roles() if role in config.placed_roles):
        served, engine_key = config.served(role), config.engine_key(role, "engine")
        if served.engine != "http":
            if role != "evaluation" and served.urls:
                yield f"{role}.urls: got URLs with {engine_key} {served.engine}; expected engine http, or no URLs"
            continue
        if role == "evaluation":
            yield (
                f"{engine_key}: got http for role evaluation, but servers cannot hold the weights of two steps at "
                "once; expected evaluation.engine: embedded or sglang, or no role evaluation: the rollout's servers "
                "then evaluate"
            )
            continue
        yield from _settings_problems(config, role)


def _settings_problems(config: Config, role: str) -> Iterator[str]:
    served, (parallel, parallel_key) = config.served(role), config.parallel_of(role)
    num_ranks = parallel.tp * parallel.pp * parallel.cp * parallel.ep
    if not served.urls:
        yield f"{role}.urls: got none with {role}.engine http; expected URLs of servers, or a file with one per line"
    yield from _group_problems(served, role)
    if num_ranks > 1:
        yield (
            f"{parallel_key}: got tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, ep {parallel.ep} with "
            f"{role}.engine http, whose servers decide their own parallelism; expected 1 for each"
        )
    if served.dtype != "auto":
        yield (
            f"{role}.dtype: got {served.dtype} with {role}.engine http, whose servers decide their own dtype; expected "
            "auto"
        )
    if served.kv_cache_gb != "auto":
        yield (
            f"{role}.kv_cache_gb: got {served.kv_cache_gb} with {role}.engine http, whose servers decide; expected auto"
        )
    if role == "rollout" and config.model.router_replay == "rollout":
        yield (
            "model.router_replay: got rollout with rollout.engine http, whose servers do not report their choices of "
            "experts; expected recompute or off"
        )


def _group_problems(served: Served, role: str) -> Iterator[str]:
    """Yields the problems of servers that receive weights over a process group."""
    if served.http.weights != "group":
        return
    if role != "rollout":
        yield (
            f"{role}.http.weights: got group, which is for weight syncs, but role {role} keeps the weights of its "
            "checkpoint; expected folder"
        )
    if served.protocol == "openai":
        yield (
            f"{role}.http.weights: got group with {role}.protocol openai; expected protocol sglang, vllm or auto, or "
            "weights: folder, since only servers of SGLang and vLLM take weights over a process group"
        )
    if served.http.weights_dir is not None:
        yield (
            f"{role}.http.weights_dir: got {served.http.weights_dir} with {role}.http.weights group, which writes no "
            "files; expected none, or weights: folder"
        )


def url_problems(config: Config, role: str, num_ranks: int) -> Iterator[str]:
    """Yields the problems of a role with servers at URLs on `num_ranks` ranks."""
    urls = config.served(role).urls
    if config.served(role).engine == "http" and isinstance(urls, tuple) and 0 < len(urls) < num_ranks:
        yield (
            f"placement.{role}: got {num_ranks} ranks for {len(urls)} {role}.urls; expected at most one rank per URL, "
            "since each rank asks one or more servers"
        )


# Reward functions. Whether they can be called is checked where they are imported.

NEEDS_LABEL = ("exact_match", "math", "code")


def reward_problems(config: Config) -> Iterator[str]:
    yield from _section_problems("reward", config.reward, config, _models(config))
    for number, one in enumerate(config.evaluation.sets):
        if one.reward is not None:
            yield from _section_problems(f"evaluation.sets.{number}.reward", one.reward, config, [])
    yield from _model_problems(config)
    yield from _label_problems(config)


def _section_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    """Yields the problems of one reward section. `models` are the roles that are part of this reward."""
    if reward.functions:
        for key in ("function", "options"):
            if key in reward.model_fields_set:
                yield (
                    f"{section}.{key}: got {getattr(reward, key)!r} together with {section}.functions; expected one of "
                    f"the two, since each entry of {section}.functions has its own function and options"
                )
    if reward.functions is not None or models:
        yield from _name_problems(section, reward, config, models)
        yield from _weight_problems(section, reward, config, models)
    for name in reward.names:
        if name.startswith(("http://", "https://")) and not urlsplit(name).hostname:
            yield f"{section}.function: got {name!r}; expected a URL with a host, such as http://judge:8000/score"


def _models(config: Config) -> list[str]:
    """Returns the placed roles whose models score responses."""
    return [role for role in rewarding_roles() if role in config.placed_roles]


def _name_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    titles = {f"{section}.functions.{number}.name": part.title for number, part in enumerate(reward.functions or ())}
    if reward.functions is None:
        titles[f"{section}.function"] = reward.parts[0].title
    titles |= {f"{role}.name": getattr(config, role).name for role in models}
    for key, title in titles.items():
        taken = title in OF_ALL_REWARDS or title.endswith(("_errors", "_timeouts"))
        if taken or not re.fullmatch(r"[A-Za-z0-9_]+", title):
            yield (
                f"{key}: got {title!r}; expected letters, digits and underscores, not {listed(OF_ALL_REWARDS)}, and no "
                "ending _errors or _timeouts, because the metric is rollout/reward_<name>"
            )
    for title, count in Counter(titles.values()).items():
        if count > 1:
            keys = [key for key, of_key in titles.items() if of_key == title]
            of_functions = all(key.startswith(f"{section}.functions") for key in keys)
            yield (
                f"{section + '.functions' if of_functions else section}: {count} are called {title!r}; expected "
                f"different names for their metrics ({', '.join(keys)})"
            )


def _weight_problems(section: str, reward: Reward, config: Config, models: list[str]) -> Iterator[str]:
    weights = [part.weight for part in reward.parts] + [getattr(config, role).weight for role in models]
    if not weights:
        placing = " or ".join(rewarding_roles())
        yield (
            f"{section}.functions: got none, and no model scores responses; expected a function, or a role {placing} "
            "in placement"
        )
    elif not any(weights):
        yield (
            f"{section if models else section + '.functions'}: every weight is 0, so every reward would be 0; expected "
            "at least one other weight"
        )


def _model_problems(config: Config) -> Iterator[str]:
    placed = _models(config)
    for role in rewarding_roles():
        path = getattr(config, role).path
        if role in placed and path is None:
            yield f"{role}.path: got null, but placement has role {role}; expected the folder of its checkpoint"
        if role in placed and role == "judge" and config.judge.prompt is None:
            yield "judge.prompt: got null; expected the question to the judge, a text with {response}"
        if role not in placed and path is not None:
            yield f"{role}.path: got {path!r}, but no role {role} is placed; expected {role}: ranks in placement"


def _label_problems(config: Config) -> Iterator[str]:
    """Yields files without labels whose reward function needs them."""
    scores_training = algorithm_of(config).generates
    files = [("data.train", config.data.train, config.reward)] if scores_training else []
    answered = [] if config.scores_held_out else config.evaluations
    files += [(plan.config_key, plan.file, plan.reward or config.reward) for plan in answered]
    for key, file, reward in files:
        needing = [name for name in reward.names if name in NEEDS_LABEL]
        if needing and any(source.label_key is None for source in file.parts()):
            yield f"{key}.label_key: got null, but reward {needing[0]} needs labels; expected the name of their column"
