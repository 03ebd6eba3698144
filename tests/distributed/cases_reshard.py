"""Reshards and saves on real ranks. Every rank compares its parameters with the oracle's formulas."""

import mmap
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.checkpoint.hf_writer import save_checkpoint
from rltrain.models import Architecture, read_architecture
from rltrain.models.table import ITEM_BYTES, Array
from rltrain.reshard import execute
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.execute import SyncReport
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan, traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.shared_memory import SharedMemory
from tests.support.checkpoint_files import loads_alike, stored_tensors
from tests.support.model_shards import (
    PADDING,
    Place,
    Tensors,
    engine_shard,
    full_tensors,
    megatron_shard,
    tiny_architecture,
)

ALL, CPU = (0, 1, 2, 3), torch.device("cpu")
PLACEMENTS = {
    "colocated tp2 dp2 -> tp4": (Grid(ALL, tp=2), Grid(ALL, tp=4)),
    "colocated tp2 pp2 -> tp1 dp4": (Grid(ALL, tp=2, pp=2), Grid(ALL)),
    "colocated tp4 -> tp2 dp2": (Grid(ALL, tp=4), Grid(ALL, tp=2)),
    "disaggregated tp2 -> tp1 dp2": (Grid((0, 1), tp=2), Grid((2, 3))),
    "disaggregated pp2 -> tp2": (Grid((0, 1), pp=2), Grid((2, 3), tp=2)),
    "disaggregated, interleaved ranks, dp2 -> tp2": (Grid((0, 3)), Grid((1, 2), tp=2)),
    "overlapping tp2 -> tp2": (Grid((0, 1), tp=2), Grid((1, 2), tp=2)),
    "overlapping tp1 pp2 -> tp1 dp2": (Grid((1, 2), pp=2), Grid((2, 3))),
    "one rank feeds all": (Grid((3,)), Grid(ALL, tp=2)),
}
"""Grids of an actor and a rollout."""
ARCHITECTURES: dict[str, Architecture] = {
    "qwen3, one KV head": tiny_architecture("qwen3", num_kv_heads=1),
    "qwen2, tied": tiny_architecture("qwen2", tied_embeddings=True),
    "llama": tiny_architecture("llama"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a reshard.

    Boxes of at least `large_bytes` travel in place; None keeps the default. Ranks of a node exchange over gloo, or with
    `share_memory` read each other's memory.
    """

    bucket_bytes: int = 2**24
    dtype: str = "float32"
    ranks_per_node: int = 4
    large_bytes: int | None = None
    share_memory: bool = False


CHECKS = {
    "small buckets": Settings(bucket_bytes=1024),
    "one bucket": Settings(),
    "cast": Settings(bucket_bytes=1024, dtype="bfloat16"),
    "in place": Settings(bucket_bytes=4096, large_bytes=256),
    "two nodes": Settings(bucket_bytes=2048, large_bytes=512, ranks_per_node=2),
    "shared memory": Settings(bucket_bytes=1024, share_memory=True),
    "shared memory, cast": Settings(bucket_bytes=2048, dtype="bfloat16", share_memory=True),
    "two nodes, shared memory": Settings(bucket_bytes=2048, large_bytes=512, ranks_per_node=2, share_memory=True),
    "shared memory, but for one": Settings(bucket_bytes=1024, share_memory=True),
    "shared memory, out of step": Settings(bucket_bytes=1024, share_memory=True),
}
FIRST = {"small buckets": 0, "one bucket": 1, "two nodes": 2, "shared memory": 0}
"""Checks of every placement, each with one architecture in turn, and the number of the first one. Together they cover
every pair."""
THIRDS = {
    "cast": (0, 1),
    "in place": (0, 1),
    "shared memory, cast": (1, 2),
    "two nodes, shared memory": (0, 2),
    "shared memory, but for one": (1, 2),
    "shared memory, out of step": (0, 2),
}
"""Other checks run only the placements whose number modulo 3 is listed."""


def pairs_of(check: str) -> list[tuple[str, str]]:
    """Returns pairs (placement, architecture)."""
    in_turn = islice(cycle(ARCHITECTURES), FIRST.get(check, 2), None)
    thirds = THIRDS.get(check, (0, 1, 2))
    pairs = zip(PLACEMENTS, in_turn, strict=False)
    return [pair for number, pair in enumerate(pairs) if number % 3 in thirds]


def reshard(check: str, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> dict[str, dict[str, Any]]:
    """Runs every pair of the check and returns this rank's results by "placement, architecture"."""
    settings, results = CHECKS[check], {}
    with mock.patch.object(execute, "LARGE_BYTES", settings.large_bytes or execute.LARGE_BYTES):
        for placement, name in pairs_of(check):
            if dist.get_rank() in (union := union_of(placement)):
                group = groups[union]
                found = reshard_twice(ARCHITECTURES[name], *PLACEMENTS[placement], group, group, settings)
                results[f"{placement}, {name}"] = found
    return results


def groups_of_unions() -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Returns one group for the ranks of each placement."""
    return {union: dist.new_group(union) for union in sorted({*map(union_of, PLACEMENTS)})}


def union_of(placement: str) -> tuple[int, ...]:
    """Returns the ranks that take part."""
    actor, rollout = PLACEMENTS[placement]
    return tuple(sorted({*actor.ranks, *rollout.ranks}))


def shards(
    architecture: Architecture, full: Tensors, source: Grid, destination: Grid
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
    """Returns the oracle's tensors of this rank: held of the source, and expected of the destination."""
    rank, held, expected = dist.get_rank(), None, None
    if rank in source.ranks:
        at = source.coordinates(rank)
        held = tensors(megatron_shard(architecture, full, Place(source.tp, at.tp, source.pp, at.pp)))
    if rank in destination.ranks:
        at = destination.coordinates(rank)
        expected = tensors(engine_shard(architecture, full, Place(destination.tp, at.tp)))
    return held, expected


def resharding_of(
    source: Layout,
    destination: Layout,
    group: dist.ProcessGroup,
    settings: Settings,
    *,
    cpu_group: dist.ProcessGroup | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> execute.Resharding:
    """Returns this rank's part. `cpu_group` must be a gloo group; by default it is `group`."""
    node = settings.ranks_per_node
    return execute.Resharding(
        plan(source, destination, dist.get_rank(), node),
        group=group,
        cpu_group=cpu_group or group,
        bucket_bytes=settings.bucket_bytes,
        device=device,
        ranks_per_node=node,
        share_memory=settings.share_memory,
        **options,
    )


def reshard_twice(
    architecture: Architecture,
    source_grid: Grid,
    destination_grid: Grid,
    group: dist.ProcessGroup,
    cpu_group: dist.ProcessGroup,
    settings: Settings,
) -> dict[str, Any]:
    """Runs the reshard and returns this rank's results."""
    source = megatron_layout(architecture, source_grid)
    destination = engine_layout(architecture, destination_grid, dtype=settings.dtype)
    held, expected = shards(architecture, full_tensors(architecture), source_grid, destination_grid)
    dtype = getattr(torch, settings.dtype)
    wanted = expected and {name: torch.full_like(tensor, PADDING, dtype=dtype) for name, tensor in expected.items()}
    met = list[float]()

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        yield
        met.append(time.perf_counter())

    prepared = resharding_of(source, destination, group, settings, cpu_group=cpu_group, waiting=waiting)
    spoilt = wanted and {name: torch.full_like(tensor, PADDING) for name, tensor in wanted.items()}
    first = prepared.run(held, spoilt)
    came = time.perf_counter()
    report = prepared.run(held, wanted)
    worked = time.perf_counter() - met[-1]
    wrong = [name for name, tensor in (expected or {}).items() if not torch.equal(wanted[name], tensor.to(dtype))]
    return {
        "wrong": wrong,
        "compared": len(expected or {}),
        **counts(report, prepared, traffic(source, destination, settings.ranks_per_node), settings),
        "again": replace(first, **_seconds(report)) == report,
        "came": came,
        "met": met[-1],
        "without_the_wait": report.seconds <= worked,
        "bandwidth": report.bandwidth_bytes_per_s,
        "seconds": all(0 <= seconds <= report.seconds for seconds in _seconds(report).values()),
    }


def counts(
    report: SyncReport, prepared: execute.Resharding, moved: dict[tuple[int, int], int], settings: Settings
) -> dict[str, Any]:
    """Returns counts of rounds, messages and bytes. `moved` has the expected bytes from rank to rank."""
    rank, node = dist.get_rank(), settings.ranks_per_node
    return {
        "num_rounds": report.num_rounds,
        "sent": report.bytes_sent == sum(n for (s, d), n in moved.items() if s == rank != d),
        "received": report.bytes_received == sum(n for (s, d), n in moved.items() if d == rank != s),
        "in_place": sum(len(stage.sends_in_place) for stage in prepared.steps.stages),
        "fanned_out": sum(len(sent) for stage in prepared.steps.stages if stage.kind.fans_out for sent in stage.sends),
        "sharing": [any(stage.sends) for stage in prepared.steps.stages if stage.kind.shared],
        "neighbours": list(prepared.steps.bases.neighbours),
        "packed": sum(_packed_bytes(prepared.steps.slices[s.pack[0] : s.pack[-1]]) for s in prepared.steps.stages),
        "staging": report.peak_staging_bytes <= 4 * settings.bucket_bytes + settings.share_memory * 2 * mmap.PAGESIZE,
        "launches": report.num_launches <= 1 + 2 * report.num_rounds,
        "sent_to": {str(d): n for (s, d), n in moved.items() if s == rank != d},
        "ratio": report.network_ratio,
        "network": report.bytes_network == sum(n for (s, d), n in moved.items() if s // node != d // node),
        "moved": report.bytes_moved == sum(n for (s, d), n in moved.items() if s != d),
        "local": report.bytes_local == sum(n for (s, d), n in moved.items() if s == d),
    }


def _packed_bytes(slices: Array) -> int:
    return int((slices["rows"] * slices["cols"] * ITEM_BYTES[slices["dst_type"]]).sum())


def _seconds(report: SyncReport) -> dict[str, float]:
    return {name: value for name, value in asdict(report).items() if name.endswith("seconds")}


def tensors(shard: Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in shard.items()}


@contextmanager
def a_rank_that_cannot_be_mapped() -> Iterator[None]:
    """Rank 2 cannot map the memory of others, as in its own container. The other three share theirs."""
    unreachable = mock.patch.object(SharedMemory, "open", side_effect=PermissionError)
    with unreachable if dist.get_rank() == 2 else nullcontext():
        yield


@contextmanager
def ranks_out_of_step() -> Iterator[None]:
    """Delays every copy by a random time. No rank may pack into a slot before all others have read it."""
    launch, random = CopyTable.launch, Random(dist.get_rank())

    def launch_late(table: CopyTable, first: int, last: int) -> None:
        time.sleep(random.expovariate(1000))
        launch(table, first, last)

    with mock.patch.object(CopyTable, "launch", launch_late):
        yield


def round_trip(grids: list[tuple[bool, int, int]], max_shard_bytes: int) -> list[dict[str, Any]]:
    """Converts HF -> this rank's shard -> HF for grids (tied embeddings, tp, pp). Rank 0 compares the bits."""
    rank, results = dist.get_rank(), []
    with _shared_folder() as folder:
        for number, (tied, tp, pp) in enumerate(grids):
            original, saved = folder / f"original{number}", folder / f"saved{number}"
            if rank == 0:
                _make_checkpoint(original, tied)
            dist.barrier()
            architecture = read_architecture(original)
            layout = megatron_layout(architecture, Grid((0, 1, 2, 3), tp=tp, pp=pp))
            parameters = {name: torch.empty(shape) for name, shape in layout.on(rank).parameters}
            load_parameters(original, layout, rank, parameters)
            sizes = {"max_shard_bytes": max_shard_bytes, "bucket_bytes": 3000, "written_bytes": 20_000}
            places = {"group": dist.group.WORLD, "rank": rank, "like": original}
            save_checkpoint(saved, parameters, layout, architecture, **places, **sizes)
            if rank == 0:
                results.append(_compare(original, saved))
            dist.barrier()
    return results


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """Yields a temporary folder on all ranks. Rank 0 makes and removes it."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as made:
        names = [made]
        dist.broadcast_object_list(names)
        yield Path(str(names[0]))
        dist.barrier()


def _make_checkpoint(folder: Path, tied: bool) -> None:
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=51,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")


def _compare(original: Path, saved: Path) -> dict[str, Any]:
    before, after = stored_tensors(original), stored_tensors(saved)
    return {
        "same_names": before.keys() == after.keys(),
        "wrong": [name for name in before if name not in after or not torch.equal(before[name], after[name])],
        "num_tensors": len(after),
        "files": sorted(path.name for path in saved.glob("*.safetensors")),
        "left_behind": sorted(path.name for path in saved.parent.iterdir() if path.name.startswith(".")),
        "loads_alike": loads_alike(original, saved),
    }


def all_checks() -> dict[str, Any]:
    around = {
        "shared memory, but for one": a_rank_that_cannot_be_mapped,
        "shared memory, out of step": ranks_out_of_step,
    }
    groups, results = groups_of_unions(), dict[str, Any]()
    for check in CHECKS:
        with around.get(check, nullcontext)():
            results[check] = reshard(check, groups)
    return results | {
        "round trip": round_trip([(True, 2, 2), (False, 1, 4)], max_shard_bytes=10_000),
        "round trip, one file per writer": round_trip([(False, 2, 1), (True, 4, 1)], max_shard_bytes=10**9),
    }
