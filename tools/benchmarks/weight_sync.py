"""Measures milliseconds per weight sync of rltrain and of other ways, side by side on one model.

    python tools/benchmarks/weight_sync.py --ranks 2 --src tp2 --dst tp1 --params 100m
    python tools/benchmarks/weight_sync.py --ranks 4 --src tp2.ep4.etp1 --dst tp2 --experts 32
    python tools/benchmarks/weight_sync.py --ranks 4 --src tp2.pp2 --dst tp1 [--dtype bfloat16] [--bucket-mb 32] ...

Starts its own ranks on this machine, connected over loopback. With --device cuda they are on its GPUs, connected by
NCCL. --src is Megatron's layout and --dst the engine's. Each is on all ranks unless --src-ranks and --dst-ranks say
otherwise ("0-1"). Remaining ranks hold replicas. The rivals:

- ours: Resharding.run, from Megatron's parameters into the engine's. Ranks on CPUs read each other's memory.
- ours_wire: the same over the wire only, as between nodes.
- refit: megatron-core's swap_model_weights. It supports only Megatron's layouts, so the destination is a second
  Megatron
  model of layout --dst, without the engine's fused parameters.
- raw: one all-to-all of as many bytes between the same ranks, from plain buffers. It is the bound. With one rank it is
  one copy of the same bytes.

Each round times every rival once and rotates their order, so other load on the machine affects all alike. Medians of
the slowest rank are reported. Before that each rival writes into overwritten parameters, and these are compared with
the checkpoint's values. The last line is one JSON object.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from weight_sync_case import (
    Case,
    Rival,
    allocate,
    architecture_of_size,
    describe_machine,
    fill,
    milliseconds,
    parse_count,
    parse_grid,
    parse_ranks,
    spoil,
    time_rounds,
    wrong_tensors,
)

from rltrain.models.table import ITEM_BYTES, wire_types
from rltrain.reshard.layout import Layout, elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import RankPlan, plan
from rltrain.runtime.grid import Grid

RIVALS = ("ours", "ours_wire", "refit", "raw")
REFIT_NEEDS = ("megatron", "einops", "pydantic")
RATIOS = {
    "ours_over_raw": ("ours", "raw"),
    "ours_wire_over_raw": ("ours_wire", "raw"),
    "refit_over_raw": ("refit", "raw"),
    "refit_over_ours": ("refit", "ours"),
}


class Ours:
    """Resharding.run, set up once. `share_memory` is True within a node and False between nodes."""

    def __init__(
        self,
        case: Case,
        plan: RankPlan,
        bucket_bytes: int,
        source: Mapping[str, Tensor] | None,
        destination: Mapping[str, Tensor] | None,
        *,
        share_memory: bool,
    ) -> None:
        from rltrain.reshard.execute import Resharding

        self.source, self.destination = source, destination
        self.resharding = Resharding(
            plan,
            group=case.group if dist.get_world_size() > 1 else None,
            cpu_group=case.cpu_group if dist.get_world_size() > 1 else None,
            bucket_bytes=bucket_bytes,
            device=case.device,
            share_memory=share_memory,
        )
        self.reports: list[dict[str, Any]] = []

    def __call__(self) -> None:
        self.reports.append(asdict(self.resharding.run(self.source, self.destination)))

    def parts(self) -> dict[str, float]:
        """Returns medians of this rank's reports."""
        numbers = [name for name, value in self.reports[-1].items() if isinstance(value, int | float)]
        return {name: statistics.median(report[name] for report in self.reports) for name in numbers}


class RawWire:
    """One all-to-all of as many bytes between the same ranks as in a plan, between plain buffers.

    With one rank it is one copy of as many bytes as the plan copies.
    """

    def __init__(self, case: Case, sent: list[int], received: list[int], local: int) -> None:
        """`sent` and `received` are bytes by rank."""
        self.group, self.sent, self.received = case.group, sent, received
        # Buffers are written here, so no page is touched first during the measurement.
        self.outgoing, self.incoming = (
            torch.zeros(sum(sizes) or local, dtype=torch.uint8, device=case.device) for sizes in (sent, received)
        )

    def __call__(self) -> None:
        if dist.get_world_size() == 1:
            self.incoming.copy_(self.outgoing)
            return
        outgoing, incoming = self.outgoing[: sum(self.sent)], self.incoming[: sum(self.received)]
        dist.all_to_all_single(incoming, outgoing, self.received, self.sent, group=self.group)


