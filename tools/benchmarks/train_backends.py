"""Seconds per optimizer step of one model under both training backends, side by side on the same ranks.

    torchrun --standalone --nproc-per-node 4 tools/benchmarks/train_backends.py \
        --layouts megatron.dp4,fsdp.dp4,fsdp.keep,fsdp.copies2,megatron.tp2,megatron.cp2,fsdp.cp2

As train_layouts.py, whose layouts follow the backend's name; of fsdp there are dp and cp, keep (weights stay whole
between forward and backward) and copies (of the model, among whose ranks each is sharded). Bytes of parameters,
gradients and optimizer states that the first rank holds are reported beside the seconds.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_layouts
import train_step
from weight_sync_timing import describe_machine

from rltrain.config import schema
from rltrain.runtime.grid import Grid
from rltrain.training.fsdp_backend import ShardedTrainableModel
from rltrain.training.fsdp_model import ShardedModel

KEEP = "keep"


@dataclass(frozen=True)
class ShardedGrid(Grid):
    """Of backend fsdp."""

    keeps_whole: bool = False


def parse_way(text: str, num_ranks: int) -> Grid:
    """ValueError where it is none, or does not fit on the ranks."""
    backend, *parts = text.split(".")
    copies = next((int(part.removeprefix("copies")) for part in parts if part.startswith("copies")), 1)
    cut = [part for part in parts if part != KEEP and not part.startswith("copies")]
    grid = train_layouts.parse_layout(".".join(cut or ["tp1"]), num_ranks)
    if backend == "megatron":
        return grid
    if backend != "fsdp" or grid.tp * grid.pp * grid.ep > 1 or num_ranks % copies:
        raise ValueError(f"{text!r} is no way to train: write megatron.tp2 or fsdp.cp2")
    return ShardedGrid(grid.ranks, cp=grid.cp, copies=copies, keeps_whole=KEEP in parts)


class Backends(train_layouts.Layouts):
    """One model, in training by each of `grids`; its config.json lies in `folder`."""

    def __init__(
        self, arguments: argparse.Namespace, grids: dict[str, Grid], device: torch.device, folder: Path
    ) -> None:
        self.folder = folder
        super().__init__(arguments, grids, device)

    def _trained(self, grid: Grid) -> Any:
        if not isinstance(grid, ShardedGrid):
            return super()._trained(grid)
        model = ShardedModel(
            self.architecture,
            grid,
            self.groups,
            folder=self.folder,
            model=schema.Model(path=str(self.folder), dtype=self.arguments.dtype),
            fsdp=schema.Fsdp(replicas=grid.copies or 1, reshard_after_forward=not grid.keeps_whole),
            device=self.device,
            trains=True,
        )
        torch.manual_seed(0)
        for shard in model.weights.values():
            shard.fill_(1.0) if shard.dim() == 1 else shard.normal_(std=0.02)
        settings = schema.Actor(
            optimizer=schema.Optimizer(lr=train_step.LEARNING_RATE),
            micro_batch_tokens=self.arguments.micro_batch_tokens,
        )
        return ShardedTrainableModel(model, settings, total_updates=self.arguments.repeats)


def write_config(arguments: argparse.Namespace, folder: Path) -> None:
    """That of the model, for transformers."""
    from transformers import Qwen3Config

    architecture = train_step.architecture_of(arguments)
    Qwen3Config(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        intermediate_size=architecture.ffn_hidden_size,
        max_position_embeddings=architecture.max_positions,
        tie_word_embeddings=False,
    ).save_pretrained(folder)


def held_bytes(trained: Any) -> int:
    """Of weights, gradients and optimizer on this rank, once it has made a step."""
    return sum(part.size_bytes for part in trained.parts.values())


def main() -> None:
    parser = train_step.parser(__doc__.splitlines()[0])
    parser.add_argument("--layouts", default="megatron.dp4,fsdp.dp4,fsdp.keep")
    arguments = parser.parse_args()
    arguments.experts = 0
    device = train_step.join_ranks()
    grids = {name: parse_way(name, dist.get_world_size()) for name in arguments.layouts.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        write_config(arguments, Path(folder))
        backends = Backends(arguments, grids, device, Path(folder))
    steps: dict[str, Callable[[], Any]] = {name: partial(backends.step, name) for name in grids}
    seconds = train_step.time_steps(steps, arguments.repeats, device)
    if dist.get_rank() == 0:
        held = {name: held_bytes(trained) for name, trained in backends.trained.items()}
        for name, value in seconds.items():
            print(
                f"{name:16s} {1e3 * value:9.1f} ms per step {backends.whole.num_tokens / value:12.0f} tokens/s "
                f"{held[name] / 1e6:9.2f} MB held"
            )
        print(
            json.dumps(
                {
                    "benchmark": "train_backends",
                    "seconds": {name: round(value, 6) for name, value in seconds.items()},
                    "held_bytes": held,
                    "tokens_per_step": backends.whole.num_tokens,
                    "settings": vars(arguments),
                    "machine": describe_machine(device),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
