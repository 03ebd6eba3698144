"""Scores samples with all reward functions and models of a run. A failure costs one sample's reward, never the run."""

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
"""Maximal number of metric names of a function. Further names are dropped."""


@dataclass(frozen=True)
class Scores:
    """The reward of each sample: from a function, from a model, or the weighted sum of all parts.

    If a function fails on a sample, its reward is 0 and the failure is counted.
    """

    rewards: list[float]
    num_errors: int = 0
    """Samples with an exception, a non-finite number or a dead process. In a weighted sum only the parts have these
    counts."""
    num_timeouts: int = 0
    first_failure: str | None = field(default=None, compare=False)
    """The first failure with its response, and the traceback if there is one."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """Rewards per turn, by sample index, if a function rewards turns. They sum to the sample's reward. In a weighted
    sum, rewards of the other functions count in the last turn."""
    skipped: frozenset[int] = frozenset()
    """Indices of the samples skipped by every function. Their reward is 0."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Other numbers returned by the function: (sum over samples, number of samples) by name."""
    by_function: Mapping[str, "Scores"] = field(default_factory=dict)
    """The parts of a weighted sum, by the titles of functions and models."""

    @classmethod
    def of_answers(cls, samples: Sequence[Scorable], answers: Sequence[Answer]) -> "Scores":
        """Returns the scores of one function."""
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
        """Returns the scores as JSON values."""
        skipped, turn_rewards = sorted(self.skipped), [*self.turn_rewards.items()]
        if not self.by_function:
            own = {name: value for name, value in vars(self).items() if name != "by_function"}
            return {**own, "turn_rewards": turn_rewards, "skipped": skipped}
        parts = {title: scores.record() for title, scores in self.by_function.items()}
        return {"rewards": self.rewards, "by_function": parts, "unscored": skipped, "turn_rewards": turn_rewards}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Scores":
        """Returns the scores from the result of `record`."""
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
    """Adds `total`, a sum of `count` numbers, to the entry `name` of `means`."""
    before, num_before = means.get(name, (0.0, 0))
    means[name] = (before + total, num_before + count)


def _summed(metrics: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for of_sample in metrics:
        for name, value in of_sample.items():
            if name in sums or len(sums) < MAX_METRICS:
                add_mean(sums, name, value, 1)
    return sums


# Questions to a judge, and numbers from its answers.

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
    """The question in judge.prompt, with fields of the sample. Names without a predefined value are columns of the row.

    Raises ConfigError if the template lacks the response, or its file cannot be read.
    """

    def __init__(self, prompt: str | None) -> None:
        self.template = _template(prompt)
        names = {name for _, name in FIELD.findall(self.template) if name}
        if not names & {RESPONSE, CONVERSATION}:
            raise ConfigError(
                f"judge.prompt: got {self.template!r:.200}; expected a text with {{{RESPONSE}}} or {{{CONVERSATION}}}, "
                "because the judge must see the response"
            )
        self.takes_label = "label" in names
        self.columns = Columns(required=frozenset(names - VALUES.keys()))
        self.fields = frozenset({"sample_id", *(("messages", "turns") if CONVERSATION in names else ())})

    def of(self, sample: Scorable) -> str:
        """Returns the question about a sample."""

        def value(match: re.Match[str]) -> str:
            literal, name = match.groups()
            if literal is not None:
                return f"{{{literal}}}"
            return VALUES[name](sample) if name in VALUES else _shown(sample.row.get(name))

        return FIELD.sub(value, self.template)


def _template(prompt: str | None) -> str:
    """Returns the template. A text without fields is the name of a file."""
    if prompt is None:
        raise ConfigError(f"judge.prompt: got null; expected the question to the judge, a text with {{{RESPONSE}}}")
    if FIELD.search(prompt):
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"judge.prompt: got {prompt!r:.200}, which has no field such as {{{RESPONSE}}} and is not a readable file: "
            f"{error}"
        ) from error


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


class NoVerdictError(Exception):
    """An answer has no number. The message has the reason."""


def verdict_parser(settings: Judge) -> Callable[[str], float]:
    """Returns a function that extracts the number from an answer. It raises NoVerdictError if there is none. Raises
    ConfigError if judge.verdict is neither a pattern nor a function."""
    if "(" in settings.verdict:
        pattern = _pattern(settings.verdict)
        return lambda answer: _number(_last(pattern, answer))
    function = locate(settings.verdict, "judge.verdict", known=["a regular expression with one group"])
    return lambda answer: _number(_returned(function, answer))


