"""Seconds of an optimizer step and bytes of its states, by optimizer settings, side by side on the same ranks.

    torchrun --standalone --nproc-per-node 2 tools/benchmarks/optimizers.py [--hidden 512 --layers 8 ...]

All train equal copies of one model on the same samples, in replicas with a distributed optimizer. Each repeat times
every setting once, in turn first; reported are medians of the slowest rank, of the whole update and of the step alone,
behind the reduction of gradients and before the gathering of weights. Where the device is the host, what goes to the
host is copied all the same, and nothing overlaps. The last line is one JSON object. Sizes are options, as of
train_step.py, whose model it is.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import train_step
from weight_sync_timing import describe_machine

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import build_model
from rltrain.training.megatron.optimizer import members

SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "moments_dtype: bfloat16": {"moments_dtype": "bfloat16"},
    "cpu_offload: true": {"cpu_offload": True},
    "both": {"cpu_offload": True, "moments_dtype": "bfloat16"},
    "name: muon": {"name": "muon"},
    "muon, bfloat16": {"name": "muon", "moments_dtype": "bfloat16"},
    "activation_offload": {},
}
PARTS = ("master_weights", "optimizer")


class Variant:
    """One model in training, which notes how long its optimizer's own steps take."""

    def __init__(self, name: str, arguments: Any, groups: ProcessGroups, grid: Grid, device: torch.device) -> None:
        model = build_model(
            train_step.architecture_of(arguments),
            grid,
            groups,
            model=schema.Model(path="", dtype=arguments.dtype, activation_offload=name == "activation_offload"),
            parallel=schema.Parallel(),
            device=device,
        )
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        settings = schema.Actor(
            optimizer=schema.Optimizer(lr=train_step.LEARNING_RATE, **SETTINGS[name]),
            micro_batch_tokens=arguments.micro_batch_tokens,
        )
        self.trained = TrainableModel(model, settings, total_updates=1000)
        self.device = device
        self.seconds: list[float] = []
        for member in members(self.trained.optimizer):
            member.optimizer.step = partial(self._timed, member.optimizer.step)
        whole = train_step.make_experience(arguments, seed=0)
        self.share = whole.select(torch.arange(dist.get_rank(), whole.num_samples, grid.dp))

    def update(self) -> None:
        self.trained.train_batch(self.share, likelihood_loss())

    def bytes_of(self) -> tuple[int, int]:
        """Of masters and states, on the device and on the host."""
        parts = [self.trained.parts[name] for name in PARTS]
        return sum(part.device_bytes for part in parts), sum(part.host_bytes for part in parts)

    def _timed(self, step: Callable[[], None]) -> None:
        self._finish()
        start = time.perf_counter()
        step()
        self._finish()
        self.seconds.append(time.perf_counter() - start)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    arguments = train_step.parser(__doc__.splitlines()[0]).parse_args()
    device = train_step.join_ranks()
    grid = Grid(tuple(range(dist.get_world_size())))
    groups = ProcessGroups(group_lists({"actor": grid}), backend=dist.get_backend(), timeout_s=120)
    variants = {name: Variant(name, arguments, groups, grid, device) for name in SETTINGS}
    updates = train_step.time_steps(
        {name: variant.update for name, variant in variants.items()}, arguments.repeats, device
    )
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, variant in variants.items():
        step = torch.tensor(median(variant.seconds[1:]), dtype=torch.float64, device=device)
        dist.all_reduce(step, dist.ReduceOp.MAX)
        on_device, on_host = variant.bytes_of()
        found[name] = {"update_s": updates[name], "step_s": float(step), "device": on_device, "host": on_host}
    if dist.get_rank() == 0:
        for name, one in found.items():
            print(
                f"{name:26s} update {1e3 * one['update_s']:8.1f} ms, step {1e3 * one['step_s']:8.1f} ms, "
                f"{one['device'] / 1e6:8.1f} MB on the device, {one['host'] / 1e6:8.1f} MB on the host"
            )
        report = {"benchmark": "optimizers", "found": found, "settings": vars(arguments)}
        print(json.dumps({**report, "machine": describe_machine(device)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