def bytes_by_peer(plan: RankPlan, num_ranks: int) -> tuple[list[int], list[int], int]:
    """Returns the bytes that this rank sends to each rank, those it receives from each, and those it copies locally."""
    wire = wire_types(plan.source_types, plan.destination_types)
    sent, received = ([0] * num_ranks for _ in range(2))
    for stage, types in ((plan.direct, wire), (plan.fan_out, plan.destination_types)):
        for moved, boxes in ((sent, stage.sends), (received, stage.receives)):
            sizes = elements(boxes) * ITEM_BYTES[types[boxes["tensor"]]]
            for peer, size in zip(boxes["peer"].tolist(), sizes.tolist(), strict=True):
                moved[peer] += size
    local = int((elements(plan.copies) * ITEM_BYTES[plan.destination_types[plan.copies["tensor"]]]).sum())
    return sent, received, local


class Refit:
    """Reshards between real Megatron models on the case's grids. The first call makes the plan and keeps it."""

    def __init__(self, case: Case, timeout_s: float) -> None:
        """Imports all of training. Collective over: all ranks."""
        from megatron.core.resharding.refit import swap_model_weights

        from rltrain.runtime.placement import model_group_lists
        from rltrain.runtime.process_groups import ProcessGroups
        from rltrain.training.megatron.model import local_parameters

        self.swap = swap_model_weights
        self.cuda = case.device.type == "cuda"
        grids = (case.source, case.destination)
        lists = {ranks for grid in grids for field in model_group_lists(grid).values() for ranks in field}
        ordered = sorted(lists, key=lambda ranks: (len(ranks), ranks))
        groups = ProcessGroups(ordered, backend="nccl" if self.cuda else "gloo", timeout_s=timeout_s)
        self.source, self.destination = (_build(case, grid, groups) for grid in grids)
        fill(case.source_layout, dist.get_rank(), local_parameters(self.source), case)
        self.written = local_parameters(self.destination)
        self.layout: Layout = megatron_layout(case.architecture, case.destination, dtype=case.dtype_name)
        for model in (self.source, self.destination):
            _name_as_grouped(model)

    def __call__(self) -> None:
        if self.cuda:
            self.swap(self.source.chunks[0], self.destination.chunks[0], "nccl")
            return
        with _no_cuda_streams():
            self.swap(self.source.chunks[0], self.destination.chunks[0], "gloo")


def _build(case: Case, grid: Grid, groups: Any) -> Any:
    from rltrain.config import schema
    from rltrain.training.megatron.model import build_model, local_parameters

    model = build_model(
        case.architecture,
        grid,
        groups,
        model=schema.Model.model_validate({"path": "", "dtype": case.dtype_name, "transformer_impl": "local"}),
        parallel=schema.Parallel(tp=grid.tp, pp=grid.pp, ep=grid.ep, etp=grid.etp),
        device=case.device,
    )
    for name, parameter in local_parameters(model).items():
        if name.endswith("linear_fc1.weight"):
            # Megatron sets this when it initialises weights itself: a shard is its part of the gate, then of the up
            # projection. Without it the refit would mix the two.
            parameter.partition_stride = 2  # type: ignore[attr-defined]
    return model


def _name_as_grouped(model: Any) -> None:
    """Renames the experts' parameters as in Transformer Engine's grouped layers. The refit finds experts by these
    names."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for module in model.modules():
        if isinstance(module, MoELayer):
            experts, grouped = module.experts, torch.nn.Module()
            for name in ("linear_fc1", "linear_fc2"):
                layer = torch.nn.Module()
                for number, expert in enumerate(experts.local_experts):
                    layer.register_parameter(f"weight{number}", getattr(expert, name).weight)
                grouped.add_module(name, layer)
            module.experts = grouped


@contextlib.contextmanager
def _no_cuda_streams() -> Iterator[None]:
    """Replaces CUDA streams and pinned memory. The refit's copy service creates them even without CUDA."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    empty = torch.empty

    def made(*arguments: Any) -> Any:
        return stream

    def unpinned(*arguments: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*arguments, **settings)

    context = contextlib.nullcontext
    cuda = mock.patch.multiple(torch.cuda, Stream=made, current_stream=made, stream=context, synchronize=made)
    with cuda, mock.patch.object(torch, "empty", unpinned):
        yield


