"""SGLang's server on a rollout rank, and the parts of memory that it lives in."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rltrain.errors import ConfigError
from rltrain.residency.memory_parts import MemoryPart
from rltrain.residency.remote_part import RemotePart
from rltrain.rollout.layout import engine_parts
from rltrain.rollout.sglang.arguments import check_arguments
from rltrain.rollout.sglang.client import Client
from rltrain.rollout.sglang.engine import SGLangEngine
from rltrain.rollout.sglang.process import Server, ServerSpec
from rltrain.rollout.sglang.weights.delivery import Delivery
from rltrain.rollout.site import EngineSite, HostedEngine

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


def build_sglang(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says. ConfigError where SGLang refuses its arguments."""
    config, world, ranks, settings = site.config, site.world, site.ranks, site.config.rollout.sglang
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
        client = Client(settings.hang_timeout_s)
    delivery = Delivery(
        [part.layout for part in engine_parts(config, site.architecture, site.grid)],
        world.rank,
        device=world.device,
        keep=settings.keep_weights,
        group=group,
        call=client.call if client else None,
    )
    if not settings.heeds_seeds and world.rank == site.grid.owner(0):
        logger.warning(
            "SGLang draws with random numbers of its own, so that `seed` fixes no responses; for those set "
            "rollout.sglang.args.enable_deterministic_inference to true, which costs some speed"
        )
    engine = SGLangEngine(
        server,
        client,
        delivery,
        group=group,
        max_running_requests=config.rollout.max_running_requests,
        max_context_tokens=config.rollout.max_context_tokens,
        settings=settings,
        advance=site.job_store.heartbeat.advance,
        tokenizer=site.tokenizer,
        seeded=settings.heeds_seeds,
        verify=config.weight_sync.verify,
    )
    engine.start()
    return HostedEngine(engine, parts_of_server(engine, delivery, leave, leaves))


def parts_of_server(
    engine: SGLangEngine, delivery: Delivery, leave: Callable[[], None], leaves: bool
) -> Mapping[str, MemoryPart]:
    """Without a GPU the server keeps its memory, which is the host's, and only forgets what lies in it."""

    def release(*tags: str) -> None:
        if leaves:
            engine.release(tags)

    def resume(*tags: str) -> None:
        if leaves:
            engine.resume(tags)

    weights = RemotePart(
        release=lambda: release("weights"),
        resume=lambda: resume("weights"),
        num_bytes=lambda: delivery.num_bytes,
        restore=engine.redeliver,
    )
    kv_cache = RemotePart(
        release=lambda: release("kv_cache", "cuda_graph"),
        resume=lambda: resume("kv_cache", "cuda_graph"),
        num_bytes=lambda: 0,  # the server's, which takes what it finds free
        forget=leave,
    )
    return {"kv_cache": kv_cache, "weights": weights}  # nothing runs any more when the weights leave


def _check_device(site: EngineSite) -> None:
    """Raises ConfigError for what SGLang does on GPUs alone."""
    if site.world.device.type != "cpu":
        return
    if len(site.ranks) > 1:
        raise ConfigError(
            f"rollout.parallel.tp: got {len(site.ranks)} for rollout.engine sglang without a GPU; expected 1, since "
            "SGLang runs on CPUs in one process, or rollout.engine: embedded"
        )
    if site.config.rollout.dtype == "fp8":
        raise ConfigError(
            "rollout.dtype: got fp8 for rollout.engine sglang without a GPU; expected auto, since SGLang has no such "
            "product for CPUs, or rollout.engine: embedded"
        )


def _server_spec(site: EngineSite, on_node: list[int], rendezvous: str | None, leaves: bool) -> ServerSpec:
    config, world, ranks, rollout = site.config, site.world, site.ranks, site.config.rollout
    return ServerSpec(
        python=rollout.sglang.python or sys.executable,
        model_path=config.model.path,
        device="cuda" if world.device.type == "cuda" else "cpu",
        dtype=config.model.dtype,
        wide_head=config.model.head != config.model.dtype,
        tp=len(ranks),
        gpus=_gpus(on_node, world.ranks_per_node) if world.device.type == "cuda" else (),
        host=rendezvous.rsplit(":", 1)[0] if rendezvous else LOOPBACK,
        log_path=Path(config.output_dir) / "engines" / f"rank{world.rank}.log",
        max_running_requests=rollout.max_running_requests,
        max_context_tokens=rollout.max_context_tokens,
        needs_tokenizer=bool(rollout.sampling.stop),
        memory_saver=leaves,
        fp8=rollout.dtype == "fp8",
        draws_during_syncs=site.draws_during_syncs,
        args=rollout.sglang.args,
        node_rank=world.rank // world.ranks_per_node - ranks[0] // world.ranks_per_node,
        num_nodes=site.num_nodes,
        rendezvous=rendezvous,
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
    key = f"engine/{site.ranks[0]}"
    if site.world.rank == site.ranks[0]:
        with socket.create_server(("", 0)) as free:
            site.job_store.put(key, f"{site.world.address}:{free.getsockname()[1]}")
    return str(site.job_store.get(key, waiting_for=f"the address of the engine on rank {site.ranks[0]}"))
