"""Files of training states as ranks save them, with numbers in the place of weights that tell all elements apart."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rltrain.checkpoint.saved_state import MASTER, Counts, contents, flat_name
from rltrain.models.table import Array
from rltrain.reshard.layout import Layout
from rltrain.training.shards import answered_for, replica_of, within

PADDING = -1.0
COUNTS = Counts(num_updates=7, optimizer_steps=5)


def places(pieces: Array) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """((tensor, row, column), (parameter, position)) of every element."""
    for piece in pieces:
        for row in range(piece["rows"]):
            for col in range(piece["cols"]):
                position = piece["offset"] + row * piece["stride"] + col
                yield (
                    (int(piece["tensor"]), int(piece["row"] + row), int(piece["col"] + col)),
                    (int(piece["parameter"]), int(position)),
                )


def ranges_of(layout: Layout, rank: int, draw_cuts: Callable[[int], list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A rank's share of each of its parameters; replicas, which come to the same cuts, have consecutive shares."""
    index, _ = replica_of(layout, rank)
    sizes = [int(np.prod(shape)) for _, shape in layout.on(rank).parameters]
    cuts = [[0, *draw_cuts(number), size] for number, size in enumerate(sizes)]
    limits = np.array([sorted(min(cut, size) for cut in of) for of, size in zip(cuts, sizes, strict=True)])
    return limits[:, index], limits[:, index + 1]


def random_cuts(seed: int, layout: Layout, rank: int) -> Callable[[int], list[int]]:
    part, (_, replicas) = layout.parts[layout.ranks.index(rank)], replica_of(layout, rank)
    return lambda number: np.random.default_rng((seed, part, number)).integers(0, 900, replicas - 1).tolist()


@cache
def whole_tensors(layout: Layout) -> list[Tensor]:
    """As matrices of numbers that tell all elements apart."""
    sizes = layout.tensors.matrix_shapes.prod(axis=1)
    starts = np.cumsum(sizes) - sizes
    shapes = layout.tensors.matrix_shapes.tolist()
    return [
        torch.arange(start, start + size, dtype=torch.float32).view(shape)
        for start, size, shape in zip(starts.tolist(), sizes.tolist(), shapes, strict=True)
    ]


@cache
def flats_of(layout: Layout, rank: int) -> list[Tensor]:
    """The rank's flattened parameters. Not to be written to."""
    whole, on = whole_tensors(layout), layout.on(rank)
    flats = [torch.full((int(np.prod(shape)),), PADDING) for _, shape in on.parameters]
    for (tensor, row, col), (parameter, position) in places(on.pieces):
        flats[parameter][position] = whole[tensor][row, col]
    return flats


def save(layout: Layout, folder: Path, seed: int = 0, counts: Counts = COUNTS) -> list[Path]:
    """One file of every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for rank in layout.ranks:
        starts, stops = ranges_of(layout, rank, random_cuts(seed, layout, rank))
        pieces = within(answered_for(layout, rank), starts, stops)
        names, flats = [name for name, _ in layout.on(rank).parameters], flats_of(layout, rank)
        tensors = {
            flat_name(MASTER, names[i]): flats[i][starts[i] : stops[i]].clone() for i in np.unique(pieces["parameter"])
        }
        saved = contents(layout.tensors, names, pieces, tensors, counts)
        files.append(folder / f"rank_{rank:05d}.safetensors")
        save_file(dict(saved.tensors), files[-1], dict(saved.metadata))
    return files
