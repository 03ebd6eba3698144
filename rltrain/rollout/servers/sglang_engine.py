"""The SGLang engine. The first rank of the engine starts a server and sends it samples and weights."""

import logging
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import SGLang
from rltrain.errors import ConfigError, EngineError, EngineLost, SyncError
from rltrain.models import canonical_tensors
from rltrain.models.lora import target_of
from rltrain.models.registry import FAMILIES
from rltrain.offload.host_memory import NodeCopy
from rltrain.offload.memory_parts import MemoryPart, RemotePart
from rltrain.rollout.engine import (
    EngineSite,
    HostedEngine,
    Tokenizer,
    expect_idle,
)
from rltrain.rollout.layout import by_names, engine_parts
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.protocols import FLUSH, FLUSH_S, flushed
from rltrain.rollout.servers.remote_engine import RemoteEngine
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.rollout.servers.sglang_process import (
    ADAPTER,
    AdapterSpec,
    Server,
    ServerSpec,
    check_arguments,
    first_load,
    kept_modules_of,
    model_config_of,
)
from rltrain.rollout.servers.sglang_session import EngineBroadcast, OwnRequests, ServerRouting
from rltrain.rollout.servers.sglang_weights import Delivery, NamedWeights

logger = logging.getLogger(__name__)

# The engine. The first rank starts the server, and replaces it if it dies.

T = TypeVar("T")


