"""The case of a weight sync benchmark: a model, its placements, checkable weights, and timed rounds."""

import ctypes
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models import Architecture, ExpertLayers
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid

Rival = Callable[[], object]
HEADS, KV_HEADS = 16, 8
FFN_PER_HIDDEN = 3
VOCAB_PER_HIDDEN = 8
HIDDEN_MULTIPLE = 128  # heads of a multiple of 8 elements
HIDDEN_PER_LAYER = 64
NOT_WRITTEN = 7.0
"""Initial value of destinations. Weights are between -1 and 1."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of glibc's mallopt


@dataclass(frozen=True)
class Case:
    """A model, and Megatron's and the engine's grids. The grids may share ranks, and cover all ranks together.

    `group` and `cpu_group` have all ranks. `cpu_group` is on gloo.
    """

    architecture: Architecture
    source: Grid
    destination: Grid
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def source_layout(self) -> Layout:
        return megatron_layout(self.architecture, self.source, dtype=self.dtype_name)

    @property
    def destination_layout(self) -> Layout:
        return engine_layout(self.architecture, self.destination, dtype=self.dtype_name)


def parse_grid(text: str, ranks: tuple[int, ...]) -> Grid:
    """Returns a grid from text such as "tp2.pp2" or "tp2.ep2.etp1". Data parallelism uses the remaining `ranks`."""
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 0}
    for part in text.split("."):
        name, size = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(f"{text!r} is not a layout; expected tp2, tp2.pp2, or with experts tp2.ep2.etp1")
        sizes[name] = int(size)
    if len(ranks) % (sizes["tp"] * sizes["pp"]):
        raise ValueError(f"{text} does not fit on {len(ranks)} ranks: {sizes['tp']} x {sizes['pp']} must divide them")
    return Grid(ranks, tp=sizes["tp"], pp=sizes["pp"], ep=sizes["ep"], etp=sizes["etp"] or None)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Returns ranks from text such as "0-3" or "2". Empty text means all ranks."""
    if not text:
        return tuple(range(world_size))
    first, _, last = text.partition("-")
    ranks = tuple(range(int(first), int(last or first) + 1))
    if not ranks or ranks[-1] >= world_size:
        raise ValueError(f"ranks {text} are not all among the {world_size} ranks of this run")
    return ranks


def parse_count(text: str) -> int:
    """Returns a number from text such as 100m, 1.5b or 300k."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9}.get(text[-1:].lower())
    return int(float(text[:-1]) * scale) if scale else int(text)


def architecture_of_size(num_parameters: int, stages: int, num_experts: int = 0) -> Architecture:
    """Returns an untied Qwen3 of about `num_parameters`, with a number of layers divisible by `stages`.

    It has 12 hidden^2 parameters per layer, 16 hidden^2 outside, and about one layer per 64 of hidden size. With
    experts it is a Qwen3-MoE. Its experts divide the parameters of such a model's MLP.
    """
    outside = 2 * VOCAB_PER_HIDDEN
    per_layer = 2 + 2 * KV_HEADS // HEADS + 3 * FFN_PER_HIDDEN
    best = (math.inf, 0, 0)
    for hidden in range(HIDDEN_MULTIPLE, 16384, HIDDEN_MULTIPLE):
        layers = max(round((num_parameters / hidden**2 - outside) / per_layer / stages), 1) * stages
        error = abs(hidden**2 * (outside + per_layer * layers) / num_parameters - 1)
        slimness = abs(math.log(layers * HIDDEN_PER_LAYER / hidden))
        best = min(best, (slimness + 4 * error, hidden, layers))
    _, hidden, layers = best
    moe = (
        ExpertLayers(num_experts, top_k=2, ffn_hidden_size=FFN_PER_HIDDEN * hidden // num_experts)
        if num_experts
        else None
    )
    return Architecture(
        family="qwen3_moe" if moe else "qwen3",
        moe=moe,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=hidden // HEADS,
        ffn_hidden_size=FFN_PER_HIDDEN * hidden,
        vocab_size=VOCAB_PER_HIDDEN * hidden,  # a multiple of 1024, so neither side pads it
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_positions=4096,
        eos_token_ids=(0,),
    )


def canonical_values(layout: Layout, number: int, case: Case) -> Tensor:
    """Returns a checkpoint tensor, [rows, cols]. It depends only on its number, so every rank can make any of them."""
    rows, cols = layout.tensors.matrix_shapes[number].tolist()
    generator = torch.Generator(case.device).manual_seed(number)
    return torch.empty(rows, cols, device=case.device).uniform_(-1, 1, generator=generator).to(case.dtype)


def allocate(layout: Layout, rank: int, case: Case) -> dict[str, Tensor]:
    """Returns this rank's tensors in `layout`, by name. Empty if the rank holds none."""
    parameters = layout.on(rank).parameters if rank in layout.ranks else ()
    return {name: torch.full(shape, NOT_WRITTEN, dtype=case.dtype, device=case.device) for name, shape in parameters}


