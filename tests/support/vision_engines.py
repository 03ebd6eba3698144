"""Embedded engines for tiny vision-language models, and samples with images for them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import Architecture, read_architecture
from rltrain.models.vision import PlacedImage
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.embedded.image_features import EngineImages, ImageLimits, tower_of
from rltrain.rollout.embedded.parameters import Matrix
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from tests.support.rollout_models import kv_budget
from tests.support.vision_checkpoints import IMAGE_TOKEN, MERGE, PATCH, VISION_END, VISION_START, VOCAB_SIZE

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
CPU = torch.device("cpu")
SIZES = {11: (28, 28), 12: (28, 56), 13: (56, 28), 14: (28, 28), 15: (56, 56)}
"""Heights and widths in pixels of the stored images, by key."""


def filled_store(folder: Path, rank: int = 0) -> ImageStore:
    """Returns a store with an image of random pixels for each of SIZES."""
    folder.mkdir(exist_ok=True)
    store = ImageStore(folder, rank, keep_steps=1, cache_bytes=1e9)
    generator = np.random.default_rng(0)
    for key, size in SIZES.items():
        store.put(key, generator.integers(0, 256, (1, *size, 3), dtype=np.uint8), 0)
    return store


class Loaded(NamedTuple):
    """A checkpoint's share on a rank of an engine."""

    folder: Path
    architecture: Architecture
    parameters: dict[str, Tensor]


def load_shares(folder: Path, grid: Grid | None = None, rank: int = 0) -> Loaded:
    """Returns the parameters of a rank of an engine, and its architecture with the tower."""
    architecture = read_architecture(folder, sees=True)
    layout = engine_layout(architecture, grid or Grid((0,)), dtype="float32")
    parameters = allocate_parameters(layout, rank, device=CPU)
    load_parameters(folder, layout, rank, parameters)
    return Loaded(folder, architecture, parameters)


class Served(NamedTuple):
    engine: EmbeddedEngine
    images: EngineImages


def start_engine(
    loaded: Loaded,
    store: ImageStore,
    *,
    tp: int = 1,
    tp_group: dist.ProcessGroup | None = None,
    kv_tokens: int | None = None,
    cache_bytes: float = 1e6,
    max_patches: int = 4096,
    trains: bool = True,
    matrices: Mapping[str, Matrix] | None = None,
    max_running_requests: int = 16,
    max_context_tokens: int = 256,
) -> Served:
    """Returns an engine that shows images of `store`. Its KV cache has blocks for `kv_tokens`, or slots."""
    folder, architecture, parameters = loaded
    assert architecture.vision is not None
    tower = tower_of(architecture.vision, folder, parameters, matrices or {}, CPU)
    limits = ImageLimits(max_patches, cache_bytes, trains=trains)
    images = EngineImages(architecture.vision, tower, store, (MEAN, STD), limits, CPU)
    budget = None
    if kv_tokens:
        grid = Grid(tuple(range(tp)), tp=tp)
        budget = kv_budget(architecture, kv_tokens, torch.float32, grid, num_slots=max_running_requests)
    engine = EmbeddedEngine(
        architecture,
        parameters,
        tp_group=tp_group,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        dtype=torch.float32,
        matrices=matrices,
        kv_budget=budget,
        images=images,
    )
    return Served(engine, images)


# Samples.

Part = int | Sequence[int]
"""The key of an image, or the ids of a text."""


def sample_of(number: int, *parts: Part) -> Sample:
    """Returns a sample with this prompt."""
    ids, placed = placed_in(parts)
    return Sample(id=number, prompt=ids, seed=number, images=placed)


def placed_in(parts: Iterable[Part]) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Returns the ids and images of the parts. A mark of text is before and after each image."""
    ids, placed = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, int):
            height, width = SIZES[part]
            image = PlacedImage(len(ids) + 1, part, (1, height // PATCH, width // PATCH))
            ids += [VISION_START, *[IMAGE_TOKEN] * image.num_tokens(MERGE), VISION_END]
            placed.append(image)
        else:
            ids += part
    return tuple(ids), tuple(placed)


def text(count: int, seed: int) -> list[int]:
    """Returns random ids without special tokens."""
    ids: list[int] = np.random.default_rng(seed).integers(10, VOCAB_SIZE, count).tolist()
    return ids


def mixed_samples() -> list[Sample]:
    """Returns samples without an image, with one, with two different ones and with the same one twice."""
    return [
        sample_of(0, text(3, 0), 11, text(4, 1)),
        sample_of(1, text(7, 2)),
        sample_of(2, 12, text(2, 3), 13, text(5, 4)),
        sample_of(3, text(1, 5), 15, 15, text(3, 6), 14, text(2, 7)),
    ]
