"""What a model that is sharded over all ranks of its role holds, and has whole for a while (backend fsdp)."""

import re
from collections import Counter
from functools import lru_cache
from math import prod

from rltrain.estimate.links import GridLinks
from rltrain.estimate.planned import PlannedJob
from rltrain.models import Architecture, canonical_tensors
from rltrain.models.lora import A
from rltrain.reshard.fsdp_layout import fsdp_layout, whole_parameters
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import trained_roles

FP32 = 4
MOMENTS = 2
LAYERS_AT_ONCE = 2
"""That are whole: one is gathered while another computes."""
LAYER = re.compile(r".*?\.(\d+)\.")


@lru_cache(maxsize=1024)
def held_elements(architecture: Architecture, grid: Grid) -> int:
    """Of the shards on the rank with most, the first: shards are rounded up."""
    return sum(prod(shape) for _, shape in fsdp_layout(architecture, grid).on(grid.ranks[0]).parameters)


@lru_cache(maxsize=64)
def whole_elements(architecture: Architecture) -> tuple[int, int]:
    """(of the largest layer, of what is in no layer)"""
    tensors, sizes = canonical_tensors(architecture), Counter[str]()
    for name, shape in zip(tensors.names, tensors.shapes, strict=True):
        found = LAYER.match(name)
        sizes[found[1] if found else ""] += prod(shape)
    outside = sizes.pop("", 0)
    return max(sizes.values(), default=0), outside


@lru_cache(maxsize=64)
def whole_a_elements(adapted: Architecture) -> int:
    """Of the halves A of adapters, which every rank has whole to merge its rows with; those of experts are sharded as
    these are."""
    whole = whole_parameters(adapted)
    shapes = dict(zip(whole.names, whole.shapes, strict=True))
    return sum(prod(shape) for name, shape in shapes.items() if name.endswith(A) and len(shape) == 2)


def sharded_bytes(job: PlannedJob, role: str) -> dict[str, int]:
    """Of each part of a role's memory. Shards of a model in training are the fp32 weights that the optimizer works
    on."""
    elements = held_elements(job.architectures[role], job.grids[role])
    if role not in trained_roles():
        models = len(job.config.teacher.checkpoints) if role == "teacher" else 1
        return {"weights": models * elements * job.item_bytes}
    frozen, lora = 0, job.config.lora_of(role)
    if lora:
        adapted = job.architectures[role].adapted(lora.rank, lora.targets)
        frozen = elements * job.item_bytes + whole_a_elements(adapted) * FP32
        elements = held_elements(adapted, job.grids[role])
    if getattr(job.config, role).optimizer.cpu_offload:
        return {"weights": 0, "master_weights": 0, "optimizer": 0, "gradients": 0}
    return {
        "weights": frozen + elements * FP32,
        "master_weights": 0,
        "optimizer": elements * FP32 * MOMENTS,
        "gradients": elements * FP32,
    }


def gathered_bytes(job: PlannedJob, role: str, *, trains: bool) -> int:
    """Of weights that are whole at once, and of their gradients on the way to shards, in fp32."""
    layer, outside = whole_elements(job.architectures[role])
    if trains and not job.config.fsdp_of(role).reshard_after_forward:
        layers = job.architectures[role].num_layers
    else:
        layers = LAYERS_AT_ONCE
    weights = (layers * layer + outside) * job.item_bytes
    return weights + trains * (layer + outside) * (job.item_bytes + FP32)


def gathering_s(job: PlannedJob, role: str, links: GridLinks, *, backward: bool) -> float:
    """Of the collectives of one micro-batch: weights gathered for forward, and for backward unless they stay, gradients
    reduced to shards and over the model's copies."""
    elements = sum(prod(shape) for shape in canonical_tensors(job.architectures[role]).shapes)
    walks = 1 + (backward and job.config.fsdp_of(role).reshard_after_forward)
    seconds = walks * links.shard.gather(elements * job.item_bytes)
    if backward:
        shard = elements * FP32 / links.shard.size
        seconds += links.shard.gather(elements * FP32) + links.copies.all_reduce(shard)
    return seconds
