"""The ranks of test_sglang: they form one engine. The first rank starts the server, and all ranks share its GPUs.

Without a GPU and with one rank, the same code runs on the CPU.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.config.schema import SGLang
from rltrain.models import read_architecture
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.execute import Resharding
from rltrain.reshard.fp8_blocks import quantized
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.layout import Layout, split
from rltrain.reshard.plan import plan
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine
from rltrain.rollout.servers.sglang_process import Server
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from tests.gpu.offload_cases import used_bytes
from tests.sglang.servers import CALL_TIMEOUT_S, FROM_DISK, START_TIMEOUT_S, call, checksums, greedy, server_spec

PROMPT = [3, 14, 15, 92, 65]
NUM_TOKENS = 12
SLOT_BYTES = 2**18
"""Small, so that weights pass through every slot several times."""
BUCKET_BYTES = 2**24

Fill = Callable[[int, Mapping[str, Tensor]], object]


class Host:
    """This rank of an engine over all ranks."""

    def __init__(self, folder: str, dtype: torch.dtype | None = None) -> None:
        self.rank, self.tp = dist.get_rank(), dist.get_world_size()
        self.folder = Path(folder)
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        self.group = dist.group.WORLD if self.tp > 1 else None
        self.grid = Grid(tuple(range(self.tp)), tp=self.tp)

    def layout(self, path: str) -> Layout:
        return engine_layout(read_architecture(Path(path)), self.grid, dtype=str(self.dtype).removeprefix("torch."))

    def server(self, path: str, **overrides: Any) -> Server | None:
        """Returns the server, not yet started, on the first rank."""
        if self.rank > 0:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.tp)))
        settings: dict[str, Any] = {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tp": self.tp,
            "gpus": tuple(visible.split(",")[: self.tp]) if self.device.type == "cuda" else (),
        }
        python = os.environ["RLTRAIN_SGLANG_PYTHON"]
        return Server(server_spec(python, path, self.folder / "engine.log", **settings | overrides))

    def delivery(self, parts: list[Layout], send: Callable[..., Any] | None) -> Delivery:
        return Delivery(parts, self.rank, device=self.device, keep=True, group=self.group, call=send)


def served(server: Server) -> dict[str, Any]:
    return {"checksums": checksums(server), "greedy": greedy(server, PROMPT, NUM_TOKENS)}


def fresh(host: Host, path: str, **overrides: Any) -> dict[str, Any] | None:
    """Returns, on the first rank, the answers of a server that loads the checkpoint itself."""
    server = host.server(path, args=FROM_DISK, **overrides)
    try:
        start(server)
        return served(server) if server else None
    finally:
        if server:
            server.kill()
        dist.barrier()


def start(server: Server | None) -> None:
    if server is not None:
        server.start()
        server.wait_until_ready(START_TIMEOUT_S, lambda: None)


def delivered(host: Host, path: str, parts: list[Layout], fill: Fill) -> dict[str, Any] | None:
    """Returns, on the first rank, the answers of a server started with noise after `fill` has written every part."""
    server = host.server(path)
    delivery = host.delivery(parts, functools.partial(call, server) if server else None)
    try:
        start(server)
        delivery.check_layout()
        deliver(delivery, fill)
        dist.barrier()
        return served(server) if server else None
    finally:
        if server:
            server.kill()
        dist.barrier()
        delivery.close()


def deliver(delivery: Delivery, fill: Fill, version: int = 1) -> None:
    delivery.begin()
    for part in range(delivery.num_parts):
        fill(part, delivery.tensors(part))
        delivery.arrived(part, verify=True)
    delivery.finish(version)


def weights(checkpoint: str, folder: str) -> dict[str, Any]:
    """Delivers the weights of a checkpoint in many parts. SGLang loads them."""
    host = Host(folder)
    parts = split(host.layout(checkpoint), SLOT_BYTES)

    def fill(part: int, tensors: Mapping[str, Tensor]) -> None:
        load_parameters(Path(checkpoint), parts[part], host.rank, tensors)

    found = delivered(host, checkpoint, parts, fill)
    return {"delivered": found, "fresh": fresh(host, checkpoint), "num_parts": len(parts)}


def fp8(checkpoint: str, quantised_checkpoint: str, folder: str) -> dict[str, Any]:
    """Loads two kinds of FP8 weights into SGLang: quantised by the reshard, and a checkpoint quantised by the
    formula."""
    host = Host(folder, torch.bfloat16)
    whole = host.layout(checkpoint)
    chosen = np.array([is_quantised(name) for name in whole.tensors.names])
    layouts = quantized(whole, whole, chosen)
    held = allocate_parameters(whole, host.rank, device=host.device)
    load_parameters(Path(checkpoint), whole, host.rank, held)
    resharding = Resharding(
        plan(layouts.source, layouts.destination, host.rank, host.tp),
        group=host.group,
        cpu_group=host.group,
        bucket_bytes=BUCKET_BYTES,
        device=host.device,
        magnitudes=BlockScales(BlockTable(layouts, host.rank), host.device),
    )
    found = delivered(
        host, quantised_checkpoint, [layouts.destination], lambda _, tensors: resharding.run(held, tensors)
    )
    return {"delivered": found, "fresh": fresh(host, quantised_checkpoint)}


def is_quantised(name: str) -> bool:
    """Returns whether SGLang's FP8 models have this checkpoint tensor in FP8."""
    return name.endswith("_proj.weight")


