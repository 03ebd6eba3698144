"""One rank's part of the weight-sync benchmark: builds the rivals, checks what each writes, times them."""

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync_case import (
    Case,
    Groups,
    allocate,
    architecture_of_size,
    fill,
    group_lists,
    parse_count,
    parse_grid,
    parse_ranks,
    spoil,
    wrong_tensors,
)
from weight_sync_rivals import GatherBroadcast, Ours, RawWire, bytes_by_peer
from weight_sync_timing import Rival, describe_machine, milliseconds, time_rounds

from rltrain.reshard.layout import Layout
from rltrain.reshard.plan import RankPlan, plan
from rltrain.runtime.grid import Grid

RIVALS = ("ours", "ours_wire", "refit", "gather_broadcast", "raw", "raw_buckets")
REFIT_NEEDS = ("megatron", "einops", "pydantic")
RATIOS = {
    "ours_over_raw": ("ours", "raw"),
    "ours_wire_over_raw": ("ours_wire", "raw"),
    "refit_over_raw": ("refit", "raw"),
    "refit_over_ours": ("refit", "ours"),
    "gather_broadcast_over_ours": ("gather_broadcast", "ours"),
}


def run_rank(arguments: argparse.Namespace) -> None:
    """Rank 0 writes what was found to arguments.result, or prints it. Collective over: all ranks."""
    torch.set_num_threads(1)
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if dist.get_world_size() != arguments.ranks:
        raise SystemExit(f"--ranks is {arguments.ranks}, but there are {dist.get_world_size()} ranks")
    case = make_case(arguments)
    benchmark = Benchmark(case, arguments)
    found = benchmark.run_overlap() if arguments.overlap_only else benchmark.run()
    if dist.get_rank() == 0:
        text = json.dumps(found)
        if arguments.result:
            arguments.result.write_text(text)
        else:
            print(text)
    dist.destroy_process_group()


def make_case(arguments: argparse.Namespace) -> Case:
    """Collective over: all ranks."""
    source = parse_grid(arguments.src, parse_ranks(arguments.src_ranks, arguments.ranks))
    destination = parse_grid(arguments.dst, parse_ranks(arguments.dst_ranks, arguments.ranks))
    cuda = arguments.device == "cuda"
    groups, cpu_group = make_groups(source, destination, arguments)
    return Case(
        architecture=architecture_of_size(parse_count(arguments.params), source.pp, arguments.experts),
        source=source,
        destination=destination,
        dtype=getattr(torch, arguments.dtype),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        groups=groups,
        cpu_group=cpu_group,
    )


def make_groups(source: Grid, destination: Grid, arguments: argparse.Namespace) -> tuple[Groups, dist.ProcessGroup]:
    """The rivals' groups by their ranks, and all ranks on gloo. Collective over: all ranks."""
    world = tuple(range(arguments.ranks))
    if arguments.ranks == 1:
        alone = dist.group.WORLD
        assert alone is not None, "torch.distributed is initialised"
        return {world: alone}, alone
    from rltrain.runtime.process_groups import ProcessGroups  # needs pydantic, which one rank can do without

    backend = "nccl" if arguments.device == "cuda" else "gloo"
    made = ProcessGroups(group_lists(source, destination), backend=backend, timeout_s=arguments.timeout_s)
    return made.compute, made.cpu[world]


