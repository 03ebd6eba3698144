"""Measures milliseconds of a delta weight sync and of a full one, by the share of changed elements.

    python tools/benchmarks/weight_sync_delta.py --params 300m --dtype bfloat16
    python tools/benchmarks/weight_sync_delta.py --params 300m --dtype bfloat16 --gbit 10

Two ranks: the actor with TP1 on one and an engine with TP1 on the other. Before each timed sync the lowest bit of a
random share of all elements is flipped. That is the worst case for encodings of runs of neighbours. Full and delta
syncs alternate. Both run in shared memory, as within a node, and over loopback gloo, as between nodes. Each delta is
compared with the source by checksums (reshard/verify.py) before it is timed.

--gbit runs the ranks in their own network with limited loopback bandwidth (ip and tc, as root). The last line is one
JSON object. Milliseconds are medians of the slower rank, and of the processors' work for both. If a delta saves
nothing, a run tries it only from time to time (reshard/delta.py). "in the long run" is the mean over that.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync import launch
from weight_sync_case import (
    Case,
    allocate,
    architecture_of_size,
    describe_machine,
    fill,
    keep_freed_memory,
    parse_count,
)

from rltrain.reshard.changes import changes_on, mark
from rltrain.reshard.delta import DENSE_SHARE, LONGEST_REST, DeltaSettings
from rltrain.reshard.execute import Resharding, SyncReport
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import verify
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups

SHARES = (0.0, 0.001, 0.01, 0.03, 0.1, 1.0)
WORLD = (0, 1)
COMPARED_BYTES, ROUND_BYTES = 2**27, 2**25
LIMIT_S = 7200.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", default="100m", help="about how many parameters, such as 100m or 1.5b")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--bucket-mb", type=float, default=32)
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--gbit", type=float, help="gigabits per second of the wire; default: unlimited loopback")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes the JSON
    return parser.parse_args()


class Benchmark:
    """The benchmark. All methods are collective over: both ranks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        made = ProcessGroups([WORLD], backend="gloo", timeout_s=600)
        self.group = made.cpu[WORLD]
        self.case = Case(
            architecture=architecture_of_size(parse_count(arguments.params), 1),
            source=Grid((0,)),
            destination=Grid((1,)),
            dtype=getattr(torch, arguments.dtype),
            device=torch.device("cpu"),
            group=made.compute[WORLD],
            cpu_group=self.group,
        )
        self.rank, self.arguments = dist.get_rank(), arguments
        self.layouts = self.case.source_layout, self.case.destination_layout
        self.plan = plan(*self.layouts, self.rank, ranks_per_node=2)
        self.source, self.destination = (allocate(layout, self.rank, self.case) or None for layout in self.layouts)
        if self.source:
            fill(self.layouts[0], self.rank, self.source, self.case)
        self.generator = torch.Generator().manual_seed(1)

    def run(self) -> dict[str, Any]:
        found = {"wire": self.compare(share_memory=False)}
        if self.arguments.gbit is None:
            found["shared memory"] = self.compare(share_memory=True)
        names = ("params", "dtype", "bucket_mb", "iterations", "gbit")
        settings = {name: getattr(self.arguments, name) for name in names}
        about = {"machine": describe_machine(self.case.device), "gb_per_s": self.bandwidth()}
        return {"benchmark": "weight_sync_delta", **settings, "milliseconds": found, **about}

    def compare(self, *, share_memory: bool) -> dict[str, dict[str, float]]:
        """Returns the medians and the sent bytes, by share."""
        full = self.resharding(share_memory, None)
        remembering = self.resharding(share_memory, DeltaSettings(in_shared_memory=True))
        delta = partial(remembering.run, self.source, self.destination, whole=False)
        whole = partial(remembering.run, self.source, self.destination)
        plain = partial(full.run, self.source, self.destination)
        for run in (plain, whole):
            run()
        rows = {}
        for share in SHARES:
            rivals = {"full": plain, "delta": delta, "delta, full in its turn": whole}
            seconds: dict[str, list[list[float]]] = {name: [] for name in rivals}
            report = self.checked(delta, share)
            for _ in range(self.arguments.iterations):
                self.change(share)
                for name, run in rivals.items():
                    seconds[name].append(self.time(run))
            row: dict[str, float] = {}
            for name, values in seconds.items():
                wall, processor = (1e3 * statistics.median(column) for column in zip(*values, strict=True))
                row |= {name: round(wall, 1), f"{name}, processor": round(processor, 1)}
            row |= {"sent_bytes": report.bytes_moved, "changed_bytes": report.bytes_changed}
            row |= {"full_bytes": report.bytes_compared}
            if report.bytes_encoded >= DENSE_SHARE * report.bytes_compared:
                tried = row["delta"] + row["delta, full in its turn"]
                row["in the long run"] = round((tried + LONGEST_REST * row["full"]) / (LONGEST_REST + 2), 1)
            rows[str(share)] = row
            if self.rank == 0:
                print("shared memory" if share_memory else "wire", share, row, flush=True)
        return rows

    def resharding(self, share_memory: bool, delta: DeltaSettings | None) -> Resharding:
        return Resharding(
            self.plan,
            group=self.case.group,
            cpu_group=self.group,
            bucket_bytes=int(self.arguments.bucket_mb * 2**20),
            device=self.case.device,
            share_memory=share_memory,
            delta=delta,
        )

    def checked(self, delta: Callable[[], SyncReport], share: float) -> SyncReport:
        self.change(share)
        report = delta()
        verify(self.plan, *self.layouts, self.source, self.destination, group=self.group)
        return report

    def bandwidth(self) -> dict[str, float]:
        """Returns GB/s of comparing memory with an equal one by one thread, and of copying it, by the thread's
        processor time.

        Both read the weights once, and read or write as many further bytes.
        """
        changes = changes_on(self.case.device)
        one = torch.zeros(COMPARED_BYTES, dtype=torch.uint8)
        other, rates = torch.zeros_like(one), dict[str, list[float]]()
        for _ in range(self.arguments.iterations):
            begin = time.thread_time()
            for part, kept in zip(one.split(ROUND_BYTES), other.split(ROUND_BYTES), strict=True):
                mark(changes, part, kept, 2)
            compared = time.thread_time()
            other.copy_(one)
            copied = time.thread_time()
            for name, seconds in (("compare", compared - begin), ("copy", copied - compared)):
                rates.setdefault(name, []).append(COMPARED_BYTES / seconds / 1e9)
        return {name: round(statistics.median(values), 2) for name, values in rates.items()}

    def change(self, share: float) -> None:
        for tensor in (self.source or {}).values():
            turn_lowest_bits(tensor, share, self.generator)

    def time(self, run: Callable[[], SyncReport]) -> list[float]:
        """Returns seconds of the slower rank, and the processor seconds of both."""
        dist.barrier(self.group)
        start, worked = time.perf_counter(), time.process_time()
        run()
        elapsed = torch.tensor([time.perf_counter() - start, time.process_time() - worked], dtype=torch.float64)
        found = [torch.empty_like(elapsed) for _ in WORLD]
        dist.all_gather(found, elapsed, group=self.group)
        walls, workeds = torch.stack(found).T
        return [float(walls.max()), float(workeds.sum())]


def turn_lowest_bits(tensor: Tensor, share: float, generator: torch.Generator) -> None:
    bits = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
    if share == 1.0:
        bits ^= 1
    elif share:
        for part in bits.split(2**22):
            part ^= (torch.rand(len(part), generator=generator) < share).to(bits.dtype)


def of_bandwidth(gbit: float | None) -> list[str]:
    """Returns the words before a command that limit its loopback to `gbit` gigabits per second."""
    if gbit is None:
        return []
    # The device carries both directions, each byte once, in packets of 64 KiB.
    shaped = f"tc qdisc add dev lo root tbf rate {gbit}gbit burst 1mb latency 50ms"
    return ["unshare", "--net", "sh", "-c", f'ip link set lo up && {shaped} && exec "$@"', "sh"]


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        print(json.dumps(launch(__file__, len(WORLD), LIMIT_S, of_bandwidth(arguments.gbit))))
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    found = Benchmark(arguments).run()
    if dist.get_rank() == 0:
        arguments.result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
