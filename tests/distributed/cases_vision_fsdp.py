"""The ranks of test_vision_fsdp: tiny vision-language models under fully_shard on two ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rltrain.config import schema
from rltrain.models.vision import Tower
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.fsdp_backend import ShardedTrainableModel
from tests.support.packed_experience import plain_experience
from tests.support.sharded_models import seeing_in_training, shard_differences
from tests.support.trained_models import groups_on
from tests.support.vision_checkpoints import write_checkpoint, write_gradients
from tests.support.vision_samples import SAMPLES, experience_of, for_transformers, open_store, summed_logprobs

ALONE, TOGETHER = 1, 10_000
"""Tokens of a micro-batch: one sample each, or all of them."""
ALL = tuple(range(len(SAMPLES)))


@dataclass(frozen=True)
class Way:
    """The numbers of the samples of each rank, and settings of the model."""

    samples: tuple[tuple[int, ...], ...] = ((0, 2, 3), (1, 4, 5))
    kind: Tower = "qwen3_vl"
    cp: int = 1
    max_tokens: int = ALONE
    vision: dict[str, Any] = field(default_factory=dict)
    copies: int = 1

    @property
    def grid(self) -> Grid:
        return Grid((0, 1), cp=self.cp, copies=self.copies)


WAYS = {
    "uneven": Way(vision={"max_patches": 50}),
    "text_on_one_rank": Way(((0, 2, 3, 5), (1, 4)), kind="qwen2_5_vl", max_tokens=TOGETHER),
    "nothing_on_one_rank": Way((ALL, ())),
    "graph_kept": Way(vision={"max_patches": 50, "recompute": False}),
    "copies": Way(copies=2),
    "cp2": Way((ALL, ALL), cp=2, max_tokens=TOGETHER),
    "cp2_qwen2_5_vl": Way((ALL, ALL), kind="qwen2_5_vl", cp=2),
    "experts": Way(kind="qwen3_vl_moe"),
}
"""Ways to compute all of SAMPLES. With context parallelism both ranks share them."""


def comparisons(folder: str, names: list[str]) -> dict[str, Any]:
    """Returns the differences of log-probs and gradients from those of transformers."""
    rank, place = dist.get_rank(), Path(folder)
    ways = {name: WAYS[name] for name in names}
    groups = groups_on([way.grid for way in ways.values()])
    kinds = sorted({way.kind for way in ways.values()})
    if rank == 0:
        for kind in kinds:
            write_checkpoint(place / kind, kind)
    dist.barrier()
    # transformers writes on the first rank alone.
    expected = {
        kind: write_gradients(place / kind, place / f"{kind}.gradients", for_transformers(SAMPLES)) for kind in kinds
    }
    dist.barrier()
    store, seen = open_store(place, rank), dict[str, Any]()
    for name, way in ways.items():
        chosen = way.samples[rank]
        vision = schema.VisionSettings(**way.vision)
        model = seeing_in_training(place / way.kind, way.grid, groups, store, max_tokens=way.max_tokens, vision=vision)
        samples = experience_of(SAMPLES).select(torch.tensor(chosen, dtype=torch.int64))
        wanted = [expected[way.kind][number] for number in chosen]
        found = model.evaluate(samples, max_tokens=way.max_tokens)
        gradients = shard_differences(model, place / f"{way.kind}.gradients", samples, summed_logprobs)
        differences = [one - two for one, two in zip(found.split(samples.lengths.tolist()), wanted, strict=True)]
        seen[name] = {
            "logprobs": max((float(one.abs().max()) for one in differences), default=0.0),
            "gradients": gradients,
            "of_text": _of_text(model) if name == "uneven" else None,
        }
        if name == "nothing_on_one_rank":
            seen["kept"] = _kept(place / way.kind, way, groups, store, expected[way.kind])
    store.close()
    return seen


def _kept(
    folder: Path, way: Way, groups: ProcessGroups, store: ImageStore, expected: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Returns the numbers of encoded images in passes of a frozen tower, and the largest difference of a log-prob.

    The second rank has no images in the first pass, and those of the first rank in the others.
    """
    encoded: list[int] = []
    model = seeing_in_training(
        *(folder, way.grid, groups, store),
        max_tokens=ALONE,
        vision=schema.VisionSettings(train=False, max_patches=50),
        on_images=lambda grids, backward: encoded.append(len(grids)),
        is_constant=True,
    )
    differences = []
    for passed in range(3):
        samples = experience_of(SAMPLES).select(torch.tensor([] if dist.get_rank() and not passed else ALL).long())
        found = model.evaluate(samples, max_tokens=ALONE).split(samples.lengths.tolist())
        differences += [float((one - two).abs().max()) for one, two in zip(found, expected, strict=False)]
    return {"encoded": encoded, "logprobs": max(differences)}


def _of_text(model: ShardedTrainableModel) -> list[str]:
    """Returns the parameters of the tower with a gradient after a pass over text. One rank's samples have no fields of
    images."""
    model.forget_gradients()
    samples = experience_of([SAMPLES[1]])
    if dist.get_rank() == 1:
        samples = plain_experience(samples.lengths.tolist(), samples.tokens)
    model.accumulate(samples, summed_logprobs)
    named = model.model.named_learned().items()
    return [name for name, parameter in named if parameter.grad is not None and "visual" in name]
