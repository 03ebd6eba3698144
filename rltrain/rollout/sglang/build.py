"""SGLang's server on a rank of a role, and the parts of memory that it lives in."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.errors import ConfigError
from rltrain.models import canonical_tensors
from rltrain.models.lora import target_of
from rltrain.offload.host_memory import NodeCopy
from rltrain.offload.memory_parts import MemoryPart, RemotePart
from rltrain.rollout.engine import EngineSite, HostedEngine
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.sglang.arguments import check_arguments
from rltrain.rollout.sglang.client import Client
from rltrain.rollout.sglang.engine import SGLangEngine
from rltrain.rollout.sglang.process import Server
from rltrain.rollout.sglang.returned_routing import ServerRouting
from rltrain.rollout.sglang.spec import AdapterSpec, ServerSpec
from rltrain.rollout.sglang.weights.delivery import Delivery

logger = logging.getLogger(__name__)

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
