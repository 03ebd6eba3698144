"""The reward functions that a config names, in every form, and how each is called."""

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

# How reward functions of this and other trainers are called: each is recognised by the names of its parameters.

Options = Mapping[str, Any]
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Unsuitable(Exception):  # noqa: N818 - a finding, which the registry makes a ConfigError of
    """Why a function cannot be called."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function. Raises ValueError for one that has none to be seen."""

    positional: tuple[str, ...]
    """Those that can be given by position, in order."""
    named: frozenset[str]
    """Those that can be given by name."""
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
    """What a function wants of a sample's row."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    every: bool = False
    label: bool = False
    """The label as it stands in the file."""

    @property
    def any(self) -> bool:
        return bool(self.required or self.optional or self.every or self.label)


@dataclass(slots=True)
class RewardCall:
    """The arguments of one call, without options."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    """Metrics that the function hands in while it runs."""


class Wants:
    """What is asked for of a sample."""

    fields: frozenset[str] = frozenset()
    """Those of a Scorable beside prompt, response and label."""
    columns = Columns()
    takes_label = True


class Convention(Wants, ABC):
    """How one function is called for a sample, or if `batched` for all samples of a prompt at once."""

    batched = False
    allows_none: ClassVar[bool] = False
    """Whether None is an answer: not for this sample."""
    passes_options: ClassVar[bool] = True
    """Whether options are keyword arguments of the function."""
    score_key: str = SCORE
    """Of an answer that is a dict."""

    @abstractmethod
    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        """For one sample, or for a batch."""


OWN_ARGUMENTS = ("prompt", "response", "label")
OWN_VALUES: Mapping[str, Callable[[Scorable], Any]] = {
    "prompt": lambda sample: sample.prompt,
    **dict.fromkeys(("response", "completion", "solution_str"), lambda sample: sample.response),
    **dict.fromkeys(("label", "ground_truth"), lambda sample: sample.label),
    "row": lambda sample: sample.row,
    "messages": lambda sample: sample.conversation(),
    "turns": lambda sample: sample.turns,
    "env_reward": lambda sample: sample.env_reward,
}
FIELDS_OF_VALUE = {
    "row": ("row",),
    "messages": ("messages", "turns"),
    "turns": ("turns",),
    "env_reward": ("env_reward",),
}
OWN_EXTRAS = tuple(FIELDS_OF_VALUE)
MEANT_BY_NAME: Mapping[str, str | None] = {
    **{name: name for name in OWN_ARGUMENTS},
    **dict.fromkeys(("completion", "solution_str"), "response"),
    "ground_truth": "label",
    **dict.fromkeys(("data_source", "extra_info", "prompts", "responses", "labels", "args", "sample", "samples")),
}
"""What a parameter of such a name is meant to get, so that a function of another form is not called with something
else. None: nothing that stands alone."""


class Own(Convention):
    """(prompt, response, label), by name where the function names nothing else, else by position; and by name, where
    it has such parameters, row, messages, turns and env_reward."""

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
    """compute_score(data_source, solution_str, ground_truth, extra_info), as many of them as it takes; `batched` where
    these names have an s behind them and are lists."""

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
    """(prompts, completions, completion_ids, **columns), lists with an entry for each sample of a prompt. Completions
    of prompts that are chat messages are lists of messages."""

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
        return call

    def _columns(self, samples: Sequence[Scorable]) -> Iterable[str]:
        """Those that the file has, and other functions may have asked for, which this one takes."""
        there = dict.fromkeys(name for sample in samples for name in sample.row)
        wanted = self.columns.required | self.columns.optional
        refused = self.NO_COLUMNS | self.options.keys()
        return [name for name in there if name in wanted or (self.columns.every and name not in refused)] + [
            name for name in sorted(self.columns.required) if name not in there
        ]


class Slime(Convention):
    """custom_rm(args, sample), or (args, samples) with all samples of a prompt. Options are attributes of args."""

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
        raise Unsuitable(f"it has {whose} form and takes {', '.join(map(repr, missing))} besides, which nothing fills")


def convention_of(signature: Signature, options: Options) -> Convention:
    """Raises Unsuitable where a function of this signature cannot be called in any way."""
    if {"solution_str", "solution_strs"} & signature.named and "prompt" not in signature.named:
        return Verl(signature, options)
    if {"completions", "completion_ids"} & signature.named:
        return Trl(signature, options)
    if signature.positional[:2] in (("args", "sample"), ("args", "samples")):
        return Slime(signature, options)
    return Own(signature, options)


# The reward functions that a config names, and how each is called.

BUILT_IN = {
    "exact_match": "rltrain.rewards.exact_match:exact_match",
    "math": "rltrain.rewards.math:math",
    "code": "rltrain.rewards.code:code",
    "environment": "rltrain.rewards.environment:environment",
}
# Cannot hang or raise on any text, so that they need no process of their own.
TRUSTED = frozenset({"exact_match", "environment"})
# Would compare a label that is an object or a list as JSON text.
COMPARES_TEXT = frozenset({"exact_match"})

FORMS = (
    "(prompt, response, label), which may take row, messages, turns and env_reward besides, verl's (data_source, "
    "solution_str, ground_truth, extra_info), TRL's (prompts, completions, **columns) or slime's (args, sample): "
    "docs/rewards.md"
)
OWN_SIGNATURE = Signature(OWN_ARGUMENTS, frozenset(OWN_ARGUMENTS), frozenset(OWN_ARGUMENTS), takes_any_name=False)


def labels_of(reward: schema.Reward) -> Literal["label", "plain label"]:
    """What its functions need of a row: any label, where label_key names one, or one that is no list and no object."""
    return "label" if COMPARES_TEXT.isdisjoint(reward.names) else "plain label"


@dataclass(frozen=True)
class RewardFunction:
    """A resolved reward function."""

    name: str
    """As in the config."""
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    convention: Convention = field(default_factory=lambda: Own(OWN_SIGNATURE, {}))
    title: str = ""
    """What its metrics are called by; empty for the only one, under reward.function."""
    weight: float = 1.0
    config_key: str = "reward"
    """Where it stands."""
    named_score: str | None = None
    """The key of the reward in a dict that it returns, where the config names one."""

    @property
    def score_key(self) -> str:
        return self.named_score or self.convention.score_key

    @property
    def key(self) -> str:
        """The one that names it."""
        return f"{self.config_key}.function"

    @property
    def trusted(self) -> bool:
        """Safe to run in this process, without a time limit."""
        return self.name in TRUSTED

    @cached_property
    def asynchronous(self) -> bool:
        """Whether its calls are awaited, many at a time."""
        return any(inspect.iscoroutinefunction(called) for called in (self.function, type(self.function).__call__))

    @property
    def remote(self) -> bool:
        return isinstance(self.function, RemoteJudge)

    @property
    def place(self) -> str:
        """Its name, and the file and line where it is defined if it is written in Python."""
        code = None if self.remote else getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{self.name!r}" + (f" ({code.co_filename}, line {code.co_firstlineno})" if code else "")

    def limit_s(self, timeout_s: float) -> float:
        """Of one sample, where reward.timeout_s is this."""
        return self.function.longest_s if isinstance(self.function, RemoteJudge) else timeout_s

    def time_limit(self, limit_s: float) -> str:
        """Returns the limit of a sample in words."""
        return time_limit(limit_s, batched=self.convention.batched)

    def call(self, samples: Sequence[Scorable]) -> RewardCall:
        """Its arguments for one sample, or for a batch if its convention is batched."""
        call = self.convention.call(samples)
        if self.convention.passes_options and not self.remote:
            call.named.update(self.options)
        return call

    def answers(self, returned: Any, call: RewardCall, samples: Sequence[Scorable]) -> list[Answer]:
        """One for each of `samples`, of what came of `call`."""
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
        if call.logged:  # by the function itself, while it ran
            logged = as_answer({"score": 0} | call.logged).metrics
            answers = [
                answer if answer.score is None else replace(answer, metrics={**logged, **answer.metrics})
                for answer in answers
            ]
        return answers


def _parts(returned: Any) -> list[Any] | None:
    """The elements of a list, an array or a tensor."""
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__len__"):
        return None
    try:
        return list(returned)
    except Exception:
        return None


def load_rewards(settings: schema.Reward, section: str = "reward", *, is_part: bool = False) -> list[RewardFunction]:
    """The functions that the section names, which stands in the config under `section`; `is_part` says that the reward
    has other parts than these, so that a single one has a title too. Raises ConfigError where one cannot be imported or
    called."""
    if settings.functions is None:
        return [load_reward(settings, settings.parts[0].title if is_part else "", config_key=section)]
    return [
        load_reward(settings.alone(part), part.title, part.weight, f"{section}.functions.{number}")
        for number, part in enumerate(settings.functions)
    ]


def load_reward(
    settings: schema.Reward, title: str = "", weight: float = 1.0, config_key: str = "reward"
) -> RewardFunction:
    """The function that reward.function names, which stands in the config under `config_key`.

    A user's module is looked for in the working directory too. Raises ConfigError where it cannot be imported, or has
    none of the forms that are known.
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
            f"{config_key}.options: got {settings.options} for {settings.function!r}; expected token_env, the name of "
            f"an environment variable, and payload, more fields of what is posted: {error}"
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


