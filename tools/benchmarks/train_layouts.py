"""Seconds per optimizer step of one model in several parallel layouts, side by side on the same ranks.

    torchrun --standalone --nproc-per-node 4 tools/benchmarks/train_layouts.py --layouts dp4,tp4,tp2,pp2,cp2
    torchrun --standalone --nproc-per-node 4 tools/benchmarks/train_layouts.py --experts 8 --layouts dp4,ep4,tp2.ep4

A layout such as tp2.pp2 says how the model is cut; data parallelism takes up the ranks that are left, so that every
layout trains on the same samples in all. Each repeat times every layout once, in turn first; reported are medians of
the slowest rank. The last line is one JSON object. Sizes are options, as of train_step.py, whose model it is.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import train_step
from weight_sync_timing import describe_machine

from rltrain.algorithms.losses import likelihood_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import Architecture, ExpertLayers
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.backend import TrainableModel
from rltrain.training.megatron.model import build_model

SIZES = ("dp", "tp", "pp", "cp", "ep", "etp")


def parse_layout(text: str, num_ranks: int) -> Grid:
    """ValueError where it is none, or does not fit on the ranks."""
    sizes: dict[str, Any] = {}
    for part in text.split("."):
        name, size = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if name not in SIZES or not size.isdigit():
            raise ValueError(f"{text!r} is no layout: write dp4, tp2.pp2 or tp2.ep4.etp1")
        sizes[name] = int(size)
    replicas = sizes.pop("dp", None)
    grid = Grid(tuple(range(num_ranks)), **sizes)
    if num_ranks % (grid.tp * grid.pp * grid.cp) or replicas not in (None, grid.dp):
        raise ValueError(f"{text} does not fit on {num_ranks} ranks")
    return grid


class Layouts:
    """One model, in training in each of `grids` by name."""

    def __init__(self, arguments: argparse.Namespace, grids: dict[str, Grid], device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        lists = sorted({ranks for grid in grids.values() for ranks in group_lists({"actor": grid})})
        self.groups = ProcessGroups(lists, backend=backend, timeout_s=120)
        self.arguments, self.device, self.architecture = arguments, device, architecture_of(arguments)
        self.whole = train_step.make_experience(arguments, seed=0)
        self.trained = {name: self._trained(grid) for name, grid in grids.items()}
        self.shares = {name: self._share(grid) for name, grid in grids.items()}

    def step(self, name: str) -> float:
        return self.trained[name].train_batch(self.shares[name], likelihood_loss())["loss"]

    def _trained(self, grid: Grid) -> TrainableModel:
        model = build_model(
            self.architecture,
            grid,
            self.groups,
            model=schema.Model(path="", dtype=self.arguments.dtype),
            parallel=schema.Parallel(tp=grid.tp, pp=grid.pp, cp=grid.cp, ep=grid.ep, etp=grid.etp),
            device=self.device,
        )
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        settings = schema.Actor(
            optimizer=schema.Optimizer(lr=train_step.LEARNING_RATE),
            micro_batch_tokens=self.arguments.micro_batch_tokens,
        )
        return TrainableModel(model, settings, total_updates=self.arguments.repeats)

    def _share(self, grid: Grid) -> Experience:
        first = grid.coordinates(dist.get_rank()).dp
        return self.whole.select(torch.arange(first, self.whole.num_samples, grid.dp))


def architecture_of(arguments: argparse.Namespace) -> Architecture:
    dense = train_step.architecture_of(arguments)
    if not arguments.experts:
        return dense
    moe = ExpertLayers(arguments.experts, top_k=2, ffn_hidden_size=arguments.ffn // 2)
    return replace(dense, family="qwen3_moe", moe=moe)


def main() -> None:
    parser = train_step.parser(__doc__.splitlines()[0])
    parser.add_argument("--layouts", default="dp4,tp4,tp2,pp2,cp2")
    parser.add_argument("--experts", type=int, default=0, help="of every layer; each token visits two")
    arguments = parser.parse_args()
    device = train_step.join_ranks()
    grids = {name: parse_layout(name, dist.get_world_size()) for name in arguments.layouts.split(",")}
    layouts = Layouts(arguments, grids, device)
    steps: dict[str, Callable[[], Any]] = {name: partial(layouts.step, name) for name in grids}
    seconds = train_step.time_steps(steps, arguments.repeats, device)
    if dist.get_rank() == 0:
        for name, value in seconds.items():
            print(f"{name:16s} {1e3 * value:9.1f} ms per step {layouts.whole.num_tokens / value:12.0f} tokens/s")
        print(
            json.dumps(
                {
                    "benchmark": "train_layouts",
                    "seconds": {name: round(value, 6) for name, value in seconds.items()},
                    "tokens_per_step": layouts.whole.num_tokens,
                    "settings": vars(arguments),
                    "machine": describe_machine(device),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
