"""Images in the embedded engine: keys of contexts, positions of their tokens, and features from the vision tower."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rltrain.errors import DataError
from rltrain.models.rope_positions import rope_delta, rope_positions
from rltrain.models.vision import PlacedImage, Vision
from rltrain.models.vision_tables import VISION
from rltrain.models.vision_tower import build_tower, encode, patches_of
from rltrain.rollout.embedded.parameters import EngineAdapter, Matrix
from rltrain.rollout.sample import Sample
from rltrain.runtime.image_files import ImageStore

# Contexts as keys of caches.

ROW_BITS = 20
"""An image has fewer than 2**ROW_BITS tokens."""
_RECENT_IMAGES = 128


def keyed(sample: Sample, merge: int) -> Sample:
    """Returns the sample with a negative integer for each token of an image. It names the image and the row of its
    features.

    So contexts with equal ids but other images differ. The result is for caches only. `merge` is the height and width
    of a token in patches.
    """
    if not sample.images:
        return sample
    context, pieces, place = sample.context, list[tuple[int, ...]](), 0
    for image in sample.images:
        count = image.num_tokens(merge)
        pieces += [context[place : image.begin], _keys(image.key, count)]
        place = image.begin + count
    whole = sum([*pieces, context[place:]], ())
    num_prompt = len(sample.prompt)
    return replace(sample, prompt=whole[:num_prompt], tokens=whole[num_prompt:])


@lru_cache(maxsize=_RECENT_IMAGES)
def _keys(key: int, count: int) -> tuple[int, ...]:
    return tuple(-1 - (key << ROW_BITS | row) for row in range(count))


class _Span(NamedTuple):
    """Consecutive tokens of an image: their first place in a row of tokens, and their rows among its features."""

    place: int
    key: int
    first: int
    end: int


def _spans(tokens: Sequence[int]) -> Iterator[_Span]:
    """Yields the image tokens among keyed `tokens`."""
    begin = 0
    while begin < len(tokens):
        if tokens[begin] >= 0:
            begin += 1
            continue
        end = begin + 1
        while end < len(tokens) and tokens[end] == tokens[begin] - (end - begin):
            end += 1
        key, first = divmod(-1 - tokens[begin], 1 << ROW_BITS)
        yield _Span(begin, key, first, first + end - begin)
        begin = end


# Features of images.


class Features(NamedTuple):
    """Embeddings of an image's tokens, shape [tokens, hidden], and what is added to them after each of the first
    layers."""

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deepstack))

    def rows(self, first: int, end: int) -> "Features":
        """Returns the features of tokens `first` up to `end`."""
        return Features(self.embeddings[first:end], tuple(level[first:end] for level in self.deepstack))


class Shown(NamedTuple):
    """Image tokens of a pass. `rows` [image tokens] are their places among the tokens of the pass."""

    rows: Tensor
    features: Features

    def insert(self, embedded: Tensor) -> None:
        """Replaces the rows of image tokens in `embedded` [tokens, hidden]."""
        embedded.index_copy_(0, self.rows, self.features.embeddings.to(embedded.dtype))

    def add(self, layer: int, hidden: Tensor) -> None:
        """Adds to the output `hidden` [tokens, hidden] of a layer, if it is one of the first."""
        if layer < len(self.features.deepstack):
            hidden.index_add_(0, self.rows, self.features.deepstack[layer].to(hidden.dtype))


@dataclass(frozen=True)
class ImageLimits:
    """Limits on the encoding of images: patches at a time, and bytes of kept features. With `trains` the tower's
    weights change."""

    max_patches: int
    cache_bytes: float
    trains: bool = True


class EngineImages:
    """Encodes images of `store` by `tower`, and keeps the features of those used last.

    `colours` are the mean and the standard deviation of red, green and blue, from 0 to 1. Not thread-safe.
    """

    def __init__(
        self,
        vision: Vision,
        tower: nn.Module,
        store: ImageStore,
        colours: tuple[Sequence[float], Sequence[float]],
        limits: ImageLimits,
        device: torch.device,
    ) -> None:
        self.vision, self.merge = vision, vision.merge
        self._tower, self._store, self._limits, self.device = tower, store, limits, device
        self._mean, self._std = (torch.tensor(colour, dtype=torch.float32, device=device) for colour in colours)
        self._kept: OrderedDict[int, Features] = OrderedDict()
        self._kept_bytes = 0
        self._num_encoded = 0

    def check(self, samples: Iterable[Sample]) -> None:
        """Raises DataError if a context ends inside or right after an image. A token of text must follow each image."""
        for sample in samples:
            if sample.images and _end(sample.images[-1], self.merge) >= len(sample.context):
                raise DataError(
                    f"The context of sample {sample.id} ends with an image; expected text after it, such as the end "
                    "mark of a chat template"
                )

    def changed(self) -> None:
        """Drops what old weights of the tower have made."""
        if self._limits.trains:
            self.forget()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call."""
        count, self._num_encoded = self._num_encoded, 0
        return {"images/engine_encoded": float(count)}

    def forget(self) -> None:
        """Drops all kept features."""
        self._kept.clear()
        self._kept_bytes = 0

    def shown(self, rows: Sequence[Sequence[int]], width: int) -> Shown | None:
        """Returns the images in keyed `rows`, each padded to `width` tokens. Encodes those without kept features.

        Returns None without images. Raises ImageMissing.
        """
        spans = [(row * width, span) for row, tokens in enumerate(rows) for span in _spans(tokens)]
        if not spans:
            return None
        features = self._features(dict.fromkeys(span.key for _, span in spans))
        places = [np.arange(base + span.place, base + span.place + span.end - span.first) for base, span in spans]
        parts = [features[span.key].rows(span.first, span.end) for _, span in spans]
        levels = zip(*(part.deepstack for part in parts), strict=True)
        return Shown(
            torch.from_numpy(np.concatenate(places)).to(self.device),
            Features(torch.cat([part.embeddings for part in parts]), tuple(torch.cat(level) for level in levels)),
        )

    def _features(self, keys: Iterable[int]) -> Mapping[int, Features]:
        found: dict[int, Features] = {}
        missing: list[int] = []
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
                found[key] = self._kept[key]
            else:
                missing.append(key)
        for piece in self._pieces(missing):
            found |= self._encoded(piece)
        for key in missing:
            self._keep(key, found[key])
        return found

    def _pieces(self, keys: Sequence[int]) -> Iterator[list[int]]:
        """Yields the images to be encoded together."""
        piece, num_patches = list[int](), 0
        for key in keys:
            count = self._num_patches(key)
            if piece and num_patches + count > self._limits.max_patches:
                yield piece
                piece, num_patches = [], 0
            piece.append(key)
            num_patches += count
        if piece:
            yield piece

    def _num_patches(self, key: int) -> int:
        frames, height, width = self._store.shape(key)
        of_time = -(-frames // self.vision.temporal_patch)
        return of_time * (height // self.vision.patch) * (width // self.vision.patch)

    def _encoded(self, keys: Sequence[int]) -> dict[int, Features]:
        pixels = [torch.from_numpy(np.asarray(self._store.pixels(key))).to(self.device) for key in keys]
        patches, grids = patches_of(self.vision, pixels, self._mean, self._std)
        embeddings, deepstack = encode(self._tower, patches, grids)
        self._num_encoded += len(keys)
        counts = (grids.prod(1) // self.merge**2).tolist()
        by_image = zip(*(level.split(counts) for level in (embeddings, *deepstack)), strict=True)
        return {key: Features(first, tuple(rest)) for key, (first, *rest) in zip(keys, by_image, strict=True)}

    def _keep(self, key: int, features: Features) -> None:
        """Keeps a copy, because features of one piece share memory. The longest unused ones make room."""
        if features.num_bytes > self._limits.cache_bytes:
            return
        copy = Features(features.embeddings.clone(), tuple(level.clone() for level in features.deepstack))
        self._kept[key] = copy
        self._kept_bytes += copy.num_bytes
        while self._kept_bytes > self._limits.cache_bytes:
            self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes


def tower_of(
    vision: Vision,
    folder: Path,
    parameters: Mapping[str, Tensor],
    matrices: Mapping[str, Matrix],
    device: torch.device,
) -> nn.Module:
    """Returns the tower described by `folder`/config.json, on the engine's `parameters`. They stay the engine's, and
    the tower reads whatever they hold. `matrices` may have adapters of its linear layers."""
    dtype = next(tensor.dtype for name, tensor in parameters.items() if name.startswith(VISION))
    tower = build_tower(vision, folder, dtype, torch.device("cpu"))
    for name, _ in [*tower.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        module = tower.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(parameters[VISION + name], requires_grad=False))
        if (matrix := matrices.get(VISION + name)) and matrix.adapter:
            assert isinstance(module, nn.Linear), f"{name} belongs to no linear layer"
            module.register_forward_hook(_adding(matrix.adapter))
    return tower.to(device)


def _adding(adapter: EngineAdapter) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Returns a hook of a linear layer that adds the output of its adapter."""
    return lambda module, given, made: made + adapter.product(given[0])


# Positions of tokens in a pass.


class Admitted:
    """Samples that enter the slots from `first` on. Their tokens have positions for rotary embeddings."""

    def __init__(self, images: EngineImages, first: int, samples: Sequence[Sample]) -> None:
        self.images = images
        self._first, self._samples = first, samples
        self._positions: dict[int, np.ndarray] = {}

    def positions(self, spans: Sequence[tuple[int, int, int]], width: int) -> Tensor:
        """Returns positions for a pass over spans of tokens, each padded to `width`, shape [3, spans * width].

        A span is (slot, first place, end). Padding repeats the last position.
        """
        places = np.arange(width)
        rows = [self._of_slot(slot)[:, np.minimum(first + places, end - 1)] for slot, first, end in spans]
        return torch.from_numpy(np.concatenate(rows, axis=1)).to(self.images.device).long()

    def _of_slot(self, slot: int) -> np.ndarray:
        if slot not in self._positions:
            sample = self._samples[slot - self._first]
            self._positions[slot] = rope_positions(len(sample.context), sample.images, self.images.merge)
        return self._positions[slot]


def delta(sample: Sample, merge: int) -> int:
    """Returns the difference between position and place for the next tokens of the sample."""
    return rope_delta(sample.images, merge)


def _end(image: PlacedImage, merge: int) -> int:
    return image.begin + image.num_tokens(merge)
