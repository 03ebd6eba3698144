"""The result of an import: config keys, untranslated keys, and the number of steps. Also conversions shared by the
rules."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from rltrain.config.explain import section_of
from rltrain.config.foreign import Pair
from rltrain.config.schema import Config
from rltrain.data.rows import read_rows
from rltrain.errors import ConfigError, UserError
from rltrain.import_config.shell_values import UNKNOWN, shown
from rltrain.runtime.json_text import read_json

# Contents of a model's config.json, if it exists locally.

SHAPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
"""Keys of config.json that other frameworks can override for a run."""


def model_config(path: object) -> dict[str, Any]:
    """Returns the contents of the model's config.json. Empty without such a file."""
    try:
        found = read_json(Path(str(path), "config.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def language_model(path: object) -> dict[str, Any]:
    """Returns `model_config`, or its part for the language model if the model also encodes images."""
    config = model_config(path)
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def has_delta_nets(path: object) -> bool:
    return "linear_num_key_heads" in language_model(path)


def overridden_key(key: str) -> tuple[str, ...] | None:
    """Returns the path in config.json overridden by a key of the source, or None."""
    parts = key.split(".")
    first = next((number for number, part in enumerate(parts) if part in SHAPE_KEYS), None)
    return None if first is None else tuple(parts[first:])


def says(path: object, overridden: tuple[str, ...], value: Any) -> bool:
    """Returns whether the model's config.json already has the value. Names of transformers 4 and 5 are known."""
    config = language_model(path)
    first, *rest = overridden
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found: Any = rope if first in ("rope_scaling", "rope_parameters") else config.get(first, rope.get(first))
    for part in rest:
        found = found.get(part) if isinstance(found, dict) else None
    return bool(found == value)


def only_positions(path: object, overridden: tuple[str, ...]) -> bool:
    """Returns whether an override changes only how many positions the model's config.json allows. It then has rotary
    embeddings without scaling, which are the same for every number of positions."""
    config = language_model(path)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return overridden == ("max_position_embeddings",) and bool(config) and not is_scaled


# The result of an import.

PLACEMENT = "placement."
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class UntranslatableError(Exception):
    """A value of the source without a counterpart. The text is the reason."""


@dataclass(frozen=True)
class Tree:
    """A tree of the trainer's code beside the source, possibly changed by its users."""

    defaults: Mapping[str, Any]
    """Its defaults where they differ from the release's."""
    selects: str = ""
    """The name of its function that selects rewards."""
    knows: str = ""
    """What this function knows beyond the release's."""


NO_TREE = Tree({})


def file_near(folder: Path, name: str) -> Path | None:
    """Returns a file, searched from a folder upwards. None if it does not exist."""
    near = folder.resolve()
    return next((one / name for one in (near, *near.parents) if (one / name).is_file()), None)


class SourceKeys:
    """The keys of a source with their values. It records the keys read by the rules."""

    def __init__(self, values: Mapping[str, Any], folder: Path | None = None) -> None:
        self.folder = folder or Path()
        """Folder of the source. The working directory for a command."""
        self._values = {key: _plain(value) for key, value in values.items()}
        self.unknown = {key for key, value in values.items() if UNKNOWN in str(value)}
        """Keys with values that only running the source could determine, at least in part."""
        self._read: set[str] = set()
        self.assumed: dict[str, Any] = {}
        """Defaults that the rules assume for the keys they read."""
        self.older = False
        """Whether the source is written for an older version with other defaults."""
        self.tree = NO_TREE
        self.last = ""
        """The last key read."""

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or `default`: the source's own default for a missing key."""
        self._read.add(key)
        default = self.tree.defaults.get(key, default)
        self.assumed.setdefault(key, default)
        self.last = key
        return self._values.get(key, default)

    def count(self, key: str, default: Any = None) -> int:
        """Returns the value as a whole number."""
        return count(self.get(key, default))

    def real(self, key: str, default: Any = None) -> float:
        """Returns the value as a float."""
        return real(self.get(key, default))

    def truth(self, key: str, default: Any = None) -> bool:
        """Returns the value as a bool."""
        return truth(self.get(key, default))

    def text(self, key: str, default: Any = None) -> str:
        """Returns the value as text."""
        return str(self.get(key, default))

    def first(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """Returns the first given one of `keys` with its value, or the first key with `default`. The keys are names of
        different versions."""
        for key in keys:
            if key in self._values:
                self._read.update(keys)
                self.assumed.setdefault(key, default)
                self.last = key
                return key, self._values[key]
        key = next((key for key in keys if key in self.tree.defaults), keys[0])
        return key, self.tree.defaults.get(key, default)

    def under(self, prefix: str) -> dict[str, Any]:
        """Returns the values of all keys beginning with `prefix`, such as "actor.optim.", without the prefix. They
        count as read."""
        found = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        self._read.update(found)
        return {key.removeprefix(prefix): value for key, value in found.items()}

    def file(self, name: str) -> Path | None:
        """Returns a file that the source names, searched from its folder upwards. None if it does not exist."""
        return file_near(self.folder, name)

    def left(self) -> dict[str, Any]:
        """Returns the values of all keys not read yet."""
        return {key: value for key, value in self._values.items() if key not in self._read}

    def used(self) -> dict[str, Any]:
        """Returns the values of all given keys that were read."""
        return {key: value for key, value in self._values.items() if key in self._read}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Setting:
    """A value of a config key."""

    value: Any
    origin: str
    """The key of the source, or other words for the origin of the value."""


@dataclass(frozen=True)
class Leftover:
    """An untranslated key of the source, with the reason."""

    key: str
    value: Any
    reason: str
    hole: str | None = None
    """The part that can stay open instead (`influence.open_holes`), if the key is a setting of it."""


@dataclass
class Translation:
    """The result of an import. `differences` change results. `leftovers` do not. `holes` has the source's settings of
    every config key that is left open."""

    framework: str
    settings: dict[str, Setting] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    differences: list[Leftover] = field(default_factory=list)
    holes: dict[str, list[Leftover]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    world_size: int = 1
    ranks_per_node: int = 8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The user's own values of config keys. They count before those of the source."""
    steps_given: bool = False
    """Whether the source or the user gives the steps, not epochs."""
    rules: Any = None
    """Rules for keys that are not translated (`influence.KeyRules`)."""

    def set(self, path: str, value: Any, origin: str) -> None:
        """Sets a config key."""
        self.settings[path] = Setting(value, origin)

    def place(self, roles: Iterable[str], ranks: str, origin: str) -> None:
        """Places roles on `ranks`. Roles on the same ranks share one key."""
        named = [*roles]
        for path, setting in list(self.settings.items()):
            if path.startswith(PLACEMENT) and setting.value == ranks:
                del self.settings[path]
                named = [*roles_of(path), *named]
                origin = setting.origin if setting.origin == origin else f"{setting.origin}; {origin}"
        self.settings[PLACEMENT + ", ".join(named)] = Setting(ranks, origin)

    def get(self, path: str) -> Any:
        """Returns the value of a config key, or its default if it was not set."""
        if path in self.fixed:
            return self.fixed[path]
        return self.settings[path].value if path in self.settings else default_of(path)

    def leave(self, key: str, value: Any, reason: str) -> None:
        """Adds a key without influence on results."""
        self.leftovers.append(Leftover(key, value, reason))

    def differs(self, key: str, value: Any, reason: str, hole: str | None = None) -> None:
        """Adds a key that changes results and has no counterpart. It may be a setting of a `hole`."""
        self.differences.append(Leftover(key, value, reason, hole))

    @property
    def meaning(self) -> tuple[Any, ...]:
        """All that describes the run, without the origins of values. Equal for imports of the same run."""
        values = {path: setting.value for path, setting in self.settings.items()}
        return values, self.differences, self.notes, self.world_size, self.ranks_per_node

    @property
    def listed(self) -> "frozenset[str]":
        """The untranslated keys that already have a reason."""
        return frozenset(one.key for one in (*self.leftovers, *self.differences))

    @property
    def placed(self) -> dict[str, str]:
        """The ranks of every placed role."""
        paths = [path for path in self.settings if path.startswith(PLACEMENT)]
        return {role: str(self.settings[path].value) for path in paths for role in roles_of(path)}

    def num_ranks(self, role: str) -> int:
        """Returns the number of ranks of a role. 0 if it is not placed, or its ranks are not a single range."""
        found = RANGE.fullmatch(self.placed.get(role, ""))
        return int(found[2] or found[1]) - int(found[1]) + 1 if found else 0

    @property
    def data(self) -> dict[str, Any]:
        """The data of the config file, nested in sections."""
        return nested({path: setting.value for path, setting in self.settings.items()})


Convert = Callable[[Any], Any]


def apply(pairs: Iterable[Pair], keys: SourceKeys, out: Translation, **own: Convert) -> None:
    """Sets the config keys of the pairs, for keys given in the source and for defaults different from ours.

    Values are converted to the type of our key. `own` has further converters by the last part of our key.
    """
    for pair in pairs:
        given = pair.key in keys
        value = keys.get(pair.key, pair.default)
        if value is None:
            continue
        convert = own.get(pair.here.rpartition(".")[2]) or converter_of(pair.here)
        try:
            converted = convert(value)
        except UntranslatableError as reason:
            out.differs(pair.key, value, str(reason))
            continue
        if given or converted != default_of(pair.here):
            out.set(pair.here, converted, pair.key if given else f"{pair.key}, default of {out.framework}")


def keys_of(path: str) -> tuple[str, ...]:
    """Splits a dotted path into keys. A key of `placement` may contain dots."""
    if path.startswith(PLACEMENT):
        return ("placement", path.removeprefix(PLACEMENT))
    return tuple(path.split("."))


def field_of(path: str) -> FieldInfo | None:
    """Returns the field of a config key in the schema, or None if the key does not exist."""
    section: Any = Config
    found = None
    for name in path.split("."):
        found = getattr(section, "model_fields", {}).get(name)
        if found is None:
            return None
        section = section_of(found.annotation)
    return found


def roles_of(path: str) -> list[str]:
    """Returns the roles of a path below `placement`."""
    return path.removeprefix(PLACEMENT).split(", ")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nests values under dotted paths into sections."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = keys_of(path)
        section = data
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
    return data


def flattened(data: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the values under dotted keys. Lists and empty mappings are values."""
    if not isinstance(data, dict) or not data:
        return {prefix: data} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def default_of(path: str) -> Any:
    """Returns the default of a config key. None if it is required or part of an optional section."""
    found = field_of(path)
    return None if found is None or found.is_required() else found.get_default(call_default_factory=True)


# Conversion of values from other trainers.

VOCABULARY = 100_000
"""A top_k from this size on is the same as none."""
ESTIMATORS = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "k3+": "k3", "k1+": "k1"}
NOTHING = (None, "", "null", "None", "none")


RUNNING = "known without running the source"


def number(value: Any) -> Any:
    """Returns an int if the value is a whole number, else a float."""
    if isinstance(value, bool) or value in NOTHING:
        raise UntranslatableError("a number was expected")
    try:
        real = float(value)
    except (TypeError, ValueError):
        raise UntranslatableError(f"it is not a number {RUNNING}") from None
    return int(real) if real.is_integer() and abs(real) < 2**53 and "e-" not in str(value) else real


def count(value: Any) -> int:
    found = number(value)
    if not isinstance(found, int):
        raise UntranslatableError("a whole number was expected")
    return found


def real(value: Any) -> float:
    return float(number(value))


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in NOTHING:
        return False
    if str(value).lower() in ("true", "1", "yes", "on"):
        return True
    if str(value).lower() in ("false", "0", "no", "off"):
        return False
    raise UntranslatableError("true or false was expected")


def negated(value: Any) -> bool:
    return not truth(value)


def text(value: Any) -> str:
    return str(value)


def top_k(value: Any) -> int:
    """Returns the top_k. 0 means none."""
    found = count(value)
    return 0 if found <= 0 or found >= VOCABULARY else found


def interval(value: Any) -> int:
    """Returns the steps of an interval. -1 and null become 0, for never."""
    return 0 if value in NOTHING else max(count(value), 0)


def one_of(names: Mapping[str, Any], what: str) -> Callable[[Any], Any]:
    """Returns a converter for names. `what` describes them in messages."""

    def convert(value: Any) -> Any:
        if str(value) not in names:
            raise UntranslatableError(f"{what} here: {', '.join(names)}")
        return names[str(value)]

    return convert


estimator = one_of(ESTIMATORS, "estimators of the KL")


def pair(value: Any) -> tuple[float, float]:
    """Returns two numbers from a list or its text."""
    given = re.findall(r"[^][(), ]+", value) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or len(given) != 2:
        raise UntranslatableError("two numbers were expected")
    return real(given[0]), real(given[1])


def paths(value: Any) -> Any:
    """Returns a file, or a list of several files."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return parts[0] if len(parts) == 1 else parts
    if isinstance(value, Sequence) and all(isinstance(one, str) for one in value) and value:
        return value[0] if len(value) == 1 else [*value]
    raise UntranslatableError("a file or a list of files was expected")


def ranks(first: int, number_of: int) -> str:
    """Returns the range of `number_of` ranks from `first` on."""
    if number_of < 1:
        raise UntranslatableError("no rank is left")
    return str(first) if number_of == 1 else f"{first}-{first + number_of - 1}"


CONVERTERS: dict[str, Convert] = {
    "data.train.path": paths,
    "rollout.sampling.top_k": top_k,
    **dict.fromkeys(("checkpoint.save_interval", "checkpoint.save_hf_interval", "checkpoint.keep"), interval),
    "evaluation.interval": interval,
}
"""Converters by config key. Other keys use the converter of their type:"""
BY_TYPE: dict[Any, Convert] = {bool: truth, int: count, float: real, str: text}


def converter_of(path: str) -> Convert:
    """Returns the converter from a value of a source to a value of a config key."""
    found = field_of(path)
    assert found is not None, path
    return CONVERTERS.get(path) or next(BY_TYPE[kind] for kind in _types_in(found.annotation) if kind in BY_TYPE)


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _types_in(argument)


# Algorithms and settings common to several sources.

ALGORITHMS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "ppo",
    "ppo": "ppo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
    "reinpp": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "maxrl": "maxrl",
    "gdpo": "gdpo",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
    "grpo_passk": "pass_at_k",
}
WITHOUT_COMPARISON = ("reinforce_plus_plus", "ppo", "remax")
WHITENED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Algorithms that whiten advantages here unless the config says otherwise."""
DISCOUNTED = ("ppo", "reinforce_plus_plus")
WITH_STD = ("grpo", "pass_at_k", "gdpo")


def set_whitening(out: Translation, algorithm: str, whitens: bool, key: str) -> None:
    """Sets the normalisation of advantages over a step's response tokens, from `key` of the source."""
    if whitens or algorithm in WHITENED:
        out.set("advantages.whiten", whitens, key)


def take_rewards(out: Translation, estimator: str, key: str, *, whitens: bool) -> None:
    """Sets an algorithm without comparisons for one sample per prompt. In the source such a sample has its reward as
    advantage. Algorithms with comparisons would give it 0 here."""
    origin = f"{estimator} with one sample per prompt: the advantage is the reward"
    out.set("algorithm", "reinforce_plus_plus", origin)
    out.set("advantages.whiten", whitens, origin)
    out.notes.append(
        f"{key} is 1: with one sample per prompt {out.framework}'s {estimator} uses the reward as advantage. Here that "
        "would be 0, so the algorithm is reinforce_plus_plus with the reward as advantage"
    )


def set_clip(out: Translation, low: Any, high: Any, *origins: str) -> None:
    """Sets the lower and upper clip of ratios. `origins` is one origin for both, or one for each."""
    out.set("loss.clip_low", real(low), origins[0])
    out.set("loss.clip_high", real(high), origins[-1])


def set_named(out: Translation, path: str, names: Mapping[str, str], key: str, value: Any, what: str) -> bool:
    """Sets a key from a name of the source. Returns whether the name is known."""
    if str(value) in names:
        out.set(path, names[str(value)], key)
        return True
    out.differs(key, value, f"{what} here: {', '.join(names)}")
    return False


def set_betas(keys: SourceKeys, out: Translation, key: str, role: str = "actor") -> None:
    first, second = pair(keys.get(key, [0.9, 0.999]))
    out.set(f"{role}.optimizer.beta1", first, key)
    out.set(f"{role}.optimizer.beta2", second, key)


def set_signed_math(out: Translation, key: str, kind: str, excluded: Sequence[str]) -> None:
    """Sets the reward of DAPO: 1 and -1, for the answer after "Answer:". `excluded` are the algorithms that learn from
    the -1."""
    if out.get("algorithm") in excluded:
        reason = f"a wrong answer has -1 there and 0 here, which {out.get('algorithm')} learns from"
        out.differs(key, kind, reason)
        return
    part = {"function": "math", "weight": 2.0, "options": {"after": ["Answer:", "answer:"]}}
    out.set("reward.functions", [part], f"{kind}: 1 and -1 there, 2 and 0 here, with equal advantages")


def set_overlong_penalty(out: Translation, tokens: Any, factor: Any, origin: str) -> None:
    out.set("advantages.overlong_penalty", {"buffer_tokens": count(tokens), "factor": real(factor)}, origin)


def set_mini_batches(out: Translation, prompts: Any, mini_batch: Any, origin: str) -> None:
    """Sets mini-batches of a source that counts them in prompts."""
    whole, rest = divmod(count(prompts), count(mini_batch))
    if not whole:
        out.notes.append(f"{origin}: {mini_batch} is above the {prompts} prompts of a step: one mini-batch")
        whole, rest = 1, 0
    if rest:
        raise UntranslatableError(
            f"{origin}: train batch size {prompts} must be divisible by mini batch size {mini_batch}"
        )
    out.set("batch.mini_batches", whole, origin)
    if whole > 1:
        out.set("batch.mini_batches_by", "prompts", origin)


def set_context(out: Translation, longest: Any, origin: str) -> None:
    """Sets the context to the longest prompt and response, or to a larger value of the source."""
    needed = out.get("data.max_prompt_tokens") + out.get("rollout.sampling.max_response_tokens")
    given = count(longest) if longest is not None else 0
    if 0 < given < needed:
        out.differs(origin, given, f"it is below the longest prompt and response, {needed} tokens: lower one of them")
    elif given:
        out.leave(origin, given, "the longest prompt and response, or rollout.max_context_tokens")
    out.set("rollout.max_context_tokens", max(needed, given), origin if given > needed else "prompt and response")


def set_evaluation(out: Translation, data: dict[str, Any], sampling: dict[str, Any], samples: int, origin: str) -> None:
    """Adds a held-out set. It becomes data.eval if it is decoded greedily, which gives equal samples."""
    if sampling.get("temperature", 0.0) == 0 and samples > 1:
        out.notes.append(f"{origin}: {samples} greedy samples of a prompt are equal; one is evaluated")
    if sampling.get("temperature", 0.0) == 0:
        for key, value in data.items():
            out.set(f"data.eval.{key}", value, origin)
        return
    plan = {"name": "val", "data": data, "sampling": sampling, "samples_per_prompt": samples}
    out.set("evaluation.sets", [plan], origin)
    needed = sampling.get("max_response_tokens", 0) + out.get("data.max_prompt_tokens")
    if needed > out.get("rollout.max_context_tokens"):
        out.set("rollout.max_context_tokens", needed, f"prompt and longest response of {origin}")


def cut_fully_sharded(out: Translation, key: str, name: object) -> None:
    """Replaces the FSDP of a source by Megatron in `out`. `key` is the source's key and `name` its value, for messages.

    Megatron shards no weights over all ranks. So the actor gets the engine's tensor-parallel size, if that is above 1
    and the actor's is still 1. Its optimizer is sharded over replicas. The ranks of tensor parallelism then also share
    sequences (sequence parallelism). So the context-parallel size is divided by its greatest common divisor with that
    size.
    """
    tp, slices = out.get("rollout.parallel.tp"), out.get("actor.parallel.cp")
    out.leave(key, name, "Megatron trains, with the engine's tensor parallelism and a distributed optimizer")
    if tp > 1 and out.get("actor.parallel.tp") == 1:
        out.set("actor.parallel.tp", tp, f"{key} {name}: instead of sharded weights, as for the engine")
        out.set("actor.parallel.sequence_parallel", True, f"{key} {name}")
        if slices > 1:
            out.set("actor.parallel.cp", slices // gcd(slices, tp), f"{slices} ranks share a sequence, {tp} by tp")


# Number of steps, from epochs and rows if the source counts them.


@dataclass(frozen=True)
class RowCounts:
    """The user's number of rows in all files of data.train, or of steps."""

    rows: int | None = None
    steps: int | None = None
    counted: dict[Any, int | None] = field(default_factory=dict, compare=False)
    """Rows counted so far, by their files."""

    def of(self, train: dict[str, Any]) -> int | None:
        """Returns the rows of data.train, counted once."""
        if self.rows is not None:
            return self.rows
        named = str(train.get("path"))
        if named not in self.counted:
            self.counted[named] = rows_of(train)
        return self.counted[named]


def set_steps(
    out: Translation,
    given: RowCounts,
    steps: Any,
    epochs: Any,
    named: tuple[str, str],
    name: str | None = None,
    at_once: int = 0,
) -> None:
    """Sets steps, or computes epochs * floor(rows / prompts per step). A step may draw `at_once` more prompts than it
    trains on. Raises ConfigError if the rows cannot be counted."""
    most = None if steps in NOTHING or count(steps) < 1 else count(steps)
    out.steps_given = given.steps is not None or (most is not None and (name is not None or epochs in NOTHING))
    if given.steps is not None:
        out.set("steps", given.steps, "--steps")
    elif most is not None and out.steps_given:
        out.set("steps", most, named[0])
    else:
        rows = given.of(out.data.get("data", {}).get("train", {}))
        if rows is None and most is not None:
            out.steps_given = True
            out.set("steps", most, f"{named[0]}; {named[1]} may end the run earlier")
            return
        if rows is None:
            raise ConfigError(
                f"steps: the source counts epochs ({named[1]} {epochs}), but the rows of data.train.path "
                f"{out.get('data.train.path')} cannot be counted; expected --rows N (number of rows) or --steps N"
            )
        prompts = at_once or out.get("batch.prompts_per_step")
        if epochs in NOTHING:
            raise ConfigError(f"steps: the source gives neither {named[0]} nor {named[1]}; expected --steps N")
        each = max(rows // prompts, 1)
        found = min(count(epochs) * each, most or count(epochs) * each)
        out.steps_given = found == most
        out.set("steps", found, f"{named[1]} {epochs} x ({rows} rows // {prompts} prompts)")


def rows_of(train: dict[str, Any]) -> int | None:
    """Returns the number of rows of existing files. None if one does not exist or cannot be read."""
    given = train.get("path") or ()
    paths = (given,) if isinstance(given, str) else tuple(given)
    if not paths or not all(Path(path).exists() for path in paths):
        return None
    try:
        return sum(1 for _ in read_rows(paths, frozenset(), "data.train"))
    except UserError:
        return None
