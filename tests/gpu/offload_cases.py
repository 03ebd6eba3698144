"""The process of test_offload: two roles take turns on a device with room for one at a time."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rltrain.offload.device_memory import device_memory
from rltrain.offload.memory_parts import MemoryPart
from rltrain.offload.offload import Offloader
from rltrain.schedule.order import Order

MIB, GIB = 2**20, 2**30
ROLE_BYTES = int(os.environ.get("RLTRAIN_TEST_ROLE_BYTES", 3 * GIB))
"""Bytes of the actor's weights and optimizer, and of the rollout's weights."""
TENSOR_BYTES = 48 * MIB


@dataclass(frozen=True)
class Entry:
    name: str
    step: int
    kind: str = "task"
    final: bool = False
    roles: tuple[str, ...] = field(default=("actor", "rollout"))


def used_bytes(device: torch.device) -> int:
    """Returns the bytes used by all processes, as reported by the driver."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Turns:
    """An actor that updates and a rollout that generates, on one device."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        self.order = [Entry(name, step) for step in range(num_steps) for name in ("generate", "score", "update")]
        self.order.append(Entry("generate", num_steps))
        self.memory = device_memory(device)
        self.device = device
        self.residency = Offloader(Order.of(self.order), {"actor": True, "rollout": True}, self.memory, prefetch=False)
        self.tensors = {name: self._tensors(ROLE_BYTES // 2) for name in ("weights", "optimizer")}
        actor = {name: MemoryPart(lambda kept=kept: kept) for name, kept in self.tensors.items()}  # type: ignore[misc]
        self.residency.admit("actor", {**actor, "master_weights": MemoryPart(list), "gradients": MemoryPart(list)})
        self.engine = self._tensors(ROLE_BYTES)
        rest = {part: MemoryPart(list) for part in ("kv_cache", "base")}
        self.residency.admit("rollout", {"weights": MemoryPart(lambda: self.engine), **rest})

    def _tensors(self, num_bytes: int) -> list[torch.Tensor]:
        count = num_bytes // TENSOR_BYTES
        return [torch.full((TENSOR_BYTES // 4,), float(i), device=self.device) for i in range(count)]

    def is_right(self, step: int) -> bool:
        """Returns whether the actor's tensors on the device equal the result of `step` updates."""
        return all(bool((t == i + step).all()) for kept in self.tensors.values() for i, t in enumerate(kept))

    def update(self) -> None:
        for kept in self.tensors.values():
            for tensor in kept:
                tensor.add_(1)


def fragment(device: torch.device) -> list[torch.Tensor]:
    """Leaves holes of many sizes in the allocator's segments. The returned tensors keep the holes open."""
    blocks = [torch.empty((i % 37 + 1) * 130_000, dtype=torch.uint8, device=device) for i in range(600)]
    kept = [block[:1].clone() for block in blocks] + blocks[::19]
    return kept


def take_turns(num_steps: int, fragmented: bool, limit: float | None = None) -> dict[str, Any]:
    """Returns the bytes in use before any allocation and after every offload of the actor, and the checks of its
    values."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    empty = used_bytes(device)
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info(device)[1], device)
    kept = fragment(device) if fragmented else []
    turns = Turns(num_steps, device)
    after_offload, right, residues = [], [], []
    for position, entry in enumerate(turns.order):
        turns.residency.enter(position)
        if entry.name == "update":
            right.append(turns.is_right(entry.step))
            turns.update()
            torch.cuda.synchronize()
        elif entry.name == "generate":
            engine_bytes = sum(tensor.nbytes for tensor in turns.engine)
            after_offload.append(used_bytes(device) - empty - engine_bytes)
            residues.append(turns.residency.metrics().get("memory/actor_residue_bytes", 0.0))
    return {"right": right, "after_offload": after_offload, "residues": residues, "kept": len(kept)}


def bandwidth() -> dict[str, float]:
    """Returns GB/s in each direction, of one large pinned copy and of the residency's moves in the same process."""
    device = torch.device("cuda", 0)
    result = _pinned_bandwidth(device)
    torch.cuda.empty_cache()
    turns = Turns(6, device)
    seconds = []
    for position, entry in enumerate(turns.order[:-1]):
        torch.cuda.synchronize()
        turns.residency.metrics()
        turns.residency.enter(position)
        metrics = turns.residency.metrics()
        if entry.name == "generate" and entry.step:
            seconds.append(metrics["memory/offload_s"])
    moved = sum(tensor.nbytes for kept in turns.tensors.values() for tensor in kept)
    result["residency_out"] = moved / statistics.median(seconds) / 1e9
    result["residency_in"] = _bandwidth_in(turns, moved)
    return result


def _bandwidth_in(turns: Turns, moved: int) -> float:
    """Measures only the actor's parts with the calls of a task. They are on the device, the rollout's parts are not."""
    keys = [("actor", "weights"), ("actor", "optimizer")]
    seconds = []
    for _ in range(5):
        turns.residency._offload(keys, position=0)
        start = time.perf_counter()
        turns.residency._onload(keys, position=2)
        seconds.append(time.perf_counter() - start)
    return moved / statistics.median(seconds) / 1e9


def _pinned_bandwidth(device: torch.device) -> dict[str, float]:
    host = torch.empty(ROLE_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(ROLE_BYTES, dtype=torch.uint8, device=device)
    return {
        "pinned_out": _timed(lambda: host.copy_(on_device, non_blocking=True)),
        "pinned_in": _timed(lambda: on_device.copy_(host, non_blocking=True)),
    }


def _timed(copy: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return ROLE_BYTES / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    case, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"take_turns": take_turns, "bandwidth": bandwidth}[case](**arguments)))
