"""Estimates the bytes of optimizers on device and host, and of the shards and gathered weights of a sharded model."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from rltrain.config.schema import Trained
from rltrain.models import Architecture, canonical_tensors
from rltrain.models.experts import is_expert
from rltrain.models.lora import A
from rltrain.models.table import is_hidden_matrix
from rltrain.planning.hardware import Gpu, GridLinks
from rltrain.planning.planned import (
    Elements,
    PlannedJob,
    expert_data_parallel,
    in_buffers,
    one_replica,
    trained_elements,
)
from rltrain.reshard.fsdp_layout import fsdp_layout, whole_parameters
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.tasks.roles import trained_roles

FP32 = 4
MOMENTS = 2
# The shards of a model over all ranks of its role, and its temporarily whole layers (backend fsdp).

LAYERS_AT_ONCE = 2
"""Number of whole layers at once: one is gathered while another computes."""
LAYER = re.compile(r".*?\.(\d+)\.")


@lru_cache(maxsize=1024)
def held_elements(architecture: Architecture, grid: Grid) -> int:
    """Returns the elements of shards on the first rank. It has the most, since shards are rounded up."""
    return sum(prod(shape) for _, shape in fsdp_layout(architecture, grid).on(grid.ranks[0]).parameters)


@lru_cache(maxsize=64)
def whole_elements(architecture: Architecture) -> tuple[int, int]:
    """Returns (elements of the largest layer, elements outside of layers)."""
    tensors, sizes = canonical_tensors(architecture), Counter[str]()
    for name, shape in zip(tensors.names, tensors.shapes, strict=True):
        found = LAYER.match(name)
        sizes[found[1] if found else ""] += prod(shape)
    outside = sizes.pop("", 0)
    return max(sizes.values(), default=0), outside


@lru_cache(maxsize=64)
def whole_a_elements(adapted: Architecture) -> int:
    """Returns the number of elements of all LoRA matrices A together, without those of experts.

    `adapted` is an architecture with adapters. Every rank has these matrices whole to merge its rows of the weights.
    Matrices A of experts are sharded like their experts.
    """
    whole = whole_parameters(adapted)
    shapes = dict(zip(whole.names, whole.shapes, strict=True))
    return sum(prod(shape) for name, shape in shapes.items() if name.endswith(A) and len(shape) == 2)


def sharded_bytes(job: PlannedJob, role: str) -> dict[str, int]:
    """Returns the bytes of each part of a role's memory. A trained model has fp32 shards, updated by the optimizer."""
    elements = held_elements(job.architectures[role], job.grids[role])
    if role not in trained_roles():
        models = len(job.config.teacher.checkpoints) if role == "teacher" else 1
        return {"weights": models * elements * job.item_bytes}
    lora, learned = job.config.lora_of(role), held_elements(learned_architecture(job, role), job.grids[role])
    frozen = (elements - learned) * FP32  # a frozen vision tower
    if lora:
        adapted = job.architectures[role].adapted(lora.rank, lora.targets, vision=lora.vision)
        frozen = elements * job.item_bytes + whole_a_elements(adapted) * FP32
    if getattr(job.config, role).optimizer.cpu_offload:
        return {"weights": 0, "master_weights": 0, "optimizer": 0, "gradients": 0}
    return {
        "weights": frozen + learned * FP32,
        "master_weights": 0,
        "optimizer": learned * FP32 * MOMENTS,
        "gradients": learned * FP32,
    }


def gathered_bytes(job: PlannedJob, role: str, *, trains: bool) -> int:
    """Returns the bytes of the language model's weights that are whole at once, and of their fp32 gradients before they
    are reduced to shards."""
    layer, outside = whole_elements(replace(job.architectures[role], vision=None))
    if trains and not job.config.fsdp_of(role).reshard_after_forward:
        layers = job.architectures[role].num_layers
    else:
        layers = LAYERS_AT_ONCE
    weights = (layers * layer + outside) * job.item_bytes
    return weights + trains * (layer + outside) * (job.item_bytes + FP32)


def gathering_s(job: PlannedJob, role: str, links: GridLinks, *, backward: bool) -> float:
    """Returns the seconds of the language model's collectives per micro-batch.

    Weights are gathered for forward, and again for backward unless they stay. Gradients are reduced to shards and over
    the model's copies.
    """
    texts = replace(job.architectures[role], vision=None)
    elements = sum(prod(shape) for shape in canonical_tensors(texts).shapes)
    walks = 1 + (backward and job.config.fsdp_of(role).reshard_after_forward)
    seconds = walks * links.shard.gather(elements * job.item_bytes)
    if backward:
        shard = elements * FP32 / links.shard.size
        seconds += links.shard.gather(elements * FP32) + links.copies.all_reduce(shard)
    return seconds


# The optimizer of a role on a rank: its bytes on device and host, and the time of its steps.

