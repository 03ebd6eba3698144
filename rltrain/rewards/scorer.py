"""Scores samples with all reward functions and models of a run. A failure costs a sample, never the run."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.config.schema import Config, Judge
from rltrain.errors import ConfigError, RewardError
from rltrain.rewards.answers import EXPECTED_REWARD, Answer, FailureLog, Scorable, is_reward
from rltrain.rewards.functions import Columns, RewardFunction, Wants, load_rewards
from rltrain.rewards.locating import locate
from rltrain.rewards.worker import FunctionWorkers
from rltrain.tasks.roles import DECLARED, rewarding_roles

MAX_METRICS = 50
"""Names that a function may give to numbers; those of more are not kept."""


@dataclass(frozen=True)
class Scores:
    """The reward of each sample, as a function or a model gave it, or as the weighted sum of what all of them gave.

    Samples that a function failed on have reward 0 from it, and are counted.
    """

    rewards: list[float]
    num_errors: int = 0
    """It raised, returned no finite number, or ended its process. A sum has these counts in its parts."""
    num_timeouts: int = 0
    first_failure: str | None = field(default=None, compare=False)
    """On which response, and why, with the traceback where there is one."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns a function rewarded one by one. Their sum is the sample's reward. In a sum the
    other functions' rewards are the last turn's."""
    skipped: frozenset[int] = frozenset()
    """Samples that no function is for, also with reward 0."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum over samples, and number of samples, of what else the function said in numbers."""
    by_function: Mapping[str, "Scores"] = field(default_factory=dict)
    """The parts of a sum, by the titles of functions and models."""

    @classmethod
    def of_answers(cls, samples: Sequence[Scorable], answers: Sequence[Answer]) -> "Scores":
        """Returns what one function gave."""
        failed = ((sample, answer) for sample, answer in zip(samples, answers, strict=True) if answer.error is not None)
        first = next(failed, None)
        return cls(
            rewards=[0.0 if answer.score is None else answer.score for answer in answers],
            num_errors=sum(answer.error is not None and not answer.timeout for answer in answers),
            num_timeouts=sum(answer.timeout for answer in answers),
            first_failure=None if first is None else _described(*first),
            turn_rewards={index: [*answer.turns] for index, answer in enumerate(answers) if answer.turns is not None},
            skipped=frozenset(index for index, answer in enumerate(answers) if answer.is_skipped),
            metrics=_summed(answer.metrics for answer in answers),
        )

    def record(self) -> dict[str, Any]:
        """For JSON."""
        skipped, turn_rewards = sorted(self.skipped), [*self.turn_rewards.items()]
        if not self.by_function:
            own = {name: value for name, value in vars(self).items() if name != "by_function"}
            return {**own, "turn_rewards": turn_rewards, "skipped": skipped}
        parts = {title: scores.record() for title, scores in self.by_function.items()}
        return {"rewards": self.rewards, "by_function": parts, "unscored": skipped, "turn_rewards": turn_rewards}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Scores":
        """Returns what `record` was made of."""
        values = {**record, "turn_rewards": dict(record["turn_rewards"])}
        values["skipped"] = frozenset(values.pop("unscored" if "by_function" in values else "skipped"))
        parts, metrics = values.pop("by_function", {}), values.pop("metrics", {})
        return cls(
            **values,
            metrics={name: (total, count) for name, (total, count) in metrics.items()},
            by_function={title: cls.of_record(scores) for title, scores in parts.items()},
        )


def _described(sample: Scorable, answer: Answer) -> str:
    return f"on the response {sample.response!r:.200}:\n{answer.traceback or answer.error}"


def add_mean(means: dict[str, tuple[float, int]], name: str, total: float, count: int) -> None:
    """Adds `total`, the sum of `count` numbers, to what `means` has under this name."""
    before, num_before = means.get(name, (0.0, 0))
    means[name] = (before + total, num_before + count)


