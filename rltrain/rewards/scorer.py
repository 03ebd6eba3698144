"""Scores samples with all reward functions and models of a run. A failure costs a sample, never the run."""

import logging
import math
import queue
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.config.schema import Config, Judge
from rltrain.errors import ConfigError, RewardError
from rltrain.rewards.answers import EXPECTED_REWARD, Answer, Scorable, is_reward
from rltrain.rewards.functions import Columns, RewardFunction, Wants, call, load_rewards
from rltrain.rewards.locating import locate
from rltrain.rewards.worker import Longest, Request, Silence, WorkerProcess
from rltrain.tasks.roles import DECLARED, rewarding_roles

# Scores samples with a reward function whose failures cost a sample and never the run.

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 10
MAX_METRICS = 50
"""Names that a function may give to numbers; those of more are not kept."""


@dataclass(frozen=True)
class Scores:
    """The reward of each sample; those that the function failed on have reward 0 and are counted."""

    rewards: list[float]
    num_errors: int
    """It raised, returned no finite number, or ended its process."""
    num_timeouts: int
    first_failure: str | None = field(default=None, compare=False)
    """On which response, and why, with the traceback where there is one."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns the function rewarded one by one. Their sum is the sample's reward."""
    skipped: frozenset[int] = frozenset()
    """Samples that the function is not for, also with reward 0."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum over samples, and number of samples, of what else the function said in numbers."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "skipped": sorted(self.skipped), "turn_rewards": [*self.turn_rewards.items()]}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Scores":
        metrics = {name: (total, count) for name, (total, count) in record["metrics"].items()}
        sets = {"skipped": frozenset(record["skipped"]), "turn_rewards": dict(record["turn_rewards"])}
        return cls(**{**record, **sets, "metrics": metrics})


class PendingScores:
    """Scores that workers have begun to make, in `futures`; `made` makes them of what came of these, and raises what
    the scorer raises."""

    def __init__(self, made: Callable[[], Scores], futures: Sequence[Future[list[Answer]]] = ()) -> None:
        self._made, self._futures = made, futures

    @property
    def is_done(self) -> bool:
        """Whether they are there, or never will be."""
        return all(future.done() for future in self._futures)

    def wait(self) -> Scores:
        return self._made()


class Scorer:
    """Runs one reward function: a trusted one here, any other in worker processes, so that even a hang in C code ends.

    A worker is started at its first sample, killed at a sample that takes longer than `timeout_s`, and ends with this
    process. What a new worker has to import is not on a sample's time, see WorkerProcess. A batch has that time for
    each of its samples. A worker awaits `calls_in_flight` calls of an asynchronous function at a time; a remote judge
    has one worker, and `num_workers` calls in flight. `on_scored` is called after every sample, batch, or calls in
    flight, from any thread: other ranks wait for the result, and see that it gets on. One thread at a time uses a
    scorer. Close it at the end.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        num_workers: int = 2,
        on_scored: Callable[[], None] = lambda: None,
        *,
        calls_in_flight: int = 1,
        retries: int = 0,
    ) -> None:
        self.function = function
        self.limit_s = function.limit_s(timeout_s)
        self.on_scored = on_scored
        if function.remote:
            num_workers, calls_in_flight = 1, num_workers
        self.calls_in_flight = calls_in_flight if function.asynchronous else 1
        start = {
            "function": function.name,
            "options": dict(function.options),
            "score_key": function.named_score,
            "timeout_s": timeout_s,
            "retries": retries,
        }
        longest, self._silence = Longest(), Silence(function)
        self._workers = [WorkerProcess(function, start, longest, self._silence) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # Linux ends a worker with the thread that started it, so these threads live as long as the scorer.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._num_failures = 0
        self._pending = PendingScores(lambda: self._scores((), ()))
        """What was begun last."""

    @classmethod
    def of(cls, function: RewardFunction, settings: schema.Reward, on_scored: Callable[[], None]) -> "Scorer":
        return cls(
            function,
            settings.timeout_s,
            settings.num_workers,
            on_scored,
            calls_in_flight=settings.calls_in_flight,
            retries=settings.retries,
        )

    def score(self, samples: Sequence[Scorable]) -> Scores:
        """Rewards in the order of `samples`. Raises ConfigError if a worker cannot start."""
        return self.begin(samples).wait()

    def begin(self, samples: Sequence[Scorable]) -> PendingScores:
        """Have workers begin with `samples`, for what `score` gives."""
        if self.function.trusted:
            answers = [call(self.function, [sample])[0] for sample in samples]
            return PendingScores(lambda: self._scores(samples, answers))
        if self._pending.is_done:
            self._silence.end()
        futures = [self._threads.submit(self._ask, request) for request in self._requests(samples)]
        self._pending = PendingScores(lambda: self._scores(samples, self._gathered(futures)), futures)
        return self._pending

    def close(self) -> None:
        """End the workers. Nothing can be scored afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, samples: Sequence[Scorable]) -> list[Request]:
        """Samples that stand together in a batch or are awaited together are spread evenly over the workers."""
        if self.function.convention.batched:
            calls = [list(group) for _, group in groupby(samples, key=attrgetter("group"))]
        else:
            calls = [[sample] for sample in samples]
        share = min(self.calls_in_flight, -(-len(calls) // len(self._workers)))
        return [
            Request(self.function, calls[start : start + share], self.limit_s)
            for start in range(0, len(calls), max(share, 1))
        ]

    def _gathered(self, replies: Sequence[Future[list[Answer]]]) -> list[Answer]:
        try:
            return [answer for reply in replies for answer in reply.result()]
        except BaseException:
            self.close()
            raise

    def _ask(self, request: Request) -> list[Answer]:
        worker = self._idle.get()
        try:
            return [answer for answers in self._answers(worker, request) for answer in answers]
        finally:
            self._idle.put(worker)

    def _answers(self, worker: WorkerProcess, request: Request) -> list[list[Answer]]:
        """By call. Where one of several took its process along, or held it up, each is asked for again alone."""
        reply = worker.ask(request)
        self.on_scored()
        if "answers" not in reply and len(request.calls) > 1:
            return [answers for alone in request.alone for answers in self._answers(worker, alone)]
        return request.answers(reply)

    def _scores(self, samples: Sequence[Scorable], answers: Sequence[Answer]) -> Scores:
        failures = [
            (sample, answer)
            for sample, answer in zip(samples, answers, strict=True)
            if "error" in answer or "timeout" in answer
        ]
        for sample, answer in failures:
            self._log_failure(sample, answer)
        return Scores(
            rewards=[answer.get("value", 0.0) for answer in answers],
            num_errors=sum("error" in answer for answer in answers),
            num_timeouts=sum("timeout" in answer for answer in answers),
            first_failure=_described(*failures[0]) if failures else None,
            turn_rewards={index: answer["turns"] for index, answer in enumerate(answers) if "turns" in answer},
            skipped=frozenset(index for index, answer in enumerate(answers) if "skipped" in answer),
            metrics=_summed(answer["metrics"] for answer in answers if "metrics" in answer),
        )

    def _log_failure(self, sample: Scorable, answer: Answer) -> None:
        self._num_failures += 1
        if self._num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self._num_failures == MAX_LOGGED_FAILURES else ""
            reason = answer.get("error") or answer["timeout"]
            logger.warning("reward %s on response %.80r: %s%s", self.function.name, sample.response, reason, last)


def _described(sample: Scorable, answer: Answer) -> str:
    reason = answer.get("traceback") or answer.get("error") or answer["timeout"]
    return f"on the response {sample.response!r:.200}:\n{reason}"


def _summed(metrics: Iterator[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    sums: dict[str, tuple[float, int]] = {}
    for of_sample in metrics:
        for name, value in of_sample.items():
            if name in sums or len(sums) < MAX_METRICS:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value, count + 1)
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
        return Scores(
            rewards=[score if math.isfinite(score) else 0.0 for score in told],
            num_errors=failed,
            num_timeouts=0,
            first_failure=f"told by a warning of role {self.role}" if failed else None,
        )


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
class CombinedScores:
    """The reward of each sample: the weighted sum of what functions and models gave."""

    rewards: list[float]
    by_function: Mapping[str, Scores]
    """By the titles of functions and models."""
    unscored: frozenset[int] = frozenset()
    """Samples that none of the functions is for, with reward 0."""
    turn_rewards: Mapping[int, list[float]] = field(default_factory=dict)
    """By sample, of those whose turns a function rewarded one by one; the other functions' rewards are the last turn's.
    Their sum is the sample's reward."""

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rewards": self.rewards,
            "by_function": {title: scores.record() for title, scores in self.by_function.items()},
            "unscored": sorted(self.unscored),
            "turn_rewards": [*self.turn_rewards.items()],
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "CombinedScores":
        return cls(
            record["rewards"],
            {title: Scores.of_record(scores) for title, scores in record["by_function"].items()},
            frozenset(record["unscored"]),
            dict(record["turn_rewards"]),
        )

    def by_sample(self) -> list[list[float]]:
        """Of each sample what each function gave, unweighted; NaN where the function is not for it."""
        columns = [
            [math.nan if index in of.skipped else reward for index, reward in enumerate(of.rewards)]
            for of in self.by_function.values()
        ]
        return [[*row] for row in zip(*columns, strict=True)]


class CombinedScorer:
    """Has the functions of the config's section score the same samples, beside each other. Close it at the end.

    `models` have scored them already, and are parts of the reward behind the functions.
    """

    def __init__(
        self,
        settings: schema.Reward,
        on_scored: Callable[[], None] = lambda: None,
        section: str = "reward",
        models: Sequence[RewardingModel] = (),
    ) -> None:
        """`settings` stand in the config under `section`."""
        self.functions: Sequence[RewardFunction] = load_rewards(settings, section, is_part=bool(models))
        self.parts: Sequence[Part] = (*self.functions, *models)
        self._scorers = [Scorer.of(function, settings, on_scored) for function in self.functions]

    def score(self, samples: Sequence[Scorable], told: Sequence[Scores] = ()) -> CombinedScores:
        """Rewards in the order of `samples`, of which models have `told`. Raises ConfigError if a function's worker
        cannot start."""
        return self.wait(self.begin(samples), told)

    def begin(self, samples: Sequence[Scorable]) -> Sequence[PendingScores]:
        """Have all functions begin with `samples`, for what `score` gives."""
        with self._closing_at_failure():
            return [scorer.begin(samples) for scorer in self._scorers]

    def wait(self, pending: Sequence[PendingScores], told: Sequence[Scores] = ()) -> CombinedScores:
        """What came of `begin`."""
        with self._closing_at_failure():
            return combined(self.parts, [*(scores.wait() for scores in pending), *told])

    @contextmanager
    def _closing_at_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the functions' processes. Nothing can be scored afterwards."""
        for scorer in self._scorers:
            scorer.close()

    def __enter__(self) -> "CombinedScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def combined(parts: Sequence[Part], scores: Sequence[Scores]) -> CombinedScores:
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
    return CombinedScores(
        rewards,
        {part.title: of_part for part, of_part in zip(parts, scores, strict=True)},
        frozenset.intersection(*(of_function.skipped for of_function in scores)),
        {index: _turn_rewards(index, weights, scores) for index in by_turns},
    )


def _turn_rewards(sample: int, weights: Sequence[float], scores: Sequence[Scores]) -> list[float]:
    num_turns = next(len(of.turn_rewards[sample]) for of in scores if sample in of.turn_rewards)
    turns = [0.0] * num_turns
    for weight, of_function in zip(weights, scores, strict=True):
        whole = [0.0] * (num_turns - 1) + [of_function.rewards[sample]]
        for turn, reward in enumerate(of_function.turn_rewards.get(sample, whole)):
            turns[turn] += weight * reward
    return turns
