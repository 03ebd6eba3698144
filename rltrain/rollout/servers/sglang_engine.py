"""SGLang as the rollout engine: a server that the engine's first rank starts and feeds."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import SGLang
from rltrain.errors import ConfigError, DivergenceError, EngineError, EngineLost, SyncError
from rltrain.models import canonical_tensors
from rltrain.models.lora import target_of
from rltrain.offload.host_memory import NodeCopy
from rltrain.offload.memory_parts import MemoryPart, RemotePart
from rltrain.rollout.engine import (
    EngineSite,
    HostedEngine,
    SamplingParams,
    Tokenizer,
    expect_idle,
    served_version,
)
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.remote_engine import RemoteEngine
from rltrain.rollout.servers.sglang_process import AdapterSpec, Server, ServerSpec, check_arguments
from rltrain.rollout.servers.sglang_session import EngineBroadcast, ServerRouting, ServerSession
from rltrain.rollout.servers.sglang_weights import ADAPTER, Delivery, first_load

logger = logging.getLogger(__name__)

# SGLang as the rollout engine: a server that the engine's first rank starts, feeds and, where it dies, replaces.

STEP_WAIT_S = 0.005
"""What a step waits for a response to end: a decode step of a fast model."""
FLUSH = "/flush_cache?timeout=10"
"""Seconds that the server may take to notice that nothing runs."""


class SGLangEngine(RemoteEngine):
    """All ranks of the engine make equal calls. `server` is given on the first rank of each node,
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
        super().__init__(max_running_requests, max_context_tokens, tokenizer)
        self.delivery = delivery
        self._server, self._client = server, client
        self._settings, self._role = settings, role
        self._advance, self._verify = advance, verify
        self._sharing = EngineBroadcast(group)
        num_ranks = dist.get_world_size(group) if group is not None else 1
        self._adapter_load = first_load(adapter, num_ranks) if adapter else None
        self._lost: str | None = None
        """Why the server is to be replaced at the end of the update."""
        self._released: set[str] = set()
        self._session: ServerSession | None = None
        if client is not None:
            self._session = ServerSession(
                client,
                num_slots=max_running_requests,
                max_context_tokens=max_context_tokens,
                hang_timeout_s=settings.hang_timeout_s,
                seeded=seeded,
                routing=routing,
                adapter=ADAPTER if adapter else None,
            )

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
        return self.delivery.tensors(part, is_kept=is_kept)

    def arrived(self, part: int) -> None:
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
        if not samples:
            return
        self._accept(samples, sampling)
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


# SGLang's server on a rank of a role, and the parts of memory that it lives in.

LOOPBACK = "127.0.0.1"