def memory(checkpoint: str, folder: str) -> dict[str, Any]:
    """Returns used bytes of this rank's GPU and responses, before and after the server has released its memory."""
    host = Host(folder)
    parts = split(host.layout(checkpoint), SLOT_BYTES)
    server = host.server(checkpoint, memory_saver=True)
    client = Client(CALL_TIMEOUT_S) if server else None
    delivery = host.delivery(parts, client.call if client else None)
    torch.zeros(1, device=host.device)  # creates this process's context before the first measurement
    used = {"before": used_bytes(host.device)}
    engine = SGLangEngine(
        server,
        client,
        delivery,
        group=host.group,
        max_running_requests=8,
        max_context_tokens=128,
        settings=SGLang(start_timeout_s=START_TIMEOUT_S, max_restarts=0),
        advance=lambda: None,
    )
    try:
        return _take_turns(engine, parts, Path(checkpoint), host, used)
    finally:
        engine.close()


def _take_turns(
    engine: SGLangEngine, parts: list[Layout], checkpoint: Path, host: Host, used: dict[str, int]
) -> dict[str, Any]:
    responses: dict[str, Any] = {}

    def sync(version: int) -> None:
        engine.begin_update()
        for part, layout in enumerate(parts):
            load_parameters(checkpoint, layout, host.rank, engine.incoming(part))
            engine.arrived(part)
        engine.end_update(version)

    def note(moment: str) -> None:
        sampling = SamplingParams(0.0, 1.0, 0, NUM_TOKENS, ())
        [completion] = engine.generate([Sample(id=len(responses), prompt=tuple(PROMPT), seed=0)], sampling)
        responses[moment] = [*completion.tokens], [*completion.logprobs], [*completion.policy_versions]
        used[moment] = used_bytes(host.device)

    def release(moment: str) -> None:
        engine.release_cache()
        engine.release(("kv_cache", "cuda_graph"))
        engine.release(("weights",))
        used[moment] = used_bytes(host.device)

    engine.start()
    sync(1)
    note("full")
    release("released")
    engine.resume(("weights",))
    engine.redeliver()
    engine.resume(("kv_cache", "cuda_graph"))
    note("resumed")
    release("released again")
    engine.resume(("weights",))
    sync(2)
    engine.resume(("kv_cache", "cuda_graph"))
    note("synced")
    return {"used": used, "responses": responses}
