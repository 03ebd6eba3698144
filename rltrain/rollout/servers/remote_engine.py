"""What engines on servers have in common: their account of samples, and what a server has drawn of one."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rltrain.errors import DivergenceError, EngineError
from rltrain.rollout.engine import (
    START_FRACTION,
    Engine,
    SamplingParams,
    StopCut,
    Tokenizer,
    check_samples,
    stop_strings,
)
from rltrain.rollout.sample import Sample, Status


class RemoteEngine(Engine):
    """Keeps account of the samples that a subclass sends to servers and takes back finished."""

    def __init__(self, max_running_requests: int, max_context_tokens: int, tokenizer: Tokenizer | None) -> None:
        self.policy_version: int | None = None
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._tokenizer = tokenizer
        self._unfinished: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        return max(0, self._num_slots - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        """Those, and some for servers to start before they are looked at again."""
        return max(0, self._num_slots + max(1, self._num_slots // START_FRACTION) - self.num_unfinished)

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests

    def forget(self, ids: Collection[int]) -> None:
        """Does nothing: servers give up first what they have not used for longest."""
        return

    def _accept(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Counts `samples` as unfinished. Raises, on all ranks alike, if they may not be queued beside the others."""
        check_samples(
            samples,
            sampling,
            unfinished=self._unfinished,
            running=self._sampling,
            max_context_tokens=self._max_context_tokens,
        )
        stop_strings(sampling.stop, self._tokenizer)
        self._sampling = sampling
        self._unfinished |= {sample.id: sample for sample in samples}


# One sample at servers: what one of them has drawn of it, and what that makes of it.

_LOWEST_LOGPROB = -1e30
"""SGLang reports minus infinity as the lowest number of its type."""


@dataclass
class Drawing:
    """A sample as it was sent, and what has come of it since: tokens with their log-probs."""

    sample: Sample
    limit: int
    """How many tokens the response may have, those of `sample` included."""
    version: int = 0
    """Of the weights that it was sent to."""
    name: str = ""
    """Of the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    num_certain: int = 0
    """So many of them are known to be of these weights."""
    end: str | None = None
    """Why the server has ended it, in its own words; None: it has not."""
    failures: int = 0
    """Times in a row that it was sent in vain."""

    @property
    def num_left(self) -> int:
        """Tokens that the server may draw."""
        return self.limit - len(self.sample.tokens)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float | None], total: int | None = None) -> None:
        """Of `total` tokens that the server has drawn the last ones; None: those that follow the ones that are
        known."""
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"a server returned {len(tokens)} tokens and {len(logprobs)} log-probs for sample {self.sample.id}; "
                "expected one of each"
            )
        begin = len(self.tokens) if total is None else total - len(tokens)
        self.tokens[begin:] = tokens
        self.logprobs[begin:] = logprobs

    def known(self) -> Sample:
        """The sample with all that is certain, and something left to draw: the last token, where a server has ended
        it."""
        most = len(self.tokens) - 1 if self.end is not None else self.num_left - 1
        certain = self.logprobs[: min(self.num_certain, max(0, most))]
        return self._drawn(count_finite(certain), Status.PENDING)

    def ended(self, sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """The sample as its server has ended it; pending where it has more to draw.

        It has failed, and ends before the first log-prob that is not finite, if there is one.
        """
        num_finite = count_finite(self.logprobs)
        if num_finite < len(self.logprobs):
            return self._drawn(num_finite, Status.FAILED)
        count = cut(self.sample.turn_tokens, self.tokens) if cut else None
        if count is not None:
            return self._drawn(count, Status.STOPPED)
        return self._drawn(min(len(self.tokens), self.num_left), self._status(sampling))

    def _status(self, sampling: SamplingParams) -> Status:
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return Status.STOPPED
        return Status.TRUNCATED if len(self.tokens) >= self.num_left else Status.PENDING

    def again(self, sample: Sample) -> "Drawing":
        """To be sent once more, as `sample`."""
        failures = 0 if len(sample.tokens) > len(self.sample.tokens) else self.failures
        return Drawing(sample, self.limit, failures=failures)

    def _drawn(self, count: int, status: Status) -> Sample:
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        return self.sample.drawn(self.tokens[:count], logprobs, self._versions(count), status)

    def _versions(self, count: int) -> list[int]:
        """Of the first `count` tokens drawn here."""
        return [self.version] * count


def count_finite(logprobs: Sequence[float | None]) -> int:
    """Returns how many log-probs there are before the first one that is not finite."""
    return next((place for place, value in enumerate(logprobs) if not _is_finite(value)), len(logprobs))


def _is_finite(logprob: float | None) -> bool:
    return logprob is not None and math.isfinite(logprob) and logprob > _LOWEST_LOGPROB


class DivergenceWatch:
    """Tells weights that have diverged from single samples that fail: with such weights all samples fail.

    A server does not say what its other requests draw in a step. So as many have to fail in a row as ran beside the
    first of them. If a sample has ended well on the same weights, at least ON_SOUND_WEIGHTS have to.
    """

    ON_SOUND_WEIGHTS = 16

    def __init__(self) -> None:
        self._num_failed, self._num_enough = 0, 0
        self._sound_version: int | None = None
        """Version of the weights on which a sample has ended well most recently."""

    def ended(self, sample: Sample, version: int, num_beside: int) -> None:
        """Takes in a sample that has ended while `num_beside` others ran, on weights of `version`.

        A sample that is still pending shows nothing. Raises DivergenceError for the last of the samples that have to
        fail.
        """
        if sample.status == Status.PENDING:
            return
        if sample.status != Status.FAILED:
            self._num_failed, self._sound_version = 0, version
            return
        if self._num_failed == 0:
            least = self.ON_SOUND_WEIGHTS if version == self._sound_version else 1
            self._num_enough = max(num_beside + 1, least)
        self._num_failed += 1
        if self._num_failed >= self._num_enough:
            self._num_failed = 0
            raise DivergenceError(
                f"The rollout policy (version {version}) gives log-probs that are not finite, in every response that "
                "runs: its weights have diverged or were never loaded. Lower actor.optimizer.lr, or check model.path."
            )
