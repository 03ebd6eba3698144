"""Vision towers in training. Images are encoded before a model's forward, and the tower's backward follows the
model's."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rltrain.config.schema import VisionSettings
from rltrain.models.table import IntArray
from rltrain.models.vision import Grid, Vision
from rltrain.models.vision_tower import grid_of, patches_of
from rltrain.runtime.image_files import ImageStore
from rltrain.training.packing import MicroBatch

OnImages = Callable[[Sequence[Grid], bool], None]
"""Called at the beginning of a pass with the grids of its distinct images and whether gradients are computed."""
Encode = Callable[[Tensor, Tensor], tuple[Tensor, list[Tensor]]]
"""The signature of models.vision_tower.encode without its first argument."""


@dataclass(frozen=True)
class Sight:
    """A model's inputs for building a tower.

    `folder` has the config.json of the tower. `mean` and `std` normalise the colours red, green and blue. `images` may
    be None for models that get no samples.
    """

    folder: Path
    mean: tuple[float, ...]
    std: tuple[float, ...]
    settings: VisionSettings
    images: ImageStore | None = None
    on_images: OnImages | None = None
    is_constant: bool = False
    """Whether the tower has the same weights in all passes."""


class KeptFeatures:
    """Features of images on the host, for further passes of a tower whose weights stay. It keeps those used last, of
    at most `max_bytes`."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self._kept: OrderedDict[int, list[Tensor]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def of(self, key: int, device: torch.device) -> list[Tensor]:
        """Returns the kept features of an image on `device`: those of its tokens, then those of each deepstack
        layer."""
        self._kept.move_to_end(key)
        return [features.to(device) for features in self._kept[key]]

    def keep(self, key: int, features: Sequence[Tensor]) -> None:
        """Keeps a copy, if there is room for it."""
        if _num_bytes(features) > self.max_bytes:
            return
        copies = [one.detach().to("cpu", copy=True) for one in features]
        self._kept[key] = copies
        self._num_bytes += _num_bytes(copies)
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Tower:
    """A vision tower for `TowerPass`: its shape, the function of its module, and the rules of model.vision."""

    vision: Vision
    encode: Encode
    mean: Tensor
    std: Tensor
    max_patches: int
    recompute: bool
    on_images: OnImages | None = None
    kept: KeptFeatures | None = None
    """Features of earlier passes. None if the tower's weights may change."""

    @classmethod
    def of(cls, vision: Vision, encode: Encode, sight: Sight, device: torch.device) -> "Tower":
        """Returns the tower with the function `encode` on `device`."""
        mean, std = (torch.tensor(values, device=device) for values in (sight.mean, sight.std))
        settings = sight.settings
        kept = KeptFeatures(settings.training_cache_gb * 1e9) if sight.is_constant else None
        return cls(vision, encode, mean, std, settings.max_patches, settings.recompute, sight.on_images, kept)


@dataclass(frozen=True)
class Shown:
    """The images of a micro-batch on this rank.

    `features` [image tokens, hidden] replace the embeddings of `rows`. `deepstack` has as many rows for each of the
    first layers. They are fp32 with gradients of their own rows.
    """

    rows: Tensor
    features: Tensor
    deepstack: list[Tensor]


@dataclass(frozen=True)
class _Placed:
    """The image tokens of a micro-batch: their places, and for each the key and the row of its image."""

    tokens: IntArray
    keys: IntArray
    rows: IntArray


@dataclass
class _Piece:
    """Images encoded together. With `outputs` their graph is kept for backward, else the state of torch's generator on
    the host before they were encoded."""

    keys: list[int]
    outputs: list[Tensor] = field(default_factory=list)
    random: Tensor | None = None