class SGLangEngine(RemoteEngine):
    """An engine with one SGLang server. All ranks of the engine make equal calls.

    The server generates between calls of `step` too. `step` returns the samples finished since the last call. A server
    is replaced if it dies, or if it has samples and produces nothing for `hang_timeout_s`. That happens at most
    `max_restarts` times. Its running samples continue from their known tokens.

    - `server` is given on the first rank of each node, `client` on the engine's first rank. Both are None elsewhere.
    - `delivery` is this rank's share of the weights on their way into the server.
    - `group` holds the engine's ranks (gloo), or is None for an engine with one rank.
    - `settings` is the `sglang` section of the config section `role`.
    - `advance` is called regularly while a server starts.
    - `seeded` sends samples with their seeds. The server heeds them if started for deterministic inference.
    - `verify` makes the server compare checksums of the weights after copying. It is replaced if they differ.
    - `routing`, on the first rank alone, makes samples return with the experts of each token.
    - `adapter` describes the low-rank adapters in the server, or is None.
    - `images` are those of samples, with model.vision.
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
        images: ServerImages | None = None,
    ) -> None:
        self._own: OwnRequests | None = None
        if server is not None and client is not None:
            self._own = OwnRequests(
                max_running_requests=max_running_requests,
                max_context_tokens=max_context_tokens,
                role=role,
                hang_timeout_s=settings.hang_timeout_s,
                ending=lambda: server.ending,
                seeded=seeded,
                routing=routing,
                adapter=ADAPTER if adapter else None,
                images=images,
            )
        super().__init__(self._own, max_running_requests, max_context_tokens, tokenizer)
        self.delivery = delivery
        self._server, self._client = server, client
        self._settings, self._role = settings, role
        self._advance, self._verify = advance, verify
        self._sharing = EngineBroadcast(group)
        num_ranks = dist.get_world_size(group) if group is not None else 1
        self._adapter_load = first_load(adapter, num_ranks) if adapter else None
        self._lost: str | None = None
        """Reason to replace the server at the end of the update, or None."""
        self._released: set[str] = set()

    def start(self) -> None:
        """Starts the server and waits until it can take weights. Must be called in the main thread.

        Raises EngineError if it cannot be started. Collective over: the engine's ranks.
        """
        try:
            self._start()
        except EngineLost as lost:
            self._restart(lost)

    def begin_update(self) -> None:
        """Withdraws the policy version. Running samples stop after their current token and keep their keys and values.

        `end_update` replaces the server if it is lost. Collective over: the engine's ranks.
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
        """Completes an update once all parts have arrived. The server serves them as `version`, and running samples
        continue.

        Raises EngineError if a lost server cannot be replaced, and SyncError if the server ends up with another
        version. Collective over: the engine's ranks.
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
                f"the engine serves weights of version {self.delivery.version} after a weight sync; expected "
                f"version {version}"
            )
        self._lost = None
        self._serve(version)

    def step(self) -> list[Sample]:
        """Returns the samples finished since the last step, on every rank, as `RemoteEngine.step` does.

        A lost server is replaced, and the step then returns no samples. Raises EngineError if it has already been
        replaced `max_restarts` times. Collective over: the engine's ranks.
        """
        try:
            return super().step()
        except EngineLost as lost:
            self._restart(lost)
            return []

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """Takes back these samples. The other samples return to the server at once and find their keys and values in
        its cache. Collective over: the engine's ranks."""
        if self._unfinished.keys().isdisjoint(ids):
            return []
        sampling, back = self._sampling, super().withdraw(self._unfinished)
        if self._own is not None and self._own.lost and self._server is not None:
            self._server.kill()  # its requests may still run
        others = [sample for sample in back if sample.id not in ids]
        if others and sampling is not None:
            self.submit(others, sampling)
        return [sample for sample in back if sample.id in ids]

    def release_cache(self) -> None:
        """Empties the prefix cache. The server keeps the memory until `release`.

        Collective over: the engine's ranks.
        """
        expect_idle(self.num_unfinished, "release_cache")
        self._reaches_server(self._flush)

    def release(self, tags: Sequence[str]) -> None:
        """Releases the device memory of "weights", "kv_cache" or "cuda_graph" until `resume`. Its contents are lost.

        The server must have been started with the memory saver. Collective over: the engine's ranks.
        """
        expect_idle(self.num_unfinished, "release")
        while not self._reaches_server(lambda: self._release(tags)):
            pass
        self._released |= {*tags}

    def resume(self, tags: Sequence[str]) -> None:
        """Takes back the released memory among `tags`. Weights also need `redeliver`. Collective over: the engine's
        ranks."""
        released = [tag for tag in tags if tag in self._released]
        if released:
            self._reaches_server(lambda: self._call("/resume_memory_occupation", tags=released))
            self._released -= {*released}

    def redeliver(self) -> None:
        """Gives the server its last weights again. Collective over: the engine's ranks."""
        try:
            self.delivery.redeliver(self._verify)
        except EngineLost as lost:
            self._restart(lost)

    def close(self) -> None:
        """Ends the server in any state."""
        self._unfinished = {}
        if self._own is not None and self._client is not None and not self._client.is_closed:
            self._wait(self._own.stop())
            self._client.close()
        if self._server is not None:
            self._server.kill()
        self.delivery.close()

    # Methods of the first rank, the only one with requests and a client.

    def _wait_for_server(self, advance: Callable[[], None]) -> None:
        assert self._server is not None and self._client is not None
        self._server.wait_until_ready(self._settings.start_timeout_s, advance)
        self._client.connect(self._server.url, self._server.token)
        if self._adapter_load is not None:
            self._client.call(*self._adapter_load)

    def _pause(self) -> None:
        assert self._own is not None
        self._wait(self._own.hold())
        self._call("/pause_generation", mode="in_place")

    def _go_on(self) -> None:
        self._call("/continue_generation", torch_empty_cache=False)
        if not self._unfinished:
            self._flush()

    def _release(self, tags: Sequence[str]) -> None:
        if not self._released:
            self._flush()  # SGLang's scheduler ends itself if it still counts a request
        self._call("/release_memory_occupation", tags=[*tags])

    def _flush(self) -> None:
        """Empties the prefix cache once the server is idle."""
        assert self._client is not None
        limit_s = self._settings.hang_timeout_s
        self._client.ask(lambda calls: flushed(calls, limit_s), FLUSH, FLUSH_S + limit_s)

    def _lose_server(self) -> None:
        assert self._client is not None and self._own is not None
        self._wait(self._own.lose_server())
        self._client.disconnect()

    def _call(self, path: str, **body: object) -> None:
        assert self._client is not None
        self._client.call(path, body)

    # Methods of all ranks.

    def _start(self) -> None:
        if self._server is not None:
            self._server.start()
            if not self._sharing.is_first:
                self._server.wait_until_ready(self._settings.start_timeout_s, self._advance)
        self._sharing.wait(self._wait_for_server, self._advance)
        self._released.clear()
        self.delivery.check_layout()

    def _serve(self, version: int) -> None:
        self.policy_version = version
        if self._client is not None and self._own is not None:
            self._wait(self._own.serve(self._client.calls, version))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._client is not None
        return self._client.run(work)

    def _on_all(self, action: Callable[[], list[Sample]]) -> list[Sample]:
        return self._sharing.samples(action, self._unfinished)

    def _reaches_server(self, action: Callable[[], None]) -> bool:
        """Runs `action` on the first rank and returns True. If the server is lost, replaces it and returns False."""
        try:
            self._sharing.together(action)
        except EngineLost as lost:
            self._restart(lost)
            return False
        return True

    def _restart(self, lost: EngineLost) -> None:
        """Replaces the server, gives the new one the last delivered weights, and queues the running samples again."""
        while True:
            if self.num_restarts >= self._settings.max_restarts:
                raise EngineError(
                    f"The SGLang server of this engine was lost: {lost}. It has been restarted {self.num_restarts} "
                    f"times, and {self._role}.sglang.max_restarts = {self._settings.max_restarts} allows no more. Its "
                    "log is in the run folder."
                )
            self.num_restarts += 1
            if self._sharing.is_first:
                logger.warning("The SGLang server of this engine was lost and is restarted: %s", lost)
            self._sharing.together(self._lose_server)
            if self._server is not None:
                self._server.kill()
            try:
                self._start()
                self.delivery.redeliver(self._verify)
                break
            except EngineLost as again:
                lost = again
        if self.policy_version is not None:
            self._serve(self.policy_version)