STAGED_ELEMENTS = 1 << 24
"""Elements of gradients, and of weights, in transfer at a time during a step on the host."""
STAGING_BYTES = 2 * (FP32 + FP32) * STAGED_ELEMENTS
ROUND_ELEMENTS, ROUND_COPIES = 1 << 25, 6
"""Elements of the whole matrices on a rank at a time with Muon, and the number of copies of them. The copies are
buffers of both directions, stacks of equal shapes and their products."""


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of the optimizer on one rank. `hosted` is the share of masters and states on the host."""

    masters: int
    """Bytes of master weights. 0 if the weights are fp32."""
    states: int
    hosted: float
    staging: int = STAGING_BYTES
    """Bytes of staging memory on the host, if anything is there."""

    def on_device(self, size: int) -> int:
        return int(size * (1 - self.hosted))

    @property
    def on_host(self) -> int:
        return int((self.masters + self.states) * self.hosted) + (self.staging if self.hosted else 0)


def trained_settings(job: PlannedJob, role: str) -> Trained:
    return job.config.actor if role == "actor" else job.config.critic


def optimizer_bytes(job: PlannedJob, role: str, stage: int) -> OptimizerBytes:
    """Returns the optimizer's bytes on a rank of one of the role's pipeline stages."""
    settings = trained_settings(job, role).optimizer
    elements = sharded_elements(job, role, stage)
    moments = MOMENTS * elements
    if settings.name == "muon":
        moments -= int(elements * _hidden(job, role, stage).share)
    item = FP32 if settings.moments_dtype == "float32" else FP32 // 2
    if job.grids[role].is_sharded:
        # The host then has weights and gradients too, and no staging memory.
        beside = 2 * elements * FP32 if settings.cpu_offload else 0
        return OptimizerBytes(beside, moments * item, float(settings.cpu_offload), staging=0)
    masters = elements * FP32 if job.item_bytes < FP32 else 0
    return OptimizerBytes(masters, moments * item, float(settings.cpu_offload))


def learns_adapters(job: PlannedJob, role: str) -> bool:
    """Returns whether only adapters learn, and the base weights are frozen."""
    return job.config.lora_of(role) is not None


def learned_architecture(job: PlannedJob, role: str) -> Architecture:
    """Returns the architecture of the trained weights: the role's model without a frozen vision tower, or its
    adapters."""
    architecture, lora, vision = job.architectures[role], job.config.lora_of(role), job.config.model.vision
    if lora:
        return architecture.adapted(lora.rank, lora.targets, vision=lora.vision)
    return replace(architecture, vision=None) if vision and not vision.train else architecture


def learned_elements(job: PlannedJob, role: str, stage: int) -> Elements:
    """Returns the trained elements on a rank of one of the role's pipeline stages."""
    return trained_elements(learned_architecture(job, role), job.grids[role], stage)


def sharded_elements(job: PlannedJob, role: str, stage: int) -> int:
    """Returns the elements that the optimizer updates on a rank."""
    if job.grids[role].is_sharded:
        return held_elements(learned_architecture(job, role), job.grids[role])
    elements, grid = learned_elements(job, role, stage), job.grids[role]
    replicas = grid.dp * grid.cp
    if not (trained_settings(job, role).distributed_optimizer and replicas > 1):
        return elements.total
    expert_replicas = expert_data_parallel(grid)
    dense, experts = in_buffers(elements.dense, replicas), in_buffers(elements.experts, expert_replicas)
    return dense // replicas + experts // expert_replicas


def orthogonalizing_bytes(job: PlannedJob, role: str) -> int:
    """Returns the bytes needed by Muon on the device during a step, in addition to the parts of the role."""
    return ROUND_ELEMENTS * ROUND_COPIES * FP32 if trained_settings(job, role).optimizer.name == "muon" else 0


def orthogonalizing_s(job: PlannedJob, role: str, stage: int, gpu: Gpu) -> float:
    """Returns the seconds of the products in one step. One rank of the stage orthogonalises each matrix."""
    settings, grid = trained_settings(job, role).optimizer, job.grids[role]
    if settings.name != "muon":
        return 0.0
    hidden = _hidden(job, role, stage)
    flops = hidden.dense_flops / (grid.dp * grid.cp) + hidden.expert_flops / expert_data_parallel(grid)
    return settings.muon.newton_schulz_steps * flops / (gpu.flops("bfloat16") * gpu.efficiency.matmul)


@dataclass(frozen=True)
class Hidden:
    """The hidden matrices among the parameters on a rank.

    `share` is their share of all elements. The FLOPs are for one Newton-Schulz pass. Each matrix counts by the part on
    this rank.
    """

    share: float
    dense_flops: float
    expert_flops: float


def _hidden(job: PlannedJob, role: str, stage: int) -> Hidden:
    return _hidden_of(job.architectures[role], one_replica(job.grids[role]), stage)


@lru_cache(maxsize=1024)
def _hidden_of(architecture: Architecture, grid: Grid, stage: int) -> Hidden:
    layout = megatron_layout(architecture, grid, transformer_engine=True)
    on, tensors = layout.on(int(grid.array[stage].flat[0])), layout.tensors
    of_expert = [is_expert(name) for name, _ in on.parameters]
    held, flops = 0, {False: 0.0, True: 0.0}
    sizes = on.pieces["rows"] * on.pieces["cols"]
    for piece, size in zip(on.pieces, sizes.tolist(), strict=True):
        shape = tensors.shapes[piece["tensor"]]
        if is_hidden_matrix(tensors.names[piece["tensor"]], shape):
            held += size
            flops[of_expert[piece["parameter"]]] += size * _pass_flops(shape[0], shape[1]) / (shape[0] * shape[1])
    return Hidden(held / (int(sizes.sum()) or 1), flops[False], flops[True])


def _pass_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs of three products: of the matrix and itself, of the result and itself, and of that and the
    matrix."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3