def _summed(metrics: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for of_sample in metrics:
        for name, value in of_sample.items():
            if name in sums or len(sums) < MAX_METRICS:
                add_mean(sums, name, value, 1)
    return sums


# What a judge is asked of a sample, and how a number is read from its answer.

FIELD = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
RESPONSE, CONVERSATION = "response", "conversation"
VALUES: Mapping[str, Callable[[Scorable], str]] = {
    "prompt": lambda sample: sample.prompt,
    RESPONSE: lambda sample: sample.response,
    "label": lambda sample: sample.label,
    CONVERSATION: lambda sample: "\n\n".join(
        f"{message['role']}: {message.get('content') or ''}" for message in sample.conversation()
    ),
}


class Question(Wants):
    """judge.prompt, with the fields of a sample that it names. Every other name is a column's.

    Raises ConfigError for a template that does not show the response, or a file that cannot be read.
    """

    def __init__(self, prompt: str | None) -> None:
        self.template = _template(prompt)
        names = {name for _, name in FIELD.findall(self.template) if name}
        if not names & {RESPONSE, CONVERSATION}:
            raise ConfigError(
                f"judge.prompt: got {self.template!r:.200}; expected a text with {{{RESPONSE}}} or {{{CONVERSATION}}}: "
                "the judge would not see what it is to judge"
            )
        self.takes_label = "label" in names
        self.columns = Columns(required=frozenset(names - VALUES.keys()))
        self.fields = frozenset({"sample_id", *(("messages", "turns") if CONVERSATION in names else ())})

    def of(self, sample: Scorable) -> str:
        """The question about it."""

        def value(match: re.Match[str]) -> str:
            literal, name = match.groups()
            if literal is not None:
                return f"{{{literal}}}"
            return VALUES[name](sample) if name in VALUES else _shown(sample.row.get(name))

        return FIELD.sub(value, self.template)


def _template(prompt: str | None) -> str:
    """A text without any field is a file's name."""
    if prompt is None:
        raise ConfigError(f"judge.prompt: got null; expected what the judge is asked, a text with {{{RESPONSE}}}")
    if FIELD.search(prompt):
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"judge.prompt: got {prompt!r:.200}, which has no field such as {{{RESPONSE}}} and is no file that can be "
            f"read: {error}"
        ) from error


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


class NoVerdictError(Exception):
    """Why there is no number in an answer."""


def verdict_parser(settings: Judge) -> Callable[[str], float]:
    """Reads the number from an answer, or raises NoVerdictError. ConfigError where judge.verdict is of no form."""
    if "(" in settings.verdict:
        pattern = _pattern(settings.verdict)
        return lambda answer: _number(_last(pattern, answer))
    function = locate(settings.verdict, "judge.verdict", known=["a regular expression with one group"])
    return lambda answer: _number(_returned(function, answer))