# Builds the engine for a rank of a role, and the parts of its memory.

LOOPBACK = "127.0.0.1"


def build_sglang(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """Builds this rank's share of the engine, as rollout.build.build_engine says.

    Raises ConfigError if SGLang refuses the arguments.
    """
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
        images=ServerImages.of(site),
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
        names=NamedWeights.of(site.architecture) if by_names(site.architecture) else None,
    )


def _warn_of_seeds(site: EngineSite) -> None:
    heeds_them = site.settings.sglang.heeds_seeds or not site.settings.sampling.temperature
    if not heeds_them and site.world.rank == site.grid.owner(0):
        logger.warning(
            "SGLang samples with its own random numbers, so `seed` does not make its responses repeat. To repeat them "
            "set %s.sglang.args.enable_deterministic_inference to true; this costs some speed",
            site.role,
        )


def parts_of_server(
    engine: SGLangEngine, delivery: Delivery, leave: Callable[[], None], leaves: bool, *, has_adapters: bool = False
) -> Mapping[str, MemoryPart]:
    """Returns the server's memory as parts for offloading.

    With `leaves` False nothing is released, as without a GPU, and dropping the cache only ends running samples.
    Adapters always stay on the device, because SGLang's memory saver leaves them out.
    """

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
        num_bytes=lambda: 0,  # the server sizes its cache by the free memory that it finds
        forget=leave,
    )
    of_weights = {"base": weights, "weights": MemoryPart(tuple)} if has_adapters else {"weights": weights}
    return {"kv_cache": kv_cache, **of_weights}  # in this order, so no sample runs when the weights leave


def _check_device(site: EngineSite) -> None:
    """Raises ConfigError for settings that SGLang supports only on GPUs."""
    if site.world.device.type != "cpu":
        return
    if len(site.ranks) > 1:
        raise ConfigError(
            f"{site.role}.parallel.tp: got {len(site.ranks)} for {site.role}.engine sglang without a GPU; expected 1, "
            f"because SGLang needs a NUMA node per rank on CPUs, or {site.role}.engine: embedded"
        )
    if site.settings.dtype == "fp8":
        raise ConfigError(
            f"{site.role}.dtype: got fp8 for {site.role}.engine sglang without a GPU; expected auto, because SGLang "
            f"multiplies in FP8 only on GPUs, or {site.role}.engine: embedded"
        )
    in_sglang = FAMILIES[site.architecture.family].sglang
    if in_sglang and in_sglang.needs_gpu:
        raise ConfigError(
            f"{site.role}.engine: got sglang without a GPU; expected embedded, because SGLang computes a model of "
            f"{site.architecture.family} only on GPUs"
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
        gpus=world.visible_gpus(on_node),
        host=rendezvous.rsplit(":", 1)[0] if rendezvous else LOOPBACK,
        log_path=Path(config.output_dir) / "engines" / f"{of_role}rank{world.rank}.log",
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        needs_tokenizer=bool(settings.sampling.stop) or site.images is not None,
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
        whole_tower=len(ranks) > 1 and site.architecture.vision is not None and not by_names(site.architecture),
        kept_modules=kept_modules_of(site.architecture),
        model_config=model_config_of(site.architecture),
    )


def _rendezvous(site: EngineSite) -> str | None:
    """Returns host:port on the node of the engine's first rank, for an engine over several nodes. None for one node."""
    if site.num_nodes == 1:
        return None
    key = f"engine/{site.role}/{site.ranks[0]}"
    if site.world.rank == site.ranks[0]:
        with socket.create_server(("", 0)) as free:
            site.job_store.put(key, f"{site.world.address}:{free.getsockname()[1]}")
    return str(site.job_store.get(key, waiting_for=f"the address of the engine on rank {site.ranks[0]}"))
