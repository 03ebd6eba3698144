"""The reward functions that a config names, and how each is called."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.rewards.answers import Answer, as_answer
from rltrain.rewards.conventions import OWN_ARGUMENTS, Call, Convention, Own, Signature, Unsuitable, convention_of
from rltrain.rewards.judge import Judge, is_url
from rltrain.rewards.locating import locate
from rltrain.rewards.scorable import Scorable

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
        return isinstance(self.function, Judge)

    @property
    def place(self) -> str:
        """Its name, and the file and line where it is defined if it is written in Python."""
        code = None if self.remote else getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{self.name!r}" + (f" ({code.co_filename}, line {code.co_firstlineno})" if code else "")

    def limit_s(self, timeout_s: float) -> float:
        """Of one sample, where reward.timeout_s is this."""
        return self.function.longest_s if isinstance(self.function, Judge) else timeout_s

    def call(self, samples: Sequence[Scorable]) -> Call:
        """Its arguments for one sample, or for a batch if its convention is batched."""
        call = self.convention.call(samples)
        if self.convention.passes_options and not self.remote:
            call.named.update(self.options)
        return call

    def answers(self, returned: Any, call: Call, samples: Sequence[Scorable]) -> list[Answer]:
        """One for each of `samples`, of what came of `call`."""
        if not self.convention.batched:
            return [as_answer(returned, samples[0].num_turns, self.score_key)]
        parts = _parts(returned)
        if parts is None or len(parts) != len(samples):
            got = type(returned).__name__ if parts is None else f"{len(parts)} rewards"
            error = f"returned {got} for {len(samples)} samples; expected a list with a number for each"
            return [{"error": error} for _ in samples]
        answers = [
            {"skipped": True}
            if part is None and self.convention.allows_none
            else as_answer(part, sample.num_turns, self.score_key)
            for part, sample in zip(parts, samples, strict=True)
        ]
        if call.logged:  # by the function itself, while it ran
            logged = as_answer({"score": 0} | call.logged).get("metrics", {})
            answers = [
                {**answer, "metrics": logged | answer.get("metrics", {})} if "value" in answer else answer
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


def _judge(settings: schema.Reward, config_key: str) -> Judge:
    try:
        return Judge(settings.function, timeout_s=settings.timeout_s, retries=settings.retries, **settings.options)
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