def _pattern(verdict: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(verdict, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"judge.verdict: {verdict!r} is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise ConfigError(
            f"judge.verdict: got {verdict!r} with {pattern.groups} groups; expected one, around the number; (?:...) "
            "groups without one"
        )
    return pattern


def _last(pattern: re.Pattern[str], answer: str) -> str:
    matches = [*pattern.finditer(answer)]
    if not matches:
        raise NoVerdictError("judge.verdict matches nothing")
    return str(matches[-1][1])


def _returned(function: Callable[[str], Any], answer: str) -> Any:
    try:
        return function(answer)
    except Exception as error:  # a user's function, on what a model wrote
        raise NoVerdictError(f"judge.verdict raised {type(error).__name__}: {error}") from error


def _number(value: Any) -> float:
    """As a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise NoVerdictError(f"judge.verdict gives {value!r:.100}, which is no number") from None
    if not is_reward(number):
        raise NoVerdictError(f"judge.verdict gives {number}; {EXPECTED_REWARD}")
    return number


# Models that tell the reward what responses are worth, as parts of it beside its functions.


class WholeConversation(Wants):
    """The prompt's messages, and all turns."""

    fields = frozenset({"messages", "turns"})
    takes_label = False


@dataclass(frozen=True)
class RewardingModel:
    """What the reward knows of a role that scores samples by a model."""

    role: str
    title: str
    """What its metrics are called by."""
    weight: float
    name: str
    """The checkpoint."""
    convention: Wants

    @property
    def config_key(self) -> str:
        return self.role

    @property
    def key(self) -> str:
        """Where it stands in the config."""
        return f"{self.role}.path"

    @property
    def place(self) -> str:
        return f"the model in {self.name!r}"

    def transfer(self, samples: str) -> str:
        """The one that brings what it says of those of a transfer."""
        tasks = DECLARED[self.role].tasks
        return next(task.leaves[0] for task in tasks if task.informs == "reward" and samples in task.takes)

    def scores(self, told: Sequence[float]) -> Scores:
        """`told` is NaN of samples that it could not score, which are worth nothing and are counted."""
        failed = sum(not math.isfinite(score) for score in told)
        first = f"told by a warning of role {self.role}" if failed else None
        return Scores([score if math.isfinite(score) else 0.0 for score in told], failed, first_failure=first)


def rewarding_models(config: Config, placed: Sequence[str]) -> list[RewardingModel]:
    """Of the roles in `placed`. ConfigError where a judge's question cannot be asked."""
    found = []
    for role in rewarding_roles():
        if role in placed:
            settings = getattr(config, role)
            wants = Question(config.judge.prompt) if role == "judge" else WholeConversation()
            found.append(RewardingModel(role, settings.name, settings.weight, settings.path, wants))
    return found


# Scores samples with all reward functions of a run, and with what models have told of them.

Part = RewardFunction | RewardingModel


@dataclass(frozen=True)
class PendingScores:
    """What functions have begun to give for `samples`."""

    samples: Sequence[Scorable]
    answers: Sequence[Sequence[Future[list[Answer]]]]
    """By function, in the order of the samples."""

    @property
    def is_done(self) -> bool:
        """Whether they are there, or never will be."""
        return all(future.done() for futures in self.answers for future in futures)


class Scorer:
    """Has functions score the same samples, beside each other. One thread at a time uses it. Close it at the end.

    `models` have scored them already, and are parts of the reward behind the functions. `settings` are the functions'
    in common. `on_scored`: other ranks wait for the result, and see that it gets on, see FunctionWorkers.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        settings: schema.Reward,
        on_scored: Callable[[], None] = lambda: None,
        models: Sequence[RewardingModel] = (),
    ) -> None:
        self.functions = functions
        self.parts: Sequence[Part] = (*functions, *models)
        self._workers = [FunctionWorkers(function, settings, on_scored) for function in functions]
        self._failures = [FailureLog(f"reward {function.name}") for function in functions]

    @classmethod
    def of(
        cls,
        settings: schema.Reward,
        on_scored: Callable[[], None] = lambda: None,
        section: str = "reward",
        models: Sequence[RewardingModel] = (),
    ) -> "Scorer":
        """Of the functions that `settings` name, which stand in the config under `section`."""
        return cls(load_rewards(settings, section, is_part=bool(models)), settings, on_scored, models)

    def score(self, samples: Sequence[Scorable], told: Sequence[Scores] = ()) -> Scores:
        """Rewards in the order of `samples`, of which models have `told`. Raises ConfigError if a function's worker
        cannot start."""
        return self.wait(self.begin(samples), told)

    def begin(self, samples: Sequence[Scorable]) -> PendingScores:
        """Have all functions begin with `samples`, for what `score` gives."""
        with self._closing_at_failure():
            return PendingScores(samples, [workers.begin(samples) for workers in self._workers])

    def wait(self, pending: PendingScores, told: Sequence[Scores] = ()) -> Scores:
        """What came of `begin`."""
        with self._closing_at_failure():
            scores = []
            for log, futures in zip(self._failures, pending.answers, strict=True):
                answers = [answer for future in futures for answer in future.result()]
                for sample, answer in zip(pending.samples, answers, strict=True):
                    if answer.error is not None:
                        log.add(sample, answer.error)
                scores.append(Scores.of_answers(pending.samples, answers))
            return combined(self.parts, [*scores, *told])

    @contextmanager
    def _closing_at_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the functions' processes. Nothing can be scored afterwards."""
        for workers in self._workers:
            workers.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def combined(parts: Sequence[Part], scores: Sequence[Scores]) -> Scores:
    """Of the scores by each part for the same samples."""
    weights = [part.weight for part in parts]
    rewards = [
        sum(weight * reward for weight, reward in zip(weights, of_sample, strict=True))
        for of_sample in zip(*(of_function.rewards for of_function in scores), strict=True)
    ]
    beyond = next((reward for reward in rewards if not is_reward(reward)), None)
    if beyond is not None:
        raise RewardError(f"reward: the weighted sum of its parts is {beyond:g} for a response; {EXPECTED_REWARD}")
    by_turns = sorted({index for of_function in scores for index in of_function.turn_rewards})
    return Scores(
        rewards,
        turn_rewards={index: _turn_rewards(index, weights, scores) for index in by_turns},
        skipped=frozenset.intersection(*(of_function.skipped for of_function in scores)),
        by_function={part.title: of_part for part, of_part in zip(parts, scores, strict=True)},
    )


def _turn_rewards(sample: int, weights: Sequence[float], scores: Sequence[Scores]) -> list[float]:
    num_turns = next(len(of.turn_rewards[sample]) for of in scores if sample in of.turn_rewards)
    turns = [0.0] * num_turns
    for weight, of_function in zip(weights, scores, strict=True):
        whole = [0.0] * (num_turns - 1) + [of_function.rewards[sample]]
        for turn, reward in enumerate(of_function.turn_rewards.get(sample, whole)):
            turns[turn] += weight * reward
    return turns
