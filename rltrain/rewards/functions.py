"""The reward functions of a config: their signatures, and how to call each."""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.rewards.answers import SCORE, Answer, Scorable, TookTooLongError, as_answer, as_error, time_limit
from rltrain.rewards.judge import RemoteJudge, is_url
from rltrain.rewards.locating import locate
from rltrain.rewards.slime_sample import RewardArguments, SlimeSample

# Calling conventions of rltrain and of other trainers. Parameter names select the convention.

Options = Mapping[str, Any]
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Unsuitable(Exception):  # noqa: N818 - a finding; load_reward turns it into a ConfigError
    """A function cannot be called. The message has the reason."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function. Raises ValueError if Python cannot inspect them."""

    positional: tuple[str, ...]
    """Parameters that take positional arguments, in order."""
    named: frozenset[str]
    """Parameters that take keyword arguments."""
    required: frozenset[str]
    takes_any_name: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature":
        parameters = inspect.signature(function).parameters.values()
        kinds = {parameter.name: parameter.kind for parameter in parameters}
        return cls(
            positional=tuple(name for name, kind in kinds.items() if kind in BY_POSITION),
            named=frozenset(name for name, kind in kinds.items() if kind in BY_NAME),
            required=frozenset(
                parameter.name
                for parameter in parameters
                if parameter.default is parameter.empty and parameter.kind in (*BY_POSITION, *BY_NAME)
            ),
            takes_any_name=inspect.Parameter.VAR_KEYWORD in kinds.values(),
        )

    def takes(self, name: str) -> bool:
        return name in self.named or self.takes_any_name


