"""Samples with images for tiny vision-language models, in Megatron's models and for transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.algorithms.losses import LossOutput
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models import read_architecture
from rltrain.models.rope_positions import image_fields
from rltrain.models.vision import PlacedImage, Tower
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.megatron.model import LanguageModel
from rltrain.training.tower_pass import Sight
from tests.support.packed_experience import plain_experience
from tests.support.trained_models import megatron_model
from tests.support.vision_checkpoints import IMAGE_TOKEN, MERGE, PATCH, VOCAB_SIZE, write_checkpoint, write_gradients

Part = int | str
"""A number of tokens of text, or the name of an image."""
SIZES = {"square": (56, 56), "wide": (56, 84), "tall": (84, 28), "small": (28, 28)}
"""Heights and widths in pixels."""
KEYS = {name: 100 + number for number, name in enumerate(SIZES)}
SAMPLES: tuple[tuple[Part, ...], ...] = (
    (4, "square", 5),
    (13,),
    (3, "wide", 2, "small", 1, "square", 6),
    (2, "tall", 2, "tall", 7),
    (9,),
    (6, "small", 4),
)
"""Two samples are text. Three images are in several places."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def image(name: str) -> NDArray[np.uint8]:
    height, width = SIZES[name]
    return np.random.default_rng(KEYS[name]).integers(256, size=(1, height, width, 3), dtype=np.uint8)


def open_store(folder: Path, rank: int = 0) -> ImageStore:
    """Returns a store with all images."""
    store = ImageStore.open("samples", rank, folder=str(folder), keep_steps=1, cache_bytes=0)
    for name, key in KEYS.items():
        store.put(key, image(name), 0)
    return store


def placed_images(sample: Sequence[Part]) -> tuple[list[int], list[PlacedImage]]:
    """Returns the token ids of a sample, and its images."""
    ids: list[int] = []
    placed: list[PlacedImage] = []
    random = np.random.default_rng(sum(part if isinstance(part, int) else KEYS[part] for part in sample))
    for part in sample:
        if isinstance(part, int):
            ids += random.integers(10, VOCAB_SIZE, size=part).tolist()
        else:
            height, width = SIZES[part]
            placed.append(PlacedImage(len(ids), KEYS[part], (1, height // PATCH, width // PATCH)))
            ids += [IMAGE_TOKEN] * placed[-1].num_tokens(MERGE)
    return ids, placed


def for_transformers(samples: Sequence[Sequence[Part]]) -> list[tuple[list[int], list[NDArray[np.uint8]]]]:
    """Returns the samples as `vision_checkpoints.Sequences`."""
    return [(placed_images(sample)[0], [image(part) for part in sample if isinstance(part, str)]) for sample in samples]


def experience_of(samples: Sequence[Sequence[Part]]) -> Experience:
    of_samples = [placed_images(sample) for sample in samples]
    fields = [image_fields(len(ids), placed, MERGE) for ids, placed in of_samples]
    keys, positions = (torch.from_numpy(np.concatenate(field)) for field in zip(*fields, strict=True))
    tokens = torch.tensor([token for ids, _ in of_samples for token in ids])
    lengths = [len(ids) for ids, _ in of_samples]
    return plain_experience(lengths, tokens, image_keys=keys, rope_positions=positions)


def seeing_model(
    folder: Path,
    grid: Grid,
    groups: ProcessGroups,
    store: ImageStore,
    *,
    vision: schema.VisionSettings | None = None,
    **settings: Any,
) -> LanguageModel:
    """Returns the model of a checkpoint with its vision tower. `settings` are those of megatron_model."""
    sight = Sight(folder, MEAN, STD, vision or schema.VisionSettings(), store)
    architecture = read_architecture(folder, sees=True)
    return megatron_model(folder, grid, groups, architecture=architecture, sight=sight, **settings)


def summed_logprobs(experience: Experience, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossOutput:
    """The loss with the gradients of `vision_checkpoints.write_gradients`. The divisor is the number of tokens."""
    return LossOutput(logprobs.sum(), logprobs.new_tensor(float(experience.num_tokens)))


class Reference(NamedTuple):
    """A checkpoint, and transformers' gradients and log-probs for SAMPLES."""

    folder: Path
    gradients: Path
    logprobs: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, kind: Tower, folder: Path) -> "Reference":
        checkpoint, gradients = folder / "checkpoint", folder / "gradients"
        write_checkpoint(checkpoint, kind)
        return cls(checkpoint, gradients, tuple(write_gradients(checkpoint, gradients, for_transformers(SAMPLES))))
