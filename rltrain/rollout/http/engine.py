"""Servers that somebody else runs as one engine of a rank: samples out to them, new weights into them."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

from torch import Tensor

from rltrain.errors import DivergenceError
from rltrain.rollout.engine import START_FRACTION, SamplingParams, check_samples, expect_idle, served_version
from rltrain.rollout.http.checkpoint_weights import CheckpointWeights
from rltrain.rollout.http.fleet import Fleet
from rltrain.rollout.http.weights import Weights
from rltrain.rollout.sample import Sample
from rltrain.rollout.stop_strings import Tokenizer, stop_cut, stop_strings
from rltrain.runtime.machine import JobThread

T = TypeVar("T")

STEP_WAIT_S = 0.005
"""What a step waits for a response to end."""
POLL_S = 1.0
"""Between two calls of `advance` while this thread waits for servers."""
CLOSE_S = 30.0


class HttpEngine:
    """Implements `Engine`, of one rank. `max_running_requests` is for each server.

    Servers draw tokens whether or not anybody calls `step`, which returns what has finished meanwhile. A sync takes
    back what is under way, and it goes on under the new weights: what a request draws is of one version. `advance` is
    called while this rank waits for servers.
    """

    num_restarts = 0
    """Of processes of its own, of which it has none."""

    def __init__(
        self,
        fleet: Fleet,
        weights: Weights,
        *,
        max_running_requests: int,
        max_context_tokens: int,
        advance: Callable[[], None],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.policy_version: int | None = None
        self._fleet, self._weights = fleet, weights
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._advance, self._tokenizer = advance, tokenizer
        self._unfinished: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None
        self._done: list[Sample] = []
        """Finished, and not taken by a step."""
        self._ended: dict[Sample, Sample] = {}
        """What finished while it was suspended, by what was given back for it."""
        self._told_sent_again = 0
        self._loop = asyncio.new_event_loop()
        self._thread = JobThread(target=self._loop.run_forever, name="http engines", daemon=True)
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Samples submitted that no step has returned yet."""
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step."""
        return max(0, self._num_slots - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        """Those, and some for servers to start before they are looked at again."""
        return max(0, self._num_slots + max(1, self._num_slots // START_FRACTION) - self.num_unfinished)

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests * max(1, self._fleet.num_serving)

    def start(self) -> None:
        """Wait until a server can be asked. EngineError where none can in time, or one refuses."""
        self._wait(self._fleet.start())

    def begin_update(self) -> None:
        """Withdraw the policy version, and what servers draw by it."""
        self.policy_version = None
        receivers = self._wait(self._fleet.begin_update())
        self._weights.begin()
        self._wait(self._weights.open(receivers))

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Where a part of the new weights is to be written, by name in the checkpoint."""
        return self._weights.tensors(part)

    def arrived(self, part: int) -> None:
        """This rank's share of the part has been written."""
        self._weights.arrived(part)
        self._wait(self._weights.pass_on())

    def end_update(self, version: int) -> None:
        """All parts have arrived: servers get them, say that they have them, and draw by them.

        EngineError where one refuses them. Collective over: the ranks of the role.
        """
        self._weights.complete(version)
        self._serve(version)

    def reload_weights(self, checkpoint: Path, version: int) -> None:
        """Have servers load a checkpoint, where they can, as `version`. Raises as `end_update`."""
        assert isinstance(self._weights, CheckpointWeights), "weights that no sync brings"
        self.policy_version = None
        self._wait(self._fleet.begin_update())
        self._weights.name(checkpoint, version)
        self._serve(version)

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Queue `samples` behind what is unfinished, which must have equal `sampling` and other ids (ValueError)."""
        if not samples:
            return
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
        self._done += [self._ended[sample] for sample in samples if sample in self._ended]
        new = [sample for sample in samples if self._ended.pop(sample, None) is None]
        self._wait(self._fleet.submit(new, sampling, stop_cut(sampling.stop, self._tokenizer)))

    def step(self) -> list[Sample]:
        """What has finished since the last step; where nothing has, wait for some milliseconds.

        Raises SyncError between `begin_update` and `end_update`, EngineError where servers fail too often or none is
        left.
        """
        served_version(self.policy_version)
        if not self._unfinished:
            return []
        self._take_finished(0.0 if self._done else STEP_WAIT_S)
        done, self._done = self._done, []
        for sample in done:
            del self._unfinished[sample.id]
        return done

    def suspend(self) -> list[Sample]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far."""
        return self._take_back(self._unfinished)

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the samples at servers, each with what it is known to have drawn so far."""
        return self._wait(self._fleet.progress(ids))

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """As `suspend`, for these samples alone."""
        return self._take_back({number: sample for number, sample in self._unfinished.items() if number in ids})

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """The samples, finished and in their order, while nothing else is unfinished. Raises as `submit` and `step`."""
        served_version(self.policy_version)
        expect_idle(self.num_unfinished, "generate")
        self.submit(samples, sampling)
        finished: dict[int, Sample] = {}
        while self._unfinished:
            finished |= {sample.id: sample for sample in self.step()}
        return [finished[sample.id] for sample in samples]

    def forget(self, ids: Collection[int]) -> None:
        """Nothing: servers give up first what they have not used for longest."""

    def release_cache(self) -> None:
        """Nothing but a check: keys and values are the servers'."""
        expect_idle(self.num_unfinished, "release_cache")

    def metrics(self) -> dict[str, float]:
        """Of what it did since the last call."""
        total = self._fleet.num_sent_again
        new, self._told_sent_again = total - self._told_sent_again, total
        asked = {"rollout/servers": float(self._fleet.num_serving), "rollout/requests_sent_again": float(new)}
        return {**asked, **self._weights.metrics()}

    def close(self) -> None:
        """Leave the servers as they are."""
        self._unfinished = {}
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._fleet.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._weights.close()

    def _serve(self, version: int) -> None:
        self._wait(self._fleet.end_update(version))
        self.policy_version = version

    def _take_back(self, wanted: Mapping[int, Sample]) -> list[Sample]:
        if not wanted:
            return []
        served_version(self.policy_version)
        order = [*wanted]
        back = self._wait(self._fleet.take_back(order))
        self._take_finished(0.0)
        for sample in [sample for sample in self._done if sample.id in wanted]:
            # Whoever gets back what has ended may go on with it elsewhere, so there has to be something left to draw.
            shorter = sample.first(len(sample.tokens) - 1)
            self._ended[shorter] = sample
            self._done.remove(sample)
            back[sample.id] = shorter
        for number in order:
            del self._unfinished[number]
        return [back[number] for number in order]

    def _take_finished(self, wait_s: float) -> None:
        """From the outbox to `_done`; waits for the first one."""
        while True:
            try:
                item = self._fleet.outbox.get(timeout=wait_s) if wait_s else self._fleet.outbox.get_nowait()
            except Empty:
                return
            if isinstance(item, DivergenceError):
                self._unfinished = {}
                self._wait(self._fleet.take_back())
            if isinstance(item, Exception):
                raise item
            if item.id in self._unfinished:
                self._done.append(item)
            wait_s = 0.0

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                self._advance()