def fill(layout: Layout, rank: int, tensors: Mapping[str, Tensor], case: Case) -> None:
    """Writes this rank's parts of the checkpoint into its parameters in `layout`."""
    for _, name, part, offset, stride in _parts(layout, rank, case):
        _window(tensors[name], part.shape, offset, stride).copy_(part)


def spoil(tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.data.fill_(NOT_WRITTEN)


def wrong_tensors(layout: Layout, rank: int, tensors: Mapping[str, Tensor], case: Case) -> list[str]:
    """Returns the names of checkpoint tensors of which this rank holds a wrong element."""
    wrong = {
        layout.tensors.names[number]
        for number, name, part, offset, stride in _parts(layout, rank, case)
        if not torch.equal(_window(tensors[name], part.shape, offset, stride), part)
    }
    return sorted(wrong)


def _parts(layout: Layout, rank: int, case: Case) -> Iterator[tuple[int, str, Tensor, int, int]]:
    """Yields (tensor's number, parameter's name, right values, offset, stride) for every piece of `rank`."""
    held = layout.on(rank)
    for number in sorted(set(held.pieces["tensor"].tolist())):
        values = canonical_values(layout, number, case)
        for piece in held.pieces[held.pieces["tensor"] == number]:
            row, col, rows, cols = (int(piece[field]) for field in ("row", "col", "rows", "cols"))
            name = held.parameters[int(piece["parameter"])][0]
            yield number, name, values[row : row + rows, col : col + cols], int(piece["offset"]), int(piece["stride"])


def _window(tensor: Tensor, shape: torch.Size, offset: int, stride: int) -> Tensor:
    return tensor.detach().view(-1)[offset:].as_strided(shape, (stride, 1))


def keep_freed_memory() -> bool:
    """Keeps all freed memory in this process. Returns False if the C library does not support that."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def time_rounds(
    rivals: Mapping[str, Rival], rounds: int, warm_up: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """Returns seconds of the slowest rank by allocator, rival and round, after `warm_up` more rounds.

    A round runs each rival once, and the order rotates by one per round. On the CPU there are two series. "default" has
    the C library's usual allocator. It returns large blocks to the system, and their new pages cost more than the
    copies into them. "kept" keeps all freed memory, so allocations cost little. With CUDA memory comes from torch's
    cache and is always kept. Collective over: `group`, on gloo.
    """
    if device.type != "cpu":
        return {"kept": _series(rivals, rounds, warm_up, group, device)}
    found = {"default": _series(rivals, rounds, warm_up, group, device)}
    if keep_freed_memory():
        found["kept"] = _series(rivals, rounds, warm_up, group, device)
    return found


def _series(
    rivals: Mapping[str, Rival], rounds: int, warm_up: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[float]]:
    names = list(rivals)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(rivals[name], group, device))
    return {name: values[warm_up:] for name, values in seconds.items()}


def _time(rival: Rival, group: dist.ProcessGroup, device: torch.device) -> float:
    _synchronize(device)
    dist.barrier(group)
    start = time.perf_counter()
    rival()
    _synchronize(device)
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns the median, minimum and upper quartile of each rival, in milliseconds."""
    return {
        name: {
            "median": round(1e3 * statistics.median(values), 3),
            "min": round(1e3 * min(values), 3),
            "upper_quartile": round(1e3 * sorted(values)[len(values) * 3 // 4], 3),
        }
        for name, values in seconds.items()
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns date, hardware and versions, to make a result self-contained."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return machine