class Benchmark:
    """Source weights on the ranks of --src, destinations on those of --dst, and the rivals between them."""

    def __init__(self, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self.arguments = case, arguments
        self.rank, self.cpu_group = dist.get_rank(), case.cpu_group
        self.layouts = case.source_layout, case.destination_layout
        self.plan: RankPlan = plan(*self.layouts, self.rank, ranks_per_node=arguments.ranks)
        self.sent, self.received, self.local = bytes_by_peer(self.plan, dist.get_world_size())
        self.source, self.destination = (allocate(layout, self.rank, case) for layout in self.layouts)
        if self.source:
            fill(self.layouts[0], self.rank, self.source, case)
        self.left_out: dict[str, str] = {}
        self.ours: Ours | None = None

    def run(self) -> dict[str, Any]:
        """Runs the benchmark. Collective over: all ranks, like the rest of this class."""
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

    def make_rivals(self) -> dict[str, Rival]:
        """Returns the requested rivals that can run here, after checking the values they write."""
        made: dict[str, Rival] = {}
        for name in self.arguments.rivals:
            reason = self.refusal(name)
            if reason:
                self.left_out[name] = reason
            else:
                made[name] = getattr(self, f"make_{name}")()
        return made

    def refusal(self, name: str) -> str | None:
        """Returns the reason if a rival cannot run here, else None."""
        case = self.case
        if name == "ours_wire" and (case.device.type != "cpu" or dist.get_world_size() == 1):
            return "ranks share no memory here, so it equals ours"
        if name == "refit":
            if case.source.ranks != case.destination.ranks:
                return "swap_model_weights needs both models on every rank"
            missing = [package for package in REFIT_NEEDS if importlib.util.find_spec(package) is None]
            return f"not installed here: {', '.join(missing)}" if missing else None
        return None

    def make_ours(self) -> Rival:
        self.ours = self.make_resharding("ours", share_memory=True)
        return self.ours

    def make_ours_wire(self) -> Rival:
        return self.make_resharding("ours_wire", share_memory=False)

    def make_resharding(self, name: str, *, share_memory: bool) -> Ours:
        source, destination = self.source or None, self.destination or None
        bucket_bytes = int(self.arguments.bucket_mb * 2**20)
        made = Ours(self.case, self.plan, bucket_bytes, source, destination, share_memory=share_memory)
        self.check(name, made, self.layouts[1], self.destination)
        return made

    def make_refit(self) -> Rival:
        refit = Refit(self.case, self.arguments.timeout_s)
        self.check("refit", refit, refit.layout, refit.written)
        return refit

    def make_raw(self) -> Rival:
        return RawWire(self.case, self.sent, self.received, self.local)

    def check(self, name: str, rival: Rival, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Ends the benchmark if `rival` writes a wrong element into `tensors`, this rank's part of `layout`."""
        spoil(tensors)
        rival()
        wrong = wrong_tensors(layout, self.rank, tensors, self.case) if tensors else []
        if wrong:
            print(f"rank {self.rank}: {name} wrote {len(wrong)} tensors wrong, the first is {wrong[0]}", flush=True)
        if not self.is_everywhere(not wrong):
            raise SystemExit(f"{name} does not move the weights correctly, so its time means nothing")

    def largest(self, value: int) -> int:
        """Returns the maximum over all ranks."""
        result = torch.tensor([value])
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self.cpu_group)
        return int(result)

    def is_everywhere(self, value: bool) -> bool:
        return not self.largest(not value)

    def describe(self) -> dict[str, Any]:
        """Returns the settings and the largest number of bytes of a rank."""
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
    """Returns the ratios of medians, if both rivals ran."""
    return {
        name: round(times[first]["median"] / times[second]["median"], 3)
        for name, (first, second) in RATIOS.items()
        if first in times and second in times
    }


def print_once(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run_rank(arguments: argparse.Namespace) -> None:
    """Runs the benchmark as a rank. Rank 0 writes the result to arguments.result or prints it. Collective over: all
    ranks."""
    torch.set_num_threads(1)
    cuda = arguments.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if dist.get_world_size() != arguments.ranks:
        raise SystemExit(f"--ranks is {arguments.ranks}, but there are {dist.get_world_size()} ranks")
    found = Benchmark(make_case(arguments), arguments).run()
    if dist.get_rank() == 0:
        text = json.dumps(found)
        if arguments.result:
            arguments.result.write_text(text)
        else:
            print(text)
    dist.destroy_process_group()


def make_case(arguments: argparse.Namespace) -> Case:
    """Returns the case for the arguments. Collective over: all ranks."""
    source = parse_grid(arguments.src, parse_ranks(arguments.src_ranks, arguments.ranks))
    destination = parse_grid(arguments.dst, parse_ranks(arguments.dst_ranks, arguments.ranks))
    cuda = arguments.device == "cuda"
    group, cpu_group = make_groups(arguments)
    return Case(
        architecture=architecture_of_size(parse_count(arguments.params), source.pp, arguments.experts),
        source=source,
        destination=destination,
        dtype=getattr(torch, arguments.dtype),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        group=group,
        cpu_group=cpu_group,
    )


def make_groups(arguments: argparse.Namespace) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns two groups of all ranks, the second one on gloo. Collective over: all ranks."""
    if arguments.ranks == 1:
        alone = dist.group.WORLD
        assert alone is not None, "torch.distributed is initialised"
        return alone, alone
    from rltrain.runtime.process_groups import ProcessGroups  # needs pydantic; one rank does not

    world = tuple(range(arguments.ranks))
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    made = ProcessGroups([world], backend=backend, timeout_s=arguments.timeout_s)
    return made.compute[world], made.cpu[world]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: 2, or with --device cuda the number of GPUs")
    parser.add_argument("--src", help="layout of training, such as tp2.pp2; default: tp2, or tp1 on one rank")
    parser.add_argument("--dst", default="tp1", help="layout of inference, such as tp1")
    parser.add_argument("--src-ranks", default="", help="such as 0-1; default: all ranks")
    parser.add_argument("--dst-ranks", default="", help="such as 2-3; default: all ranks")
    parser.add_argument("--params", default="100m", help="about how many parameters, such as 100m or 1.5b")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts per layer, such as 32; layouts then have ep and etp"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bucket-mb", type=float, default=32)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rivals", default=",".join(RIVALS), help="the rivals, separated by commas")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout-s", type=float, default=600, help="limit of each run of ranks")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # where rank 0 writes the JSON
    arguments = parser.parse_args()
    arguments.rivals = [name for name in arguments.rivals.split(",") if name]
    if unknown := set(arguments.rivals) - set(RIVALS):
        parser.error(f"--rivals has {', '.join(sorted(unknown))}; known are {', '.join(RIVALS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use; this machine has none")
    if arguments.ranks is None:
        arguments.ranks = torch.cuda.device_count() if arguments.device == "cuda" else 2
    if arguments.device == "cuda" and arguments.ranks > torch.cuda.device_count():
        parser.error(
            f"--ranks {arguments.ranks}: there are {torch.cuda.device_count()} GPUs, and NCCL needs one per rank"
        )
    arguments.src = arguments.src or ("tp2" if arguments.ranks > 1 else "tp1")
    _check_layouts(parser, arguments)
    return arguments


def _check_layouts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        source, destination = (
            parse_ranks(text, arguments.ranks) for text in (arguments.src_ranks, arguments.dst_ranks)
        )
        parse_grid(arguments.src, source)
        parse_grid(arguments.dst, destination)
        if idle := set(range(arguments.ranks)) - {*source, *destination}:
            raise ValueError(f"ranks {sorted(idle)} are neither in --src-ranks nor in --dst-ranks")
        if "pp" in arguments.dst:
            raise ValueError(f"--dst {arguments.dst}: engines are split only by tensor parallelism")
        parse_count(arguments.params)
    except ValueError as error:
        parser.error(str(error))


def launch(file: str, num_ranks: int, timeout_s: float, before: Sequence[str] = ()) -> dict[str, Any]:
    """Runs `file` on its own ranks with this process's options, after the words `before`. Returns rank 0's result."""
    repository = Path(__file__).resolve().parents[2]
    python_path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    # Dependencies print long warnings about optional packages.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    environment = {**defaults, **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*before, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", file, *sys.argv[1:], f"--result={result}"]
        with subprocess.Popen(command, env=environment) as torchrun:
            try:
                status = torchrun.wait(timeout_s)
            except subprocess.TimeoutExpired:
                torchrun.terminate()  # it ends its ranks first
                raise SystemExit(f"not done after {timeout_s:g} s") from None
        if status:
            raise SystemExit(f"a rank failed; its message is above (torchrun ended with status {status})")
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    arguments = parse_arguments()
    if "RANK" in os.environ:
        run_rank(arguments)
    else:
        print(json.dumps(launch(__file__, arguments.ranks, arguments.timeout_s)))


if __name__ == "__main__":
    main()
