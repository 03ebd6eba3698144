"""SGLang as the rollout engine: a server that the engine's first rank starts, feeds and, where it dies, replaces."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import SGLang
from rltrain.errors import DivergenceError, EngineError, EngineLost, SyncError
from rltrain.rollout.engine import START_FRACTION, SamplingParams, check_samples, expect_idle, served_version
from rltrain.rollout.sample import Sample
from rltrain.rollout.sglang.adapter import ADAPTER, first_load
from rltrain.rollout.sglang.client import Client
from rltrain.rollout.sglang.engine_broadcast import EngineBroadcast
from rltrain.rollout.sglang.process import Server
from rltrain.rollout.sglang.returned_routing import ServerRouting
from rltrain.rollout.sglang.session import Session
from rltrain.rollout.sglang.spec import AdapterSpec
from rltrain.rollout.sglang.weights.delivery import Delivery
from rltrain.rollout.stop_strings import Tokenizer, stop_strings

logger = logging.getLogger(__name__)

STEP_WAIT_S = 0.005
"""What a step waits for a response to end: a decode step of a fast model."""
FLUSH = "/flush_cache?timeout=10"
"""Seconds that the server may take to notice that nothing runs."""


class SGLangEngine:
    """Implements `Engine`. All ranks of the engine make equal calls. `server` is given on the first rank of each node,
    `client` on the engine's first rank.

    A server draws tokens whether or not anybody calls `step`, which returns what has finished meanwhile. One that dies,
    or has samples and draws nothing for `hang_timeout_s`, is replaced up to `max_restarts` times: what it was drawing
    goes on from what is known of it. `advance` is called while a server starts. With `seeded` samples are sent with
    their seeds, which a server heeds that was started for deterministic inference. With `verify` the server compares
    checksums of the weights that it has copied; one that has others is replaced too. `role` is the config section that
    `settings` are of. With `routing`, on the first rank alone, samples come back with the experts that they visited.
    `adapter` is what the server has beside its weights.
    """

    def __init__(
        self,
        server: Server | None,
        client: Client | None,
        delivery: Delivery,
        *,
        group: dist.ProcessGroup | None,
        max_running_requests: int,
        max_context_tokens: int,
        settings: SGLang,
        advance: Callable[[], None],
        tokenizer: Tokenizer | None = None,
        seeded: bool = False,
        verify: bool = False,
        role: str = "rollout",
        routing: ServerRouting | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        self.policy_version: int | None = None
        self.delivery = delivery
        self.num_restarts = 0
        self._server, self._client = server, client
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._settings, self._role = settings, role
        self._advance, self._tokenizer, self._verify = advance, tokenizer, verify
        self._sharing = EngineBroadcast(group)
        num_ranks = dist.get_world_size(group) if group is not None else 1
        self._adapter_load = first_load(adapter, num_ranks) if adapter else None
        self._unfinished: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None
        self._lost: str | None = None
        """Why the server is to be replaced at the end of the update."""
        self._released: set[str] = set()
        self._session: Session | None = None
        if client is not None:
            self._session = Session(
                client,
                num_slots=max_running_requests,
                max_context_tokens=max_context_tokens,
                hang_timeout_s=settings.hang_timeout_s,
                seeded=seeded,
                routing=routing,
                adapter=ADAPTER if adapter else None,
            )

    @property
    def num_unfinished(self) -> int:
        """Samples submitted that no step has returned yet."""
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step."""
        return max(0, self._max_running_requests - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        """Those, and some for the server to start before it is looked at again."""
        slots = self._max_running_requests
        return max(0, slots + max(1, slots // START_FRACTION) - self.num_unfinished)

    def start(self) -> None:
        """Start the server and wait until it can take weights; from the main thread.

        Raises EngineError where it cannot be started. Collective over: the engine's ranks.
        """
        try:
            self._start()
        except EngineLost as lost:
            self._restart(lost)

    def begin_update(self) -> None:
        """Withdraw the policy version. What is running stops after its present token and keeps keys and values.

        A server that is lost is replaced in `end_update`. Collective over: the engine's ranks.
        """
        self.policy_version = None
        try:
            self._sharing.together(self._pause)
        except EngineLost as lost:
            self._lost = str(lost)
        self.delivery.begin()

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Where a part of the new weights is to be written, by parameter; where `is_kept` with what the server has.

        Collective over: the engine's ranks.
        """
        return self.delivery.tensors(part, is_kept=is_kept)

    def arrived(self, part: int) -> None:
        """This rank's share of the part has been written. Collective over: the engine's ranks."""
        self.delivery.arrived(part, self._verify)

    def end_update(self, version: int) -> None:
        """All parts have arrived: serve them as `version`. What was running goes on.

        Raises EngineError where the server has to be replaced and cannot be. Collective over: the engine's ranks.
        """
        try:
            self.delivery.finish(version)
            if self._lost is not None:
                raise EngineLost(self._lost)
            self._sharing.together(self._go_on)
        except EngineLost as lost:
            self._restart(lost)
        if self.delivery.version != version:
            raise SyncError(
                f"the engine serves weights of version {self.delivery.version} after a weight sync that was to bring "
                f"version {version}"
            )
        self._lost = None
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
        stop_strings(sampling.stop, self._tokenizer)  # refused on all ranks or on none
        self._sampling = sampling
        self._unfinished |= {sample.id: sample for sample in samples}
        if self._session is not None:
            self._session.submit(samples, sampling, self._tokenizer)

    def step(self) -> list[Sample]:
        """What has finished since the last step; where nothing has, wait for some milliseconds.

        Raises SyncError, on every rank, between `begin_update` and `end_update`. Collective over: the engine's ranks.
        """
        served_version(self.policy_version)
        if not self._unfinished:
            return []
        try:
            finished = self._sharing.samples(self._step, self._unfinished)
        except EngineLost as lost:
            version = self.policy_version
            self._restart(lost)
            self._serve(version)
            return []
        except DivergenceError:
            self._forget()
            raise
        for sample in finished:
            del self._unfinished[sample.id]
        return finished

    def suspend(self) -> list[Sample]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far.

        Raises SyncError where something runs between `begin_update` and `end_update`. Collective over: the engine's
        ranks.
        """
        if not self._unfinished:
            return []
        served_version(self.policy_version)
        try:
            suspended = self._sharing.samples(self._suspend, self._unfinished)
        except DivergenceError:
            self._forget()
            raise
        by_id = {sample.id: sample for sample in suspended}
        unfinished, self._unfinished = self._unfinished, {}
        return [by_id[number] for number in unfinished]

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the samples at the server, each with what it is known to have drawn so far. On the first rank."""
        return [] if self._session is None else self._session.progress(ids)

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """As `suspend`, for these samples alone: the others come back to the server at once, which has their keys and
        values. Collective over: the engine's ranks.
        """
        if self._unfinished.keys().isdisjoint(ids):
            return []
        sampling, back = self._sampling, self.suspend()
        others = [sample for sample in back if sample.id not in ids]
        if others and sampling is not None:
            self.submit(others, sampling)
        return [sample for sample in back if sample.id in ids]

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """The samples, finished and in their order, while nothing else is unfinished.

        Raises as `submit` and `step` do. Collective over: the engine's ranks.
        """
        served_version(self.policy_version)
        expect_idle(self.num_unfinished, "generate")
        self.submit(samples, sampling)
        finished: dict[int, Sample] = {}
        while self._unfinished:
            finished |= {sample.id: sample for sample in self.step()}
        return [finished[sample.id] for sample in samples]

    def forget(self, ids: Collection[int]) -> None:
        """Nothing: the server gives up first what it has not used for longest."""

    def release_cache(self) -> None:
        """Forget all keys and values. Their memory stays the server's: `release` gives it back.

        Collective over: the engine's ranks.
        """
        expect_idle(self.num_unfinished, "release_cache")
        self._reaches_server(lambda: self._call(FLUSH))

    def release(self, tags: Sequence[str]) -> None:
        """Give back the device memory of "weights", "kv_cache" or "cuda_graph", contents lost, until `resume`.

        Only where the server was started for it. Collective over: the engine's ranks.
        """
        expect_idle(self.num_unfinished, "release")
        while not self._reaches_server(lambda: self._call("/release_memory_occupation", tags=[*tags])):
            pass
        self._released |= {*tags}

    def resume(self, tags: Sequence[str]) -> None:
        """Take back what of `tags` is released; weights need `redeliver`. Collective over: the engine's ranks."""
        released = [tag for tag in tags if tag in self._released]
        if released:
            self._reaches_server(lambda: self._call("/resume_memory_occupation", tags=released))
            self._released -= {*released}

    def redeliver(self) -> None:
        """Give the server the weights once more that it had last. Collective over: the engine's ranks."""
        try:
            self.delivery.redeliver(self._verify)
        except EngineLost as lost:
            self._restart(lost)

    def close(self) -> None:
        """End the server, whatever state it is in."""
        self._unfinished = {}
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.kill()
        self.delivery.close()

    # Of the first rank alone, where there are a server, a client and a session.

    def _wait_for_server(self, advance: Callable[[], None]) -> None:
        assert self._server is not None and self._client is not None
        self._server.wait_until_ready(self._settings.start_timeout_s, advance)
        self._client.connect(self._server.url, self._server.token)
        if self._adapter_load is not None:
            self._client.call(*self._adapter_load)

    def _step(self) -> list[Sample]:
        assert self._session is not None and self._server is not None
        if (ending := self._server.ending) is not None:
            raise EngineLost(ending)
        return self._session.step(STEP_WAIT_S)

    def _pause(self) -> None:
        assert self._session is not None
        self._session.receive()
        self._call("/pause_generation", mode="in_place")

    def _go_on(self) -> None:
        self._call("/continue_generation", torch_empty_cache=False)
        if not self._unfinished:
            self._call(FLUSH)

    def _suspend(self) -> list[Sample]:
        """Where the server is lost, what is known to be drawn; the next step replaces it."""
        assert self._session is not None and self._server is not None
        try:
            return self._session.suspend()
        except EngineLost:
            self._server.kill()
            self._session.lose_server()
            return self._session.give_back()

    def _forget_all(self) -> None:
        assert self._session is not None
        self._session.forget()

    def _lose_server(self) -> None:
        assert self._client is not None and self._session is not None
        self._session.lose_server()
        self._client.disconnect()

    def _call(self, path: str, **body: object) -> None:
        assert self._client is not None
        self._client.call(path, body)

    # Of all ranks.

    def _start(self) -> None:
        if self._server is not None:
            self._server.start()
            if not self._sharing.is_first:
                self._server.wait_until_ready(self._settings.start_timeout_s, self._advance)
        self._sharing.wait(self._wait_for_server, self._advance)
        self._released.clear()
        self.delivery.check_layout()

    def _serve(self, version: int | None) -> None:
        assert version is not None
        self.policy_version = version
        if self._session is not None:
            self._session.begin_version(version)

    def _reaches_server(self, action: Callable[[], None]) -> bool:
        """`action` on the first rank; where the server is lost, replace it instead."""
        try:
            self._sharing.together(action)
        except EngineLost as lost:
            self._restart(lost)
            return False
        return True

    def _restart(self, lost: EngineLost) -> None:
        """Replace the server by one with the weights that were delivered last, and queue what was in flight."""
        while True:
            if self.num_restarts >= self._settings.max_restarts:
                raise EngineError(
                    f"The SGLang server of this engine was lost: {lost}. It has been started anew {self.num_restarts} "
                    f"times, and {self._role}.sglang.max_restarts = {self._settings.max_restarts} allows no more. Its "
                    "log is in the run folder."
                )
            self.num_restarts += 1
            if self._sharing.is_first:
                logger.warning("The SGLang server of this engine was lost and is started anew: %s", lost)
            self._sharing.together(self._lose_server)
            if self._server is not None:
                self._server.kill()
            try:
                self._start()
                self.delivery.redeliver(self._verify)
                return
            except EngineLost as again:
                lost = again

    def _forget(self) -> None:
        """After a divergence nothing is unfinished."""
        self._unfinished = {}
        with suppress(EngineLost):  # a server that is lost has nothing unfinished
            self._sharing.together(self._forget_all)
