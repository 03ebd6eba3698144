"""One sample at servers: what one of them has drawn of it, and what that makes of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltrain.errors import EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.sglang.inflight_requests import count_finite
from rltrain.rollout.stop_strings import StopCut


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
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return self._drawn(len(self.tokens), Status.STOPPED)
        is_full = len(self.tokens) >= self.num_left
        return self._drawn(min(len(self.tokens), self.num_left), Status.TRUNCATED if is_full else Status.PENDING)

    def again(self, sample: Sample) -> "Drawing":
        """To be sent once more, as `sample`."""
        failures = 0 if len(sample.tokens) > len(self.sample.tokens) else self.failures
        return Drawing(sample, self.limit, failures=failures)

    def _drawn(self, count: int, status: Status) -> Sample:
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        return self.sample.drawn(self.tokens[:count], logprobs, [self.version] * count, status)
