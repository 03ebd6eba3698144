"""Estimates the bytes and seconds of images: their features, the vision tower, and the store of decoded images."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, prod, sqrt

from rltrain.config.models import VisionSettings
from rltrain.models import canonical_tensors
from rltrain.models.flops import BACKWARD, vision_flops
from rltrain.models.vision import Vision
from rltrain.planning.hardware import GB, Gpu
from rltrain.planning.planned import MEAN_OF_LONGEST, PlannedJob, Workload
from rltrain.tasks.roles import trained_roles

FP32 = 4
KEPT_HIDDEN, KEPT_FFN = 11, {2: 2, 3: 4}
"""Vectors of a block that autograd keeps for each patch: of the hidden size, and of the feed-forward size by the number
of matrices. They were counted in transformers' towers."""
KEPT_BY_RMS_NORMS = 2
"""Further vectors of the hidden size, in fp32, of blocks with RMSNorm. These are the ones with three matrices."""
KEPT_BY_MERGER, KEPT_BY_EMBEDDING = 4, 2
"""Vectors of the hidden size for each patch, in a merger and in the patches' embedding."""
BLOCKS_AT_ONCE = 2
"""Number of whole blocks of a sharded tower: one is gathered while another computes."""


def tower_of(job: PlannedJob, role: str, stage: int = 0) -> tuple[Vision, VisionSettings] | None:
    """Returns the vision tower of a rank of a role's pipeline stage, with its settings, or None. Only the first stage
    has one."""
    vision, settings = job.architectures[role].vision, job.config.model.vision
    return None if vision is None or settings is None or stage else (vision, settings)


def trains_tower(job: PlannedJob, role: str) -> bool:
    """Returns whether weights or adapters of a trained role's tower learn."""
    return job.config.model.vision is not None and not job.config.freezes_tower_of(role)


def image_tokens(job: PlannedJob, role: str, *, trains: bool) -> int:
    """Returns the tokens of different images in a part of a step, on one replica.

    Prompts have the mean of measured rows, and one has the most of them. If rows were not measured, all tokens of
    prompts may be of images, and several prompts have the assumed mean length. The samples of a group share their
    images, except for observations of environments.
    """
    samples, prompts = job.samples_per_replica(role), -(-job.config.batch.prompts_per_step // job.grids[role].dp)
    parts = job.config.batch.mini_batches if trains else job.shape.num_chunks
    count, longest = -(-samples // parts), job.longest_tokens
    if "env" not in job.placement.roles:
        count, longest = min(count, prompts), job.config.data.max_prompt_tokens
    if job.images is not None:
        return max(job.images.most_tokens, int(count * job.images.tokens))
    return max(longest, int(count * longest * MEAN_OF_LONGEST))


def with_images(
    job: PlannedJob, role: str, stage: int, of_language_model: dict[str, int], *, trains: bool
) -> dict[str, int]:
    """Returns the bytes of a pass on a rank: those of the language model, and those of images.

    The tower runs before and after the language model. So only the larger of both counts, unless the tower keeps its
    activations.
    """
    found = tower_of(job, role, stage)
    if found is None:
        return of_language_model
    vision, settings = found
    learns = trains and trains_tower(job, role)
    tokens = image_tokens(job, role, trains=trains)
    features = {"image features": tokens * vision.out_hidden * (1 + len(vision.deepstack)) * FP32 * (1 + learns)}
    patches = tokens * vision.merge**2
    keeps = learns and not settings.recompute
    at_once = patches if keeps else min(patches, patches_at_once(job, settings))
    of_tower = {"vision tower": at_once * tower_bytes(vision, job.item_bytes, learns=learns)}
    if job.grids[role].is_sharded:
        of_tower["vision tower"] += _gathered_bytes(job, role, learns=learns)
    if keeps:
        return of_language_model | features | of_tower
    is_larger = sum(of_tower.values()) > sum(of_language_model.values())
    return (of_tower if is_larger else of_language_model) | features


def patches_at_once(job: PlannedJob, settings: VisionSettings) -> int:
    """Returns the most patches that are encoded together. A larger image is encoded alone."""
    return max(settings.max_patches, job.measured.largest if job.measured else 0)


def tower_bytes(vision: Vision, item_bytes: int, *, learns: bool) -> int:
    """Returns the bytes of a tower's activations for each patch. Without gradients one block at a time has some."""
    block = (KEPT_HIDDEN * vision.hidden + KEPT_FFN[vision.mlp_matrices] * vision.ffn) * item_bytes
    if vision.mlp_matrices == max(KEPT_FFN):
        block += KEPT_BY_RMS_NORMS * vision.hidden * FP32
    mergers = KEPT_BY_MERGER * (1 + len(vision.deepstack) if learns else 1)
    ends = (mergers + KEPT_BY_EMBEDDING) * vision.hidden * item_bytes + vision.patch_size * FP32
    return (vision.depth if learns else 1) * block + ends


def _gathered_bytes(job: PlannedJob, role: str, *, learns: bool) -> int:
    """Returns the bytes of the tower's weights that are whole at once with FSDP, and of their gradients."""
    architecture = job.architectures[role]
    assert architecture.vision is not None
    whole, texts = (
        sum(prod(shape) for shape in canonical_tensors(one).shapes)
        for one in (architecture, replace(architecture, vision=None))
    )
    gathered = min(BLOCKS_AT_ONCE / architecture.vision.depth, 1.0) * (whole - texts)
    return int(gathered * (job.item_bytes + learns * (job.item_bytes + FP32)))


def store_bytes(job: PlannedJob, roles: tuple[str, ...]) -> int:
    """Returns a rank's share of the store of decoded images on its node, if one of its `roles` sees."""
    if not any(tower_of(job, role) for role in roles):
        return 0
    return int(job.config.data.images.cache_gb * GB) // job.ranks_per_node


def kept_feature_bytes(job: PlannedJob, stages: Mapping[str, int]) -> int:
    """Returns the most bytes on the host for features of frozen towers, on a rank of `stages`."""
    return sum(
        int(found[1].training_cache_gb * GB)
        for role, stage in stages.items()
        if role in trained_roles() and (found := tower_of(job, role, stage)) and job.config.freezes_tower_of(role)
    )


# Seconds of the tower.


def encoding_s(job: PlannedJob, role: str, gpu: Gpu, workload: Workload, num_images: float, *, trains: bool) -> float:
    """Returns the seconds in which a rank's tower encodes `num_images` prompts' images, with gradients if it `trains`.

    If rows were not measured, the images of a prompt count as one square image. Every rank of a replica encodes all of
    them.
    """
    found = tower_of(job, role)
    if found is None:
        return 0.0
    vision, settings = found
    passes = 1 + (settings.recompute + BACKWARD if trains and trains_tower(job, role) else 0)
    if workload.images is not None:
        of_prompt = vision_flops(vision, workload.images.grids) / workload.images.num_rows
    else:
        side = vision.merge * max(1, ceil(sqrt(workload.image_tokens)))
        of_prompt = vision_flops(vision, [(1, side, side)])
    flops = num_images * of_prompt
    return passes * flops / (gpu.flops(job.config.model.dtype) * gpu.efficiency.matmul)
