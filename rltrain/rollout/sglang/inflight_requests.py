"""One sample at the server: what is sent for it, what comes back, and what that makes of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltrain.errors import DivergenceError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.sglang.returned_routing import RequestedRouting
from rltrain.rollout.stop_strings import StopCut

PROGRESS_TOKENS = 64
"""The server tells after how many tokens how far a response has come."""
_LOWEST_LOGPROB = -1e30
"""SGLang reports minus infinity as the lowest number of its type."""


@dataclass
class InflightRequest:
    """A sample at the server, as it was sent. `tokens` and `logprobs` are what it is known to have drawn there."""

    sample: Sample
    limit: int
    """How many tokens the response may have, those of `sample` included."""
    version: int
    """Of the weights when it was sent."""
    routing: RequestedRouting | None = None
    """None: it was not asked for."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    num_certain: int = 0
    """So many of them were drawn by the weights that it was sent to."""

    def take(self, event: Mapping[str, Any], version: int) -> None:
        """Add what an event brings: the last tokens and log-probs of as many as `completion_tokens` says.

        `version` is the server's now.
        """
        meta = event["meta_info"]
        total = meta["completion_tokens"]
        values = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        for known, new in ((self.tokens, event["output_ids"]), (self.logprobs, values)):
            known[total - len(new) : total] = new
        if version == self.version:
            self.num_certain = min(len(self.tokens), len(self.logprobs))

    def known(self) -> Sample:
        """The sample with all that is known of it, though the server has not ended it: so not the routing of what it
        has fed for this request."""
        certain = self.logprobs[: self.num_certain]
        count = count_finite(certain)
        return self._drawn(count, [self.version] * count)

    def end(self, meta: Mapping[str, Any], sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """The sample as the server has ended it; pending where it has more to draw.

        It has failed, and ends before the first log-prob that is not finite, if there is one. Raises EngineError for an
        answer that makes no sense.
        """
        if not len(self.tokens) == len(self.logprobs) == meta["completion_tokens"]:
            raise EngineError(
                f"SGLang returned {len(self.tokens)} tokens and {len(self.logprobs)} log-probs for sample "
                f"{self.sample.id}; expected {meta['completion_tokens']} of both. Leave out sglang.args that change "
                "what it returns."
            )
        versions = self._versions(meta)
        reason = meta["finish_reason"]
        num_finite = count_finite(self.logprobs)
        if num_finite < len(self.logprobs) or reason.get("matched") == "NaN happened":
            return self._drawn(num_finite, versions, Status.FAILED, self._routing_sent(meta))
        count = cut(self.sample.turn_tokens, self.tokens) if cut else None
        status = self._status(reason, sampling) if count is None else Status.STOPPED
        return self._drawn(len(self.tokens) if count is None else count, versions, status, self._routing_sent(meta))

    def _drawn(
        self, count: int, versions: Sequence[int], status: Status = Status.PENDING, routing: str | None = None
    ) -> Sample:
        """With the first `count` tokens drawn here, and the `routing` of what was fed for them as the server sent it.

        Without it none is recorded: of what another request feeds anew, perhaps by other weights, none is taken.
        """
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        drawn = self.sample.drawn(self.tokens[:count], logprobs, versions[:count], status)
        begin, end = len(self.sample.routing or ()), len(drawn.context) - 1
        if self.routing is None or not count or begin >= end:
            return drawn
        num_fed = len(self.sample.context) + len(self.tokens) - 1
        return drawn.routed(self.routing.rows(routing, begin, end, num_fed))

    def _routing_sent(self, meta: Mapping[str, Any]) -> str | None:
        """None where it was not asked for, and of a request that was aborted while nothing of it ran."""
        sent: str | None = meta.get("routed_experts")
        if self.routing is not None and sent is None and meta["finish_reason"]["type"] != "abort":
            raise EngineError(
                f"SGLang returned sample {self.sample.id} without routed_experts, which it was asked for. Its log is "
                "in the run folder."
            )
        return sent

    def _versions(self, meta: Mapping[str, Any]) -> list[int]:
        """Policy version of every token drawn here."""
        count = len(self.tokens)
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
        versions: list[int] = []
        for span in spans:
            if span["end"] > len(versions):
                versions += [int(span["version"])] * (min(span["end"], count) - len(versions))
        return versions

    def _status(self, reason: Mapping[str, Any], sampling: SamplingParams) -> Status:
        """Pending: the server has ended it for a reason of its own, such as an end-of-text token that is none here."""
        num_before = len(self.sample.tokens)
        matched = reason.get("matched")
        if reason["type"] == "stop" and (matched in sampling.stop_token_ids or matched in sampling.stop):
            return Status.STOPPED
        if num_before + len(self.tokens) >= self.limit:
            return Status.TRUNCATED
        if reason["type"] == "length" and not self.tokens:
            raise EngineError(
                f"SGLang ended sample {self.sample.id} after {num_before} tokens of the {self.limit} that its "
                "response may have. Expected memory for at least one whole response: raise mem_fraction_static in "
                "sglang.args of its role, or lower its max_context_tokens."
            )
        return Status.PENDING


def sampling_fields(sample: Sample, limit: int, sampling: SamplingParams, *, seeded: bool) -> dict[str, Any]:
    """SGLang's `sampling_params` of a sample whose response may have `limit` tokens."""
    fields: dict[str, Any] = {
        "temperature": 0.0 if sampling.is_greedy(sample) else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": limit - len(sample.tokens),
        "stop_token_ids": [*sampling.stop_token_ids],
        "ignore_eos": not sampling.stop_token_ids,
        "stop": [*sampling.stop],
        "no_stop_trim": True,
        "stream_interval": PROGRESS_TOKENS,
    }
    return fields | ({"sampling_seed": sample.seed} if seeded else {})


def generate_body(
    flights: Mapping[str, InflightRequest],
    sampling: SamplingParams,
    *,
    cache_key: str,
    seeded: bool,
    adapter: str | None = None,
) -> dict[str, Any]:
    """Of one /generate for `flights`, by the names that its events call them. All ask for the same of their routing.
    `adapter` is the name of the server's adapters; None: it has none."""
    routing = next(iter(flights.values())).routing
    return {
        "rid": [*flights],
        "input_ids": [[*flight.sample.context] for flight in flights.values()],
        "sampling_params": [
            sampling_fields(flight.sample, flight.limit, sampling, seeded=seeded) for flight in flights.values()
        ],
        "extra_key": cache_key,
        "return_logprob": True,
        "stream": True,
        **(routing.fields if routing else {}),
        **({"lora_path": adapter} if adapter else {}),
    }


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