class TowerPass:
    """One pass of a tower over the images of micro-batches. Each distinct image is encoded once, and not again if the
    tower has kept its features.

    The features are leaf tensors. So a schedule may run the micro-batches' forward and backward in any order, and
    recompute parts of them. Then `backward` sends the leaves' gradients through the tower.

    Images are encoded in pieces of at most `tower.max_patches` patches. A larger image is a piece of its own.
    """

    def __init__(
        self,
        tower: Tower,
        batches: Sequence[MicroBatch],
        store: ImageStore,
        *,
        trains: bool,
        num_pieces: int | None = None,
    ) -> None:
        """Encodes the images, with gradients for the tower if it `trains`.

        `num_pieces` adds pieces of one blank image. Ranks that share the tower's weights then encode equally often.
        """
        self.tower, self.store, self.trains = tower, store, trains
        self._placed = [_placed(batch, store, tower.vision) for batch in batches]
        self._pieces = [_Piece(keys) for keys in pieces_of(tower, batches, store)]
        if tower.on_images is not None:
            keys = [key for piece in self._pieces for key in piece.keys]
            tower.on_images([grid_of(tower.vision, store.shape(key)) for key in keys], trains)
        self._pieces += [_Piece([]) for _ in range((num_pieces or 0) - len(self._pieces))]
        self._leaves = self._kept_leaves(batches)
        keeps_graph = trains and not tower.recompute
        for piece in self._pieces:
            piece.random = torch.random.get_rng_state() if trains else None
            with torch.set_grad_enabled(keeps_graph):
                outputs = self._encoded(piece)
            self._leaves |= self._leaves_of(piece, outputs)
            self._keep(piece, outputs)
            piece.outputs = outputs if keeps_graph else []

    def shown(self, batch: int, row_of: Callable[[Tensor], Tensor]) -> Shown | None:
        """Returns the images in the rows of this rank for micro-batch number `batch`. None: there are none.

        `row_of` maps tokens of the micro-batch [n] to their rows on this rank, or to -1 if other ranks have them.
        """
        placed = self._placed[batch]
        rows = row_of(torch.from_numpy(placed.tokens)).cpu()
        here = (rows >= 0).numpy()
        if not here.any():
            return None
        keys, number = np.unique(placed.keys[here], return_inverse=True)
        leaves = [self._leaves[key] for key in keys.tolist()]
        lengths = np.array([len(of_image[0]) for of_image in leaves])
        sources = (lengths.cumsum() - lengths)[number] + placed.rows[here]
        device = self.tower.mean.device
        index = torch.from_numpy(sources).to(device)
        features, *deepstack = (torch.cat(of_depth).index_select(0, index) for of_depth in zip(*leaves, strict=True))
        return Shown(rows[torch.from_numpy(here)].to(device), features, deepstack)

    def backward(self) -> None:
        """Adds the gradients of the tower's weights, if it trains. Call it once, after the micro-batches' backward."""
        for piece in self._pieces if self.trains else []:
            outputs = piece.outputs or self._encoded_again(piece)
            piece.outputs = []
            torch.autograd.backward(outputs, list(self._gradients(piece, outputs)))

    def _gradients(self, piece: _Piece, outputs: list[Tensor]) -> Iterator[Tensor]:
        of_images = [self._leaves.pop(key) for key in piece.keys]
        for depth, output in enumerate(outputs):
            leaves = [of_image[depth] for of_image in of_images]
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            yield torch.cat(found).to(output.dtype) if found else torch.zeros_like(output)

    def _encoded_again(self, piece: _Piece) -> list[Tensor]:
        """Encodes a piece with a graph, and with the same dropout of adapters as before."""
        assert piece.random is not None
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(piece.random)
            return self._encoded(piece)

    def _encoded(self, piece: _Piece) -> list[Tensor]:
        vision, device = self.tower.vision, self.tower.mean.device
        side = vision.patch * vision.merge
        pixels = [self.store.pixels(key) for key in piece.keys] or [np.zeros((1, side, side, 3), np.uint8)]
        on_device = [torch.from_numpy(image).to(device) for image in pixels]
        features, deepstack = self.tower.encode(*patches_of(vision, on_device, self.tower.mean, self.tower.std))
        return [features, *deepstack]

    def _kept_leaves(self, batches: Sequence[MicroBatch]) -> dict[int, list[Tensor]]:
        """Returns the leaves of images with kept features."""
        kept = self.tower.kept
        if kept is None:
            return {}
        assert not self.trains, "kept features are of a tower that does not change"
        device = self.tower.mean.device
        return {key: [one.float() for one in kept.of(key, device)] for key in _keys_of(batches) if key in kept}

    def _keep(self, piece: _Piece, outputs: list[Tensor]) -> None:
        if self.tower.kept is None or not piece.keys:
            return
        lengths = [_num_tokens(self.store, self.tower.vision, key) for key in piece.keys]
        by_depth = [output.split(lengths) for output in outputs]
        for key, of_image in zip(piece.keys, zip(*by_depth, strict=True), strict=True):
            self.tower.kept.keep(key, of_image)

    def _leaves_of(self, piece: _Piece, outputs: list[Tensor]) -> dict[int, list[Tensor]]:
        """Returns the leaves by image: the features, then those of each deepstack layer."""
        lengths = [_num_tokens(self.store, self.tower.vision, key) for key in piece.keys]
        if not lengths:
            return {}
        by_depth = [output.detach().float().split(lengths) for output in outputs]
        leaves = [[leaf.requires_grad_(self.trains) for leaf in of_image] for of_image in zip(*by_depth, strict=True)]
        return dict(zip(piece.keys, leaves, strict=True))


def pieces_of(tower: Tower, batches: Sequence[MicroBatch], store: ImageStore) -> list[list[int]]:
    """Returns the keys of distinct images in the micro-batches, piece by piece as `TowerPass` encodes them."""
    pieces: list[list[int]] = []
    room = 0
    for key in _keys_of(batches):
        if tower.kept is not None and key in tower.kept:
            continue
        size = _num_tokens(store, tower.vision, key) * tower.vision.merge**2
        if size > room:
            pieces.append([])
            room = tower.max_patches
        pieces[-1].append(key)
        room -= size
    return pieces


def _keys_of(batches: Sequence[MicroBatch]) -> list[int]:
    """Returns the keys of the micro-batches' images, each once."""
    keys = [batch.experience.image_keys.numpy() for batch in batches]
    return [*dict.fromkeys(key for of_batch in keys for key in of_batch[of_batch > 0].tolist())]


def _num_tokens(store: ImageStore, vision: Vision, key: int) -> int:
    return prod(grid_of(vision, store.shape(key))) // vision.merge**2


def _placed(batch: MicroBatch, store: ImageStore, vision: Vision) -> _Placed:
    """Returns the image tokens of a micro-batch. Raises RuntimeError if a run of a key is not whole images."""
    of_tokens = batch.experience.image_keys.numpy()
    tokens = np.flatnonzero(of_tokens)
    keys = of_tokens[tokens]
    is_first = np.ones(len(tokens), bool)
    is_first[1:] = (np.diff(tokens) != 1) | (np.diff(keys) != 0)
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(np.append(firsts, len(tokens)))
    of_run = np.array([_num_tokens(store, vision, key) for key in keys[firsts].tolist()], np.int64)
    wrong = np.flatnonzero(lengths % of_run)
    if len(wrong):
        run = int(wrong[0])
        raise RuntimeError(
            f"{lengths[run]} tokens in a row belong to image {keys[firsts[run]]} of {of_run[run]} tokens; expected "
            "whole images in every sample"
        )
    within = np.arange(len(tokens)) - np.repeat(firsts, lengths)
    return _Placed(tokens, keys, within % np.repeat(of_run, lengths))