class Benchmark:
    """Source weights on the ranks of --src, destinations on those of --dst, and the rivals between them."""

    def __init__(self, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self.arguments = case, arguments
        self.rank, self.cpu_group = dist.get_rank(), case.cpu_group
        self.layouts = case.source_layout, case.destination_layout
        self.plan: RankPlan = plan(*self.layouts, self.rank, ranks_per_node=arguments.ranks)
        self.sent, self.received, self.local = bytes_by_peer(self.plan, case.union)
        self.bucket_bytes = int(arguments.bucket_mb * 2**20)
        self.source, self.destination = (allocate(layout, self.rank, case) for layout in self.layouts)
        if self.source:
            fill(self.layouts[0], self.rank, self.source, case)
        self.left_out: dict[str, str] = {}
        self.ours: Ours | None = None

    def run(self) -> dict[str, Any]:
        """Collective over: all ranks, as the rest of this class."""
        rivals = self.make_rivals()
        seconds = time_rounds(
            rivals, self.arguments.iterations, self.arguments.warm_up, self.cpu_group, self.case.device
        )
        times = {memory: milliseconds(found) for memory, found in seconds.items()}
        for name in rivals:
            columns = (f"{found[name]['median']:9.1f} ms with {memory} memory" for memory, found in times.items())
            print_once(f"{name:18s}" + "".join(columns))
        for name, reason in self.left_out.items():
            print_once(f"{name:18s} left out: {reason}")
        return {
            "benchmark": "weight_sync",
            **self.describe(),
            "milliseconds": times,
            "ratios": {memory: ratios(found) for memory, found in times.items()},
            "left_out": self.left_out,
            "ours_parts": self.ours.parts() if self.ours else None,
            "machine": describe_machine(self.case.device),
        }

    def run_overlap(self) -> dict[str, Any]:
        """Of pack and wire on GPUs. Every rank must be in --src."""
        from weight_sync_overlap import Overlap

        if not self.is_everywhere(bool(self.source)):
            return {"left_out": "ranks outside --src have nothing to pack"}
        return Overlap(self.case, self.plan, self.source).measure(self.arguments.iterations, self.arguments.warm_up)

    def make_rivals(self) -> dict[str, Rival]:
        """Those asked for that can run here, each found to write the right values."""
        made: dict[str, Rival] = {}
        for name in self.arguments.rivals:
            reason = self.refusal(name)
            if reason:
                self.left_out[name] = reason
            else:
                made[name] = getattr(self, f"make_{name}")()
        return made

    def refusal(self, name: str) -> str | None:
        """Why a rival cannot run here, if so."""
        case, kv_heads = self.case, self.case.architecture.num_kv_heads
        if name == "ours_wire" and (case.device.type != "cpu" or len(case.union) == 1):
            return "ranks share no memory here: it would be the same as ours"
        if name == "refit":
            if case.source.ranks != case.destination.ranks:
                return "swap_model_weights needs both models on every rank"
            missing = [package for package in REFIT_NEEDS if importlib.util.find_spec(package) is None]
            return f"not installed here: {', '.join(missing)}" if missing else None
        if name == "gather_broadcast" and case.architecture.moe:
            return "it is written for layers without experts"
        if name == "gather_broadcast" and max(case.source.tp, case.destination.tp) > kv_heads:
            return "it is written for at most as many tensor-parallel ranks as KV heads"
        return None

    def make_ours(self) -> Rival:
        self.ours = self.make_resharding("ours", share_memory=True)
        return self.ours

    def make_ours_wire(self) -> Rival:
        return self.make_resharding("ours_wire", share_memory=False)

    def make_resharding(self, name: str, *, share_memory: bool) -> Ours:
        source, destination = self.source or None, self.destination or None
        made = Ours(self.case, self.plan, self.bucket_bytes, source, destination, share_memory=share_memory)
        self.check(name, made, self.layouts[1], self.destination)
        return made

    def make_refit(self) -> Rival:
        from weight_sync_refit import Refit  # imports all of training

        refit = Refit(self.case, self.arguments.timeout_s)
        self.check("refit", refit, refit.layout, refit.written)
        return refit

    def make_gather_broadcast(self) -> Rival:
        rival = GatherBroadcast(self.case, self.source, self.destination)
        self.check("gather_broadcast", rival, self.layouts[1], self.destination)
        return rival

    def make_raw(self) -> Rival:
        return RawWire(self.case, self.sent, self.received, self.local, rounds=1)

    def make_raw_buckets(self) -> Rival:
        busiest = self.largest(max(sum(self.sent), sum(self.received)))
        rounds = max(math.ceil(busiest / self.bucket_bytes), 1)
        return RawWire(self.case, self.sent, self.received, self.local, rounds)

    def check(self, name: str, rival: Rival, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Stop the benchmark where `rival` leaves a wrong element in `tensors`, this rank's part of `layout`."""
        spoil(tensors)
        rival()
        wrong = wrong_tensors(layout, self.rank, tensors, self.case) if tensors else []
        if wrong:
            print(f"rank {self.rank}: {name} wrote {len(wrong)} tensors wrong, the first is {wrong[0]}", flush=True)
        if not self.is_everywhere(not wrong):
            raise SystemExit(f"{name} does not move the weights correctly: there is nothing to compare")

    def largest(self, value: int) -> int:
        """The maximum over all ranks."""
        result = torch.tensor([value])
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(result)

    def is_everywhere(self, value: bool) -> bool:
        return not self.largest(not value)

    def describe(self) -> dict[str, Any]:
        """The settings, and the busiest ranks' bytes."""
        arguments, model = self.arguments, self.case.architecture
        names = ("ranks", "src", "dst", "src_ranks", "dst_ranks", "dtype", "bucket_mb", "iterations", "device")
        shapes = self.layouts[0].tensors.shapes
        return {
            **{name: getattr(arguments, name) for name in names},
            "num_parameters": sum(math.prod(shape) for shape in shapes),
            "model": {"layers": model.num_layers, "hidden": model.hidden_size, "vocab": model.vocab_size},
            "bytes_per_rank": {
                "sent": self.largest(sum(self.sent)),
                "received": self.largest(sum(self.received)),
                "local": self.largest(self.local),
            },
            "refit_destination": "Megatron's layout",
        }


def ratios(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """Of the medians, where both rivals ran."""
    return {
        name: round(times[first]["median"] / times[second]["median"], 3)
        for name, (first, second) in RATIOS.items()
        if first in times and second in times
    }


def print_once(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