# Calls a reward function here and now: an answer for every sample, whatever it does.

OWN_FILES = frozenset({__file__})


def call(function: RewardFunction, samples: Sequence[Scorable]) -> list[Answer]:
    """Of one call: for one sample, or for a batch if the function takes batches."""
    prepared = function.call(samples)
    try:
        returned = function.function(*prepared.positional, **prepared.named)
    except BaseException as error:  # a user's sys.exit() costs a sample, not the process
        return [as_error(error, OWN_FILES) for _ in samples]
    return function.answers(returned, prepared, samples)


async def await_calls(
    function: RewardFunction, calls: Sequence[Sequence[Scorable]], limit_s: float
) -> list[list[Answer]]:
    """Of calls that are awaited at the same time, each for at most `limit_s` for each of its samples."""
    return await asyncio.gather(*(_await_call(function, samples, limit_s) for samples in calls))


async def _await_call(function: RewardFunction, samples: Sequence[Scorable], limit_s: float) -> list[Answer]:
    prepared = function.call(samples)
    try:
        async with asyncio.timeout(limit_s * len(samples)) as limit:
            returned = await function.function(*prepared.positional, **prepared.named)
    except BaseException as raised:
        error = TookTooLongError(function.time_limit(limit_s)) if limit.expired() else raised
        return [as_error(error, OWN_FILES) for _ in samples]
    return function.answers(returned, prepared, samples)