def _pattern(verdict: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(verdict, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"judge.verdict: {verdict!r} is not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise ConfigError(
            f"judge.verdict: got {verdict!r} with {pattern.groups} groups; expected one, around the number. Write "
            "other groups as (?:...)"
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
    except Exception as error:  # a user's function can raise anything on a model's text
        raise NoVerdictError(f"judge.verdict raised {type(error).__name__}: {error}") from error


def _number(value: Any) -> float:
    """Returns the value as a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise NoVerdictError(f"judge.verdict gives {value!r:.100}, which is not a number") from None
    if not is_reward(number):
        raise NoVerdictError(f"judge.verdict gives {number}; {EXPECTED_REWARD}")
    return number


# Models as parts of the reward.


class WholeConversation(Wants):
    """A request for the messages of the prompt and all turns."""

    fields = frozenset({"messages", "turns"})
    takes_label = False


@dataclass(frozen=True)
class RewardingModel:
    """A role with a model that scores samples, as a part of the reward."""

    role: str
    title: str
    """The prefix of its metrics."""
    weight: float
    name: str
    """The path of the checkpoint."""
    convention: Wants

    @property
    def config_key(self) -> str:
        return self.role

    @property
    def key(self) -> str:
        """The config key of the checkpoint."""
        return f"{self.role}.path"

    @property
    def place(self) -> str:
        return f"the model in {self.name!r}"

    def transfer(self, samples: str) -> str:
        """Returns the transfer with this model's scores for the samples of the transfer `samples`."""
        tasks = DECLARED[self.role].tasks
        return next(task.leaves[0] for task in tasks if task.informs == "reward" and samples in task.takes)

    def scores(self, told: Sequence[float]) -> Scores:
        """Returns the model's scores. NaN marks a sample without a score. It counts as an error, with reward 0."""
        failed = sum(not math.isfinite(score) for score in told)
        first = f"see the warning of role {self.role}" if failed else None
        return Scores([score if math.isfinite(score) else 0.0 for score in told], failed, first_failure=first)


def rewarding_models(config: Config, placed: Sequence[str]) -> list[RewardingModel]:
    """Returns the scoring models of the roles in `placed`. Raises ConfigError if judge.prompt is invalid."""
    found = []
    for role in rewarding_roles():
        if role in placed:
            settings = getattr(config, role)
            wants = Question(config.judge.prompt) if role == "judge" else WholeConversation()
            found.append(RewardingModel(role, settings.name, settings.weight, settings.path, wants))
    return found


# The sum over all functions and models.

Part = RewardFunction | RewardingModel


@dataclass(frozen=True)
class PendingScores:
    """The scores of `samples` in progress."""

    samples: Sequence[Scorable]
    answers: Sequence[Sequence[Future[list[Answer]]]]
    """Futures by function, in the order of the samples."""

    @property
    def is_done(self) -> bool:
        """True if all functions have finished or failed."""
        return all(future.done() for futures in self.answers for future in futures)


class Scorer:
    """Scores samples with all functions in parallel. Only one thread at a time may use it. Close it at the end.

    `models` are further parts of the reward, with scores of their own. `settings` are shared by all functions.
    `on_scored` reports progress to waiting ranks (see FunctionWorkers).
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
        """Returns a scorer with the functions in `settings`, the config section `section`."""
        return cls(load_rewards(settings, section, is_part=bool(models)), settings, on_scored, models)

    def score(self, samples: Sequence[Scorable], told: Sequence[Scores] = ()) -> Scores:
        """Returns rewards in the order of `samples`. `told` has the scores of the models. Raises ConfigError if a
        worker cannot start."""
        return self.wait(self.begin(samples), told)

    def begin(self, samples: Sequence[Scorable]) -> PendingScores:
        """Starts all functions on `samples`. `wait` returns the scores."""
        with self._closing_at_failure():
            return PendingScores(samples, [workers.begin(samples) for workers in self._workers])

    def wait(self, pending: PendingScores, told: Sequence[Scores] = ()) -> Scores:
        """Waits for `begin` and returns the weighted scores."""
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
        """Ends the processes of the functions. The scorer cannot be used afterwards."""
        for workers in self._workers:
            workers.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def combined(parts: Sequence[Part], scores: Sequence[Scores]) -> Scores:
    """Returns the weighted sum of the scores. `scores` has one entry per part, all for the same samples."""
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
