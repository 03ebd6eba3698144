"""What the first rank of an engine has at its server: a queue, samples in flight, and those that have ended."""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from queue import Empty
from typing import Any

from rltrain.errors import EngineError, EngineLost
from rltrain.rollout.engine import SamplingParams, response_limit
from rltrain.rollout.sample import Sample
from rltrain.rollout.sglang.client import Client, Failure
from rltrain.rollout.sglang.inflight_requests import DivergenceWatch, InflightRequest, generate_body
from rltrain.rollout.sglang.returned_routing import RequestedRouting, ServerRouting
from rltrain.rollout.stop_strings import StopCut, Tokenizer, stop_cut

_STREAM_SAMPLES = 64
"""Samples that share a stream: the server looks through all of them at every event."""
_ABORT_AGAIN_S = 0.25
"""Requests that were on their way to the server's scheduler do not see an abort."""
_ABORT_ALL = ("/abort_request", {"abort_all": True, "rid": ""})


class Session:
    """No more is sent than the server runs at once: so what waits here, and only that, gets the newest weights.

    `begin_version` tells the weights that samples are sent to from now on. The server reuses keys and values only
    among samples sent to the same weights. With `routing` samples come back with the experts that they visited; all
    ask for the `adapter` of this name.
    """

    def __init__(
        self,
        client: Client,
        *,
        num_slots: int,
        max_context_tokens: int,
        hang_timeout_s: float,
        seeded: bool,
        routing: ServerRouting | None = None,
        adapter: str | None = None,
    ) -> None:
        self._client, self._routing, self._adapter = client, routing, adapter
        self._num_slots, self._max_context_tokens = num_slots, max_context_tokens
        self._hang_timeout_s, self._seeded = hang_timeout_s, seeded
        self._sampling: SamplingParams | None = None
        self._cut: StopCut | None = None
        self._queue: deque[Sample] = deque()
        self._flights: dict[str, InflightRequest] = {}
        self._done: list[Sample] = []
        """Ended, and not taken yet."""
        self._ended: dict[Sample, Sample] = {}
        """What ended while it was suspended, by what was given back for it."""
        self._is_aborting = False
        self._divergence = DivergenceWatch()
        self._names = count()
        self._version, self._epoch = 0, 0
        self._alive_s = time.monotonic()

    def begin_version(self, version: int) -> None:
        """From now on the server has the weights of `version`."""
        self._version, self._epoch = version, self._epoch + 1
        self._alive_s = time.monotonic()

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams, tokenizer: Tokenizer | None) -> None:
        """Queue `samples`. What ended while they were suspended is done at once."""
        if sampling != self._sampling:
            self._sampling, self._cut = sampling, stop_cut(sampling.stop, tokenizer)
        for sample in samples:
            if (ended := self._ended.pop(sample, None)) is not None:
                self._done.append(ended)
            else:
                self._queue.append(sample)

    def step(self, wait_s: float) -> list[Sample]:
        """Fill free slots, and what has ended since the last step; waits for the first one for `wait_s` at most.

        Raises EngineLost where the server is gone or has stopped drawing, EngineError where it refuses a request.
        """
        self.send()
        deadline = time.monotonic() + wait_s
        while self._receive(max(0.0, deadline - time.monotonic()) if not self._done else 0.0):
            pass
        self._check_progress()
        self.send()
        done, self._done = self._done, []
        return done

    def send(self) -> None:
        """Send what there are free slots for."""
        num_free = self._num_slots - len(self._flights)
        while num_free > 0 and self._queue:
            assert self._sampling is not None
            samples = [self._queue.popleft() for _ in range(min(num_free, len(self._queue), _STREAM_SAMPLES))]
            routing = self._requested_routing(samples)
            flights = {
                f"{self._epoch}.{name}": self._flight(sample, routing)
                for sample, name in zip(samples, self._names, strict=False)
            }
            if not self._flights:
                self._alive_s = time.monotonic()
            self._flights |= flights
            key, adapter = str(self._epoch), self._adapter
            self._client.generate(
                generate_body(flights, self._sampling, cache_key=key, seeded=self._seeded, adapter=adapter)
            )
            num_free -= len(samples)

    def receive(self) -> None:
        """Take in all that has arrived."""
        while self._receive(0.0):
            pass

    def suspend(self) -> list[Sample]:
        """Take everything back from the server: what is drawn of all that is unfinished.

        Raises as `step` does, and EngineLost where the server does not give a response back in time.
        """
        deadline = time.monotonic() + self._hang_timeout_s
        self._is_aborting = True
        try:
            while self._flights:
                self._client.call(*_ABORT_ALL)
                again = time.monotonic() + _ABORT_AGAIN_S
                while self._flights and (left := again - time.monotonic()) > 0:
                    self._receive(left)
                if self._flights and time.monotonic() > deadline:
                    raise EngineLost(
                        f"{len(self._flights)} aborted requests have not come back from the SGLang server within "
                        f"{self._hang_timeout_s:g} s"
                    )
        finally:
            self._is_aborting = False
        return self.give_back()

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the samples in flight, with what is known to be drawn of each."""
        return [flight.known() for flight in self._flights.values() if flight.sample.id in ids]

    def lose_server(self) -> None:
        """The server is gone: what was in flight is queued again, with what is known to be drawn of it."""
        flights, self._flights = self._flights, {}
        self._queue.extendleft(flight.known() for flight in reversed(flights.values()))

    def give_back(self) -> list[Sample]:
        """All that is queued or has ended and was not taken, with what is drawn of it; nothing is left."""
        # Whoever gets back what has ended may go on with it elsewhere, so there has to be something left to draw.
        shorter = {sample.first(len(sample.tokens) - 1): sample for sample in self._done}
        self._ended |= shorter
        given = [*self._queue, *shorter]
        self._queue.clear()
        self._done.clear()
        return given

    def forget(self) -> None:
        """Nothing is unfinished any more, here or at the server."""
        self._queue.clear()
        self._done.clear()
        flights, self._flights = self._flights, {}
        if flights:
            self._client.call(*_ABORT_ALL)

    def _flight(self, sample: Sample, routing: RequestedRouting | None) -> InflightRequest:
        assert self._sampling is not None
        limit = response_limit(sample, self._sampling, self._max_context_tokens)
        return InflightRequest(sample, limit, self._version, routing)

    def _requested_routing(self, samples: Sequence[Sample]) -> RequestedRouting | None:
        """From the first token whose routing one of them lacks: a stream has one start for all."""
        if self._routing is None:
            return None
        return RequestedRouting(self._routing, min(len(sample.routing or ()) for sample in samples))

    def _receive(self, wait_s: float) -> bool:
        """Take in one event of the server; False where none has come within `wait_s`."""
        try:
            item = self._client.inbox.get(timeout=wait_s) if wait_s > 0 else self._client.inbox.get_nowait()
        except Empty:
            return False
        if isinstance(item, Failure):
            raise item.error
        if "error" in item:
            raise EngineError(f"SGLang refused a request: {item['error']}. Its log is in the run folder.")
        meta = item["meta_info"]
        flight = self._flights.get(meta["id"])
        if flight is not None:
            flight.take(item, self._version)
            if meta["finish_reason"] is not None:
                del self._flights[meta["id"]]
                self._end(flight, meta)
        return True

    def _end(self, flight: InflightRequest, meta: Mapping[str, Any]) -> None:
        assert self._sampling is not None
        sample = flight.end(meta, self._sampling, self._cut)
        version = sample.policy_versions[-1] if len(sample.tokens) > len(flight.sample.tokens) else flight.version
        self._divergence.ended(sample, version, len(self._flights))
        if sample.is_finished:
            self._done.append(sample)
            return
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and not self._is_aborting:
            raise EngineError(
                f"SGLang gave up sample {sample.id} after {len(sample.tokens)} tokens: {reason.get('message')}. "
                "Its log is in the run folder."
            )
        self._queue.appendleft(sample)

    def _check_progress(self) -> None:
        silent_s = time.monotonic() - max(self._client.last_event_s, self._alive_s)
        if self._flights and silent_s > self._hang_timeout_s:
            raise EngineLost(
                f"the SGLang server has {len(self._flights)} requests and has drawn nothing for {silent_s:.0f} s"
            )
