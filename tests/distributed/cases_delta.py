"""Reshards of changed elements on real ranks. After each, every rank's tensors equal the oracle bit for bit."""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.reshard.delta import DeltaSettings
from rltrain.reshard.execute import SyncReport
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import converted, verify
from rltrain.rollout.layout import engine_layout
from tests.distributed.cases_reshard import (
    ARCHITECTURES,
    PLACEMENTS,
    Settings,
    groups_of_unions,
    resharding_of,
    shards,
    union_of,
)
from tests.support.model_shards import PADDING, Tensors, full_tensors

CHECKS = {
    "wire": Settings(bucket_bytes=4096),
    "wire, cast": Settings(bucket_bytes=2**20, dtype="bfloat16"),
    "two nodes": Settings(bucket_bytes=4096, ranks_per_node=2),
    "shared memory": Settings(bucket_bytes=4096, share_memory=True),
    "shared memory, cast": Settings(bucket_bytes=4096, dtype="bfloat16", share_memory=True),
    "two nodes, shared memory": Settings(bucket_bytes=2**20, ranks_per_node=2, share_memory=True),
    "without native code": Settings(bucket_bytes=2**20),
}
SHARES = (1.0, 0.01, 0.0, 0.3, 1.0, 0.02)
"""Shares of elements changed before each run."""
LOSES_BEFORE = 3
"""The run before which one rank loses its kept copy and must send everything."""


@dataclass(frozen=True)
class Run:
    """The result of one run on this rank."""

    wrong: list[str]
    report: SyncReport

    def described(self) -> dict[str, Any]:
        report = self.report
        return {
            "wrong": self.wrong,
            "compared": report.bytes_compared,
            "changed": report.bytes_changed,
            "encoded": report.bytes_encoded,
            "moved": report.bytes_moved,
            "sent": report.bytes_sent,
            "received": report.bytes_received,
        }


def pairs() -> list[tuple[str, str]]:
    """Returns pairs (placement, architecture)."""
    return list(zip(PLACEMENTS, islice(cycle(ARCHITECTURES), len(PLACEMENTS)), strict=True))


def all_checks() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns this rank's runs by check and placement."""
    groups, results = groups_of_unions(), dict[str, dict[str, list[dict[str, Any]]]]()
    for number, (check, settings) in enumerate(CHECKS.items()):
        mode = "off" if check == "without native code" else "auto"
        with mock.patch.dict("os.environ", RLTRAIN_NATIVE=mode):
            results[check] = {
                placement: [run.described() for run in runs(placement, name, groups[union_of(placement)], settings)]
                for place, (placement, name) in enumerate(pairs())
                if dist.get_rank() in union_of(placement) and place % 3 == number % 3
            }
    return results


def runs(
    placement: str, name: str, group: dist.ProcessGroup, settings: Settings, cpu_group: dist.ProcessGroup | None = None
) -> list[Run]:
    """Runs one reshard after another, with weights that change in between."""
    source, destination = PLACEMENTS[placement]
    source_layout = megatron_layout(ARCHITECTURES[name], source)
    layouts = source_layout, engine_layout(ARCHITECTURES[name], destination, dtype=settings.dtype)
    rank, delta = dist.get_rank(), DeltaSettings(in_shared_memory=settings.share_memory)
    prepared = resharding_of(*layouts, group, settings, cpu_group=cpu_group, delta=delta)
    held, dtype = empty(layouts[1], rank, settings.dtype), getattr(torch, settings.dtype)
    full, found = full_tensors(ARCHITECTURES[name]), []
    for number, share in enumerate(SHARES):
        full = changed(full, share, seed=number)
        given, wanted = shards(ARCHITECTURES[name], full, source, destination)
        expected = {key: converted(tensor, dtype) for key, tensor in (wanted or {}).items()}
        lost = number == LOSES_BEFORE and rank == max(destination.ranks)
        for tensor in (held or {}).values() if lost else ():
            tensor.zero_()
        report = prepared.run(given, held, whole=number in (0, LOSES_BEFORE))
        if number == len(SHARES) - 1:
            planned = plan(*layouts, rank, settings.ranks_per_node)
            verify(planned, *layouts, given, held, group=cpu_group or group)
        wrong = [key for key, tensor in expected.items() if lost or not same_bits(tensor, (held or {})[key])]
        if lost:  # no plan restores the padding
            wrong = [key for key in wrong if not same_bits_where_written(expected[key], (held or {})[key])]
            held = {key: tensor.clone() for key, tensor in expected.items()}
        found.append(Run(wrong, report))
    return found


def changed(full: Tensors, share: float, seed: int) -> Tensors:
    """Returns tensors with about this share of elements changed: some in the lowest bit only, some to NaN or minus
    zero."""
    rng, result = np.random.default_rng(seed), {}
    for key, values in full.items():
        flat = values.astype(np.float32).reshape(-1).copy()
        chosen = rng.random(len(flat)) < share
        bits = flat.view(np.uint32)
        bits[chosen] ^= rng.choice(np.array([1, 0x80000000, 0x00400000], dtype=np.uint32), int(chosen.sum()))
        if share not in (0.0, 1.0):
            bits[chosen & (rng.random(len(flat)) < 0.05)] = 0x7FC12345
        result[key] = flat.reshape(values.shape)
    return result


def empty(layout: Any, rank: int, dtype: str) -> dict[str, Tensor] | None:
    if rank not in layout.ranks:
        return None
    return {key: torch.full(shape, PADDING, dtype=getattr(torch, dtype)) for key, shape in layout.on(rank).parameters}


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def same_bits_where_written(expected: Tensor, found: Tensor) -> bool:
    written = expected != PADDING
    return same_bits(expected[written], found[written])