def build_sglang(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says. ConfigError where SGLang refuses its arguments."""
    world, ranks, settings = site.world, site.ranks, site.settings
    _check_device(site)
    group = site.groups.cpu[ranks] if len(ranks) > 1 else None
    rendezvous = _rendezvous(site)
    on_node = [rank for rank in ranks if rank // world.ranks_per_node == world.rank // world.ranks_per_node]
    leaves = world.device.type == "cuda" and site.leaves
    server, client = None, None
    if world.rank == on_node[0]:
        spec = _server_spec(site, on_node, rendezvous, leaves)
        check_arguments(spec)
        server = Server(spec)
    if world.rank == ranks[0]:
        client = Client(settings.sglang.hang_timeout_s)
    delivery = _delivery(site, group, client)
    _warn_of_seeds(site)
    engine = SGLangEngine(
        server,
        client,
        delivery,
        group=group,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        settings=settings.sglang,
        advance=site.job_store.heartbeat.advance,
        tokenizer=site.tokenizer,
        seeded=settings.sglang.heeds_seeds,
        verify=site.config.weight_sync.verify or site.config.checks.replicas > 0,
        role=site.role,
        routing=ServerRouting.of(site.architecture) if _records_routing(site) else None,
        adapter=_adapter(site),
    )
    engine.start()
    of_server = parts_of_server(engine, delivery, leave, leaves, has_adapters=_adapter(site) is not None)
    return HostedEngine(engine, of_server)


def _records_routing(site: EngineSite) -> bool:
    return site.role == "rollout" and site.config.model.router_replay == "rollout" and site.architecture.moe is not None


def _adapter(site: EngineSite) -> AdapterSpec | None:
    lora = site.config.model.lora
    if lora is None or not site.config.keeps_adapters_apart(site.role):
        return None
    named = {target_of(name) for name in canonical_tensors(site.architecture.adapted(lora.rank, lora.targets)).names}
    return AdapterSpec(lora.rank, lora.alpha, tuple(sorted(named)))


def _delivery(site: EngineSite, group: dist.ProcessGroup | None, client: Client | None) -> Delivery:
    layouts = [part.layout for part in engine_parts(site.config, site.architecture, site.grid, site.role)]
    shared = None
    if site.updates_together:
        what = f"the weights of engines of {site.role}"
        shared = NodeCopy.among(site.job_store, what, layouts[0].ranks, layouts[0].parts)
    return Delivery(
        layouts,
        site.world.rank,
        device=site.world.device,
        keep=site.settings.sglang.keep_weights,
        group=group,
        call=client.call if client else None,
        shared=shared,
        role=site.role,
    )


def _warn_of_seeds(site: EngineSite) -> None:
    heeds_them = site.settings.sglang.heeds_seeds or not site.settings.sampling.temperature
    if not heeds_them and site.world.rank == site.grid.owner(0):
        logger.warning(
            "SGLang draws with random numbers of its own, so that `seed` fixes nothing that it draws; for that set "
            "%s.sglang.args.enable_deterministic_inference to true, which costs some speed",
            site.role,
        )


def parts_of_server(
    engine: SGLangEngine, delivery: Delivery, leave: Callable[[], None], leaves: bool, *, has_adapters: bool = False
) -> Mapping[str, MemoryPart]:
    """Without a GPU the server keeps its memory, which is the host's, and only forgets what lies in it. Adapters never
    leave the device: SGLang has them outside of what it releases."""

    def release(*tags: str) -> None:
        if leaves:
            engine.release(tags)

    def resume(*tags: str) -> None:
        if leaves:
            engine.resume(tags)

    def redeliver() -> None:
        if leaves:
            engine.redeliver()

    weights = RemotePart(
        release=lambda: release("weights"),
        resume=lambda: resume("weights"),
        num_bytes=lambda: delivery.num_bytes,
        restore=redeliver,
        kept_bytes=lambda: delivery.kept_bytes,
    )
    kv_cache = RemotePart(
        release=lambda: release("kv_cache", "cuda_graph"),
        resume=lambda: resume("kv_cache", "cuda_graph"),
        num_bytes=lambda: 0,  # the server's, which takes what it finds free
        forget=leave,
    )
    of_weights = {"base": weights, "weights": MemoryPart(tuple)} if has_adapters else {"weights": weights}
    return {"kv_cache": kv_cache, **of_weights}  # nothing runs any more when the weights leave


def _check_device(site: EngineSite) -> None:
    """Raises ConfigError for what SGLang does on GPUs alone."""
    if site.world.device.type != "cpu":
        return
    if len(site.ranks) > 1:
        raise ConfigError(
            f"{site.role}.parallel.tp: got {len(site.ranks)} for {site.role}.engine sglang without a GPU; expected 1, "
            f"since SGLang runs on CPUs in one process, or {site.role}.engine: embedded"
        )
    if site.settings.dtype == "fp8":
        raise ConfigError(
            f"{site.role}.dtype: got fp8 for {site.role}.engine sglang without a GPU; expected auto, since SGLang has "
            f"no such product for CPUs, or {site.role}.engine: embedded"
        )


def _server_spec(site: EngineSite, on_node: list[int], rendezvous: str | None, leaves: bool) -> ServerSpec:
    config, world, ranks, settings = site.config, site.world, site.ranks, site.settings
    of_role = "" if site.role == "rollout" else f"{site.role}_"
    return ServerSpec(
        python=settings.sglang.python or config.rollout.sglang.python or sys.executable,
        model_path=config.checkpoint_of(site.role)[0],
        device="cuda" if world.device.type == "cuda" else "cpu",
        dtype=config.model.dtype,
        wide_head=config.model.head != config.model.dtype,
        tp=len(ranks),
        gpus=_gpus(on_node, world.ranks_per_node) if world.device.type == "cuda" else (),
        host=rendezvous.rsplit(":", 1)[0] if rendezvous else LOOPBACK,
        log_path=Path(config.output_dir) / "engines" / f"{of_role}rank{world.rank}.log",
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        needs_tokenizer=bool(settings.sampling.stop),
        memory_saver=leaves,
        fp8=settings.dtype == "fp8",
        draws_during_syncs=site.draws_during_syncs,
        args=settings.sglang.args,
        role=site.role,
        node_rank=world.rank // world.ranks_per_node - ranks[0] // world.ranks_per_node,
        num_nodes=site.num_nodes,
        rendezvous=rendezvous,
        returns_routing=_records_routing(site),
        adapter=_adapter(site),
    )


def _gpus(ranks: list[int], ranks_per_node: int) -> tuple[str, ...]:
    """Those of `ranks`, as CUDA_VISIBLE_DEVICES is to name them for a child process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return tuple(names[rank % ranks_per_node] for rank in ranks)


def _rendezvous(site: EngineSite) -> str | None:
    """host:port where the processes of an engine over several nodes meet, on the node of its first rank."""
    if site.num_nodes == 1:
        return None
    key = f"engine/{site.role}/{site.ranks[0]}"
    if site.world.rank == site.ranks[0]:
        with socket.create_server(("", 0)) as free:
            site.job_store.put(key, f"{site.world.address}:{free.getsockname()[1]}")
    return str(site.job_store.get(key, waiting_for=f"the address of the engine on rank {site.ranks[0]}"))