@dataclass(frozen=True)
class Columns:
    """The columns of a sample's row that a function needs."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    every: bool = False
    label: bool = False
    """True if the function needs the label in its original form."""

    @property
    def any(self) -> bool:
        return bool(self.required or self.optional or self.every or self.label)


@dataclass(slots=True)
class RewardCall:
    """The arguments of one call, without options."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    """Metrics reported by the function during the call."""


class Wants:
    """The parts of a sample that a reward reads."""

    fields: frozenset[str] = frozenset()
    """Fields of Scorable, in addition to prompt, response and label."""
    columns = Columns()
    takes_label = True


class Convention(Wants, ABC):
    """The calling convention of one function. A call is for one sample, or if `batched` for all samples of a prompt."""

    batched = False
    allows_none: ClassVar[bool] = False
    """True if None is a valid answer. It skips the sample."""
    passes_options: ClassVar[bool] = True
    """True if options are keyword arguments of the function."""
    score_key: str = SCORE
    """The key of the score in a dict answer."""

    @abstractmethod
    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        """Returns the arguments for one sample, or for a batch."""


OWN_ARGUMENTS = ("prompt", "response", "label")
OWN_VALUES: Mapping[str, Callable[[Scorable], Any]] = {
    "prompt": lambda sample: sample.prompt,
    **dict.fromkeys(("response", "completion", "solution_str"), lambda sample: sample.response),
    **dict.fromkeys(("label", "ground_truth"), lambda sample: sample.label),
    "row": lambda sample: sample.row,
    "messages": lambda sample: sample.conversation(),
    "turns": lambda sample: sample.turns,
    "env_reward": lambda sample: sample.env_reward,
    "images": lambda sample: sample.opened_images(),
}
FIELDS_OF_VALUE = {
    "row": ("row",),
    "messages": ("messages", "turns"),
    "turns": ("turns",),
    "env_reward": ("env_reward",),
    "images": ("images",),
}
OWN_EXTRAS = tuple(FIELDS_OF_VALUE)
MEANT_BY_NAME: Mapping[str, str | None] = {
    **{name: name for name in OWN_ARGUMENTS},
    **dict.fromkeys(("completion", "solution_str"), "response"),
    "ground_truth": "label",
    **dict.fromkeys(("data_source", "extra_info", "prompts", "responses", "labels", "args", "sample", "samples")),
}
"""Maps a parameter name to its expected argument. A positional argument with another name is refused, because the
function may be meant for another convention. None means that no argument fits the name."""


class Own(Convention):
    """The convention (prompt, response, label). They are passed by name if all required parameters have known names,
    else by position. The parameters row, messages, turns, env_reward and images are passed by name."""

    def __init__(self, signature: Signature, options: Options) -> None:
        known = signature.named & OWN_VALUES.keys() - options.keys()
        in_order = signature.positional[: len(OWN_ARGUMENTS)] == OWN_ARGUMENTS
        self.by_name = not in_order and bool(known) and signature.required - options.keys() <= known
        extras = [name for name in OWN_EXTRAS if name in known]
        self.names = tuple(sorted(known)) if self.by_name else tuple(extras)
        self.takes_label = not self.by_name or bool(known & {"label", "ground_truth"})
        self.fields = frozenset(name for extra in extras for name in FIELDS_OF_VALUE[extra])
        self.columns = Columns(every="row" in extras)
        if repeated := sorted(signature.named & OWN_VALUES.keys() & options.keys()):
            raise Unsuitable(f"multiple values for argument {', '.join(map(repr, repeated))}")
        if not self.by_name:
            _check_meaning(signature.positional)

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        (sample,) = samples
        positional = () if self.by_name else (sample.prompt, sample.response, sample.label)
        return RewardCall(positional, {name: OWN_VALUES[name](sample) for name in self.names})


def _check_meaning(names: Sequence[str]) -> None:
    for name, argument in zip(names, OWN_ARGUMENTS, strict=False):
        if MEANT_BY_NAME.get(name, argument) != argument:
            raise Unsuitable(f"it takes ({', '.join(names)}) and would get the {argument} as {name!r}")


class Verl(Convention):
    """The convention of verl: compute_score(data_source, solution_str, ground_truth, extra_info), with any subset of
    them. It is `batched` if the names end in s and take lists."""

    def __init__(self, signature: Signature, options: Options) -> None:
        self.batched = "solution_strs" in signature.named
        self.suffix = "s" if self.batched else ""
        self.takes = {
            name
            for name in ("data_source", "solution_str", "ground_truth", "extra_info")
            if signature.takes(name + self.suffix) and name + self.suffix not in options
        }
        source = frozenset({"data_source"} & self.takes)
        needed = "data_source" + self.suffix in signature.required
        self.columns = Columns(
            required=source if needed else frozenset(),
            optional=frozenset({"data_source", "extra_info"} & self.takes),
            label="ground_truth" in self.takes,
        )
        self.takes_label = self.columns.label
        self.fields = frozenset({"row", "label_value"})
        _check_filled(signature, {name + self.suffix for name in self.takes}, options, "verl's")

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        values: dict[str, list[Any]] = {
            "data_source": [sample.row.get("data_source") for sample in samples],
            "solution_str": [sample.response for sample in samples],
            "ground_truth": [sample.label_value for sample in samples],
            "extra_info": [sample.row.get("extra_info") or {} for sample in samples],
        }
        return RewardCall((), {n + self.suffix: values[n] if self.batched else values[n][0] for n in self.takes})


class Trl(Convention):
    """The convention of TRL: (prompts, completions, completion_ids, **columns). Each is a list with one entry per
    sample of a prompt. For chat prompts, completions are lists of messages."""

    batched = True
    allows_none = True
    takes_label = False
    GIVEN = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_metric"})
    NOT_GIVEN = frozenset({"log_extra", "environments"})
    NO_COLUMNS = GIVEN | NOT_GIVEN | {"prompt", "completion"}

    def __init__(self, signature: Signature, options: Options) -> None:
        self.given = [name for name in sorted(self.GIVEN) if signature.takes(name) and name not in options]
        named = signature.named - self.NO_COLUMNS - options.keys()
        self.columns = Columns(
            required=named & signature.required, optional=named - signature.required, every=signature.takes_any_name
        )
        self.options = options
        self.fields = frozenset({"messages", "row", "turns"}) | {
            name for name, of in (("response_ids", "completion_ids"), ("step", "trainer_state")) if of in self.given
        }
        if "images" in named:
            self.fields |= {"images"}
        _check_filled(signature, {*self.given, *named}, options, "TRL's")

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        call = RewardCall()
        values: dict[str, Any] = {
            "prompts": [sample.messages or sample.prompt for sample in samples],
            "completions": [sample.completion() if sample.messages else sample.response for sample in samples],
            "completion_ids": [sample.response_ids for sample in samples],
            "trainer_state": SimpleNamespace(global_step=samples[0].step),
            "log_metric": call.logged.__setitem__,
        }
        call.named.update({name: [sample.row.get(name) for sample in samples] for name in self._columns(samples)})
        call.named.update({name: values[name] for name in self.given})
        if any(sample.images for sample in samples):
            call.named["images"] = [sample.opened_images() for sample in samples]
        return call

    def _columns(self, samples: Sequence[Scorable]) -> Iterable[str]:
        """Returns the available columns that this function takes. The rows may have more for other functions."""
        there = dict.fromkeys(name for sample in samples for name in sample.row)
        wanted = self.columns.required | self.columns.optional
        refused = self.NO_COLUMNS | self.options.keys()
        return [name for name in there if name in wanted or (self.columns.every and name not in refused)] + [
            name for name in sorted(self.columns.required) if name not in there
        ]


class Slime(Convention):
    """The convention of slime: custom_rm(args, sample), or (args, samples) with all samples of a prompt. Options are
    attributes of args."""

    passes_options = False
    fields = frozenset({"messages", "row", "label_value", "prompt_ids", "response_ids", "response_mask"}) | {
        *("truncated", "group", "sample_id")
    }

    def __init__(self, signature: Signature, options: Options) -> None:
        self.batched = signature.positional[1] == "samples"
        self.arguments = RewardArguments({"group_rm": self.batched, **options})
        self.score_key = self.arguments.reward_key or SCORE
        self.columns = Columns(optional=frozenset({self.arguments.metadata_key}), label=True)
        _check_filled(signature, signature.positional[:2], {}, "slime's")

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        converted = [SlimeSample.of(sample, self.arguments.metadata_key) for sample in samples]
        return RewardCall((self.arguments, converted if self.batched else converted[0]))


def _check_filled(signature: Signature, given: Iterable[str], options: Options, whose: str) -> None:
    missing = sorted(signature.required - set(given) - options.keys())
    if missing:
        raise Unsuitable(f"it has {whose} form, but no value for {', '.join(map(repr, missing))}")


def convention_of(signature: Signature, options: Options) -> Convention:
    """Returns the convention for a signature. Raises Unsuitable if the function cannot be called."""
    if {"solution_str", "solution_strs"} & signature.named and "prompt" not in signature.named:
        return Verl(signature, options)
    if {"completions", "completion_ids"} & signature.named:
        return Trl(signature, options)
    if signature.positional[:2] in (("args", "sample"), ("args", "samples")):
        return Slime(signature, options)
    return Own(signature, options)


# Resolved reward functions.

BUILT_IN = {
    "exact_match": "rltrain.rewards.exact_match:exact_match",
    "math": "rltrain.rewards.math:math",
    "code": "rltrain.rewards.code:code",
    "environment": "rltrain.rewards.environment:environment",
}
# Functions that cannot hang or raise on any text. They need no separate process.
TRUSTED = frozenset({"exact_match", "environment"})
# Functions that compare texts. They would compare an object or a list as JSON.
COMPARES_TEXT = frozenset({"exact_match"})

FORMS = (
    "(prompt, response, label) with optional row, messages, turns and env_reward, verl's (data_source, "
    "solution_str, ground_truth, extra_info), TRL's (prompts, completions, **columns) or slime's (args, sample): "
    "docs/rewards.md"
)
OWN_SIGNATURE = Signature(OWN_ARGUMENTS, frozenset(OWN_ARGUMENTS), frozenset(OWN_ARGUMENTS), takes_any_name=False)


def labels_of(reward: schema.Reward) -> Literal["label", "plain label"]:
    """Returns the kind of label that the functions need. A plain label is neither a list nor an object."""
    return "label" if COMPARES_TEXT.isdisjoint(reward.names) else "plain label"


@dataclass(frozen=True)
class RewardFunction:
    """A resolved reward function."""

    name: str
    """The name in the config."""
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    convention: Convention = field(default_factory=lambda: Own(OWN_SIGNATURE, {}))
    title: str = ""
    """The prefix of its metrics. Empty if it is the only function, under reward.function."""
    weight: float = 1.0
    config_key: str = "reward"
    """The config section of this function."""
    named_score: str | None = None
    """The key of the reward in a returned dict, if the config sets one."""

    @property
    def score_key(self) -> str:
        return self.named_score or self.convention.score_key

    @property
    def key(self) -> str:
        """The config key of its name."""
        return f"{self.config_key}.function"

    @property
    def trusted(self) -> bool:
        """True if it is safe to run in this process, without a time limit."""
        return self.name in TRUSTED

    @cached_property
    def asynchronous(self) -> bool:
        """True if calls are coroutines. Many are awaited concurrently."""
        return any(inspect.iscoroutinefunction(called) for called in (self.function, type(self.function).__call__))

    @property
    def remote(self) -> bool:
        return isinstance(self.function, RemoteJudge)

    @property
    def place(self) -> str:
        """The quoted name, followed by file and line for a Python function."""
        code = None if self.remote else getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{self.name!r}" + (f" ({code.co_filename}, line {code.co_firstlineno})" if code else "")

    def limit_s(self, timeout_s: float) -> float:
        """Returns the seconds for one sample, given reward.timeout_s."""
        return self.function.longest_s if isinstance(self.function, RemoteJudge) else timeout_s

    def time_limit(self, limit_s: float) -> str:
        """Returns the limit of a sample in words."""
        return time_limit(limit_s, batched=self.convention.batched)

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        """Returns the arguments for one sample, or for a batch if the convention is batched."""
        call = self.convention.call(samples)
        if self.convention.passes_options and not self.remote:
            call.named.update(self.options)
        return call

    def answers(self, returned: Any, call: RewardCall, samples: Sequence[Scorable]) -> list[Answer]:
        """Converts the returned value of `call` to one answer per sample."""
        if not self.convention.batched:
            return [as_answer(returned, samples[0].num_turns, self.score_key)]
        parts = _parts(returned)
        if parts is None or len(parts) != len(samples):
            got = type(returned).__name__ if parts is None else f"{len(parts)} rewards"
            error = f"returned {got} for {len(samples)} samples; expected a list with a number for each"
            return [Answer(error=error) for _ in samples]
        answers = [
            Answer()
            if part is None and self.convention.allows_none
            else as_answer(part, sample.num_turns, self.score_key)
            for part, sample in zip(parts, samples, strict=True)
        ]
        if call.logged:  # the function reported metrics during the call
            logged = as_answer({"score": 0} | call.logged).metrics
            answers = [
                answer if answer.score is None else replace(answer, metrics={**logged, **answer.metrics})
                for answer in answers
            ]
        return answers


def _parts(returned: Any) -> list[Any] | None:
    """Returns the elements of a list, an array or a tensor, and None for other values."""
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__len__"):
        return None
    try:
        return list(returned)
    except Exception:
        return None


def load_rewards(settings: schema.Reward, section: str = "reward", *, is_part: bool = False) -> list[RewardFunction]:
    """Returns the functions of the config section `section`. Raises ConfigError if one cannot be imported or called.

    `is_part` is true if the reward has other parts too. Then a single function gets a title.
    """
    if settings.functions is None:
        return [load_reward(settings, settings.parts[0].title if is_part else "", config_key=section)]
    return [
        load_reward(settings.alone(part), part.title, part.weight, f"{section}.functions.{number}")
        for number, part in enumerate(settings.functions)
    ]


def load_reward(
    settings: schema.Reward, title: str = "", weight: float = 1.0, config_key: str = "reward"
) -> RewardFunction:
    """Returns the function named by `function` in the config section `config_key`.

    Modules in the working directory can be imported too. Raises ConfigError if the function cannot be imported or has
    no known form.
    """
    name, options = settings.function, settings.options
    of_config = (title, weight, config_key, settings.score_key)
    if is_url(name):
        judge = _judge(settings, config_key)
        return RewardFunction(name, judge, options, Own(Signature.of(judge), {}), *of_config)
    function = locate(BUILT_IN.get(name, name), f"{config_key}.function", shown=name, known=[*BUILT_IN, "an URL"])
    return RewardFunction(name, function, options, _convention(function, settings, config_key), *of_config)


def _judge(settings: schema.Reward, config_key: str) -> RemoteJudge:
    try:
        return RemoteJudge(
            settings.function, timeout_s=settings.timeout_s, retries=settings.retries, **settings.options
        )
    except TypeError as error:
        raise ConfigError(
            f"{config_key}.options: got {settings.options} for {settings.function!r}; expected token_env (the name of "
            f"an environment variable) and payload (further fields of the request): {error}"
        ) from error


def _convention(function: Callable[..., Any], settings: schema.Reward, config_key: str) -> Convention:
    name, options = settings.function, settings.options
    try:
        convention = convention_of(Signature.of(function), options)
        if isinstance(convention, Own) and not convention.by_name:
            inspect.signature(function).bind(*OWN_ARGUMENTS, **dict.fromkeys(convention.names), **options)
        elif convention.passes_options:
            inspect.signature(function).bind_partial(**options)
    except (TypeError, ValueError, Unsuitable) as error:
        raise ConfigError(
            f"{config_key}.function: {name!r} cannot be called with ({', '.join(OWN_ARGUMENTS)}) and "
            f"{config_key}.options {options}: {error}; expected {FORMS}"
        ) from error
    return convention


# Calls in this process. Every sample gets an answer, even if the function fails.

OWN_FILES = frozenset({__file__})


def call(function: RewardFunction, samples: Sequence[Scorable]) -> list[Answer]:
    """Calls the function once and returns an answer per sample. `samples` is one sample, or a batch if the convention
    is batched."""
    try:
        prepared = function.call(samples)
        returned = function.function(*prepared.positional, **prepared.named)
    except BaseException as error:  # a user's sys.exit() costs a sample, not the process
        return [as_error(error, OWN_FILES) for _ in samples]
    return function.answers(returned, prepared, samples)


async def await_calls(
    function: RewardFunction, calls: Sequence[Sequence[Scorable]], limit_s: float
) -> list[list[Answer]]:
    """Awaits all calls concurrently and returns their answers. Each call may take `limit_s` per sample."""
    return await asyncio.gather(*(_await_call(function, samples, limit_s) for samples in calls))


async def _await_call(function: RewardFunction, samples: Sequence[Scorable], limit_s: float) -> list[Answer]:
    limit = None
    try:
        prepared = function.call(samples)
        async with asyncio.timeout(limit_s * len(samples)) as limit:
            returned = await function.function(*prepared.positional, **prepared.named)
    except BaseException as raised:
        error = TookTooLongError(function.time_limit(limit_s)) if limit and limit.expired() else raised
        return [as_error(error, OWN_FILES) for _ in samples]
    return function.answers(returned, prepared, samples)
