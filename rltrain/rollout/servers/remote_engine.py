"""The shared parts of engines on servers: the record of unfinished samples, and of the tokens received for each."""

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
from rltrain.rollout.servers.server_images import ServerImages


class RemoteEngine(Engine):
    """An engine on servers. Keeps the record of unfinished samples. A subclass sends them and receives the tokens."""

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
        """Number of samples to submit at most. Exceeds `num_free_slots` so that servers always have a few samples
        queued."""
        return max(0, self._num_slots + max(1, self._num_slots // START_FRACTION) - self.num_unfinished)

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests

    def forget(self, ids: Collection[int]) -> None:
        """Does nothing, because servers evict the least recently used prefixes by themselves."""
        return

    def _accept(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Records `samples` as unfinished. Raises as `check_samples` and `stop_strings` do, equally on all ranks."""
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


# A sample at a server, and the tokens received for it.

_LOWEST_LOGPROB = -1e30
"""SGLang sends the lowest finite number in place of minus infinity."""


@dataclass
class Drawing:
    """A sample as it was sent to a server, with the tokens and log-probs received since."""

    sample: Sample
    limit: int
    """Most tokens of the whole response, including the tokens already in `sample`."""
    version: int = 0
    """Policy version of the server's weights when the sample was sent."""
    name: str = ""
    """Name of the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    num_certain: int = 0
    """Number of leading entries of `tokens` known to come from the weights of `version`."""
    end: str | None = None
    """The server's own reason for ending the request, or None while it runs."""
    failures: int = 0
    """Number of requests in a row that brought no new token."""
    images: ServerImages | None = None
    """The images of samples, with model.vision."""

    @property
    def num_left(self) -> int:
        """Number of tokens that the server may still generate for `sample`, as it was sent."""
        return self.limit - len(self.sample.tokens)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float | None], total: int | None = None) -> None:
        """Adds tokens and log-probs that the server sent.

        `total` is the number of tokens generated so far, including these. With None they follow the known tokens.
        Raises EngineError if the numbers of tokens and log-probs differ.
        """
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"a server returned {len(tokens)} tokens and {len(logprobs)} log-probs for sample {self.sample.id}; "
                "expected one log-prob per token"
            )
        begin = len(self.tokens) if total is None else total - len(tokens)
        self.tokens[begin:] = tokens
        self.logprobs[begin:] = logprobs

    def known(self) -> Sample:
        """Returns the pending sample with its certain tokens. At least one token remains to be generated, so the last
        token is left out if the server has ended the request."""
        most = len(self.tokens) - 1 if self.end is not None else self.num_left - 1
        certain = self.logprobs[: min(self.num_certain, max(0, most))]
        return self._drawn(count_finite(certain), Status.PENDING)

    def ended(self, sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """Returns the sample after its server has ended the request. It is pending if it may have more tokens.

        The sample has failed if a log-prob is not finite, and ends before the first such token. `cut` finds stop
        strings; None if there are none.
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
        """Returns a new record for sending `sample`. Keeps the count of failures unless `sample` has gained tokens."""
        failures = 0 if len(sample.tokens) > len(self.sample.tokens) else self.failures
        return Drawing(sample, self.limit, failures=failures, images=self.images)

    def _drawn(self, count: int, status: Status) -> Sample:
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        return self.sample.drawn(self.tokens[:count], logprobs, self._versions(count), status)

    def _versions(self, count: int) -> list[int]:
        """Returns the policy versions of the first `count` received tokens."""
        return [self.version] * count


def count_finite(logprobs: Sequence[float | None]) -> int:
    """Returns the number of log-probs before the first one that is not finite."""
    return next((place for place, value in enumerate(logprobs) if not _is_finite(value)), len(logprobs))


def _is_finite(logprob: float | None) -> bool:
    return logprob is not None and math.isfinite(logprob) and logprob > _LOWEST_LOGPROB


class DivergenceWatch:
    """Detects diverged weights. With such weights every sample fails, and not only single ones.

    A server does not report the other samples of a decode step. So the required number of failures in a row is the
    number of samples that ran when the first one failed. It is at least ON_SOUND_WEIGHTS if a sample has succeeded on
    the same weights.
    """

    ON_SOUND_WEIGHTS = 16

    def __init__(self) -> None:
        self._num_failed, self._num_enough = 0, 0
        self._sound_version: int | None = None
        """Version of the weights of the most recent sample that succeeded."""

    def ended(self, sample: Sample, version: int, num_beside: int) -> None:
        """Records an ended sample of weights `version`, with `num_beside` other samples running.

        Ignores pending samples. Raises DivergenceError once the required number of samples has failed in a row.
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
                f"The rollout policy (version {version}) gives log-probs that are not finite, in every running "
                "response: its weights have diverged or were never loaded. Lower actor.optimizer.lr, or check "
                "model.path."
            )
