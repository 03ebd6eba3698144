"""Where the elements of quantised parameters find their scales, on a rank of the destination."""

import math
from dataclasses import dataclass

import numpy as np

from rltrain.models.table import Array, ElementType, IntArray
from rltrain.reshard.fp8.blocks import entries_of, touched_blocks
from rltrain.reshard.kernels.slices import BLOCK
from rltrain.reshard.layout import Layout
from rltrain.reshard.plan.match import boxes_of


@dataclass(frozen=True, eq=False)
class ScalePlaces:
    """Element (r, c) of a matrix is scaled by number `entries[r, column_blocks[c]]` of its flattened scales.

    `entries` [rows, blocks of a row], `column_blocks` [columns]. Of stacked matrices rows are counted through.
    """

    entries: IntArray
    column_blocks: IntArray


def scale_places(layout: Layout, rank: int) -> dict[str, ScalePlaces]:
    """By name, of every matrix that `rank` holds in FP8 in the destination of `blocks.quantized`.

    Raises ValueError for a parameter in which pieces lie side by side, as in no engine's.
    """
    on = layout.on(rank)
    quantised = on.pieces[layout.types[on.pieces["tensor"]] == ElementType.FLOAT8_E4M3]
    held = {
        number: quantised[quantised["parameter"] == number] for number in np.unique(quantised["parameter"]).tolist()
    }
    return {
        name: _places(name, shape, held[number]) for number, (name, shape) in enumerate(on.parameters) if number in held
    }


def _places(name: str, shape: tuple[int, ...], pieces: Array) -> ScalePlaces:
    *leading, columns = shape
    rows = math.prod(leading)
    pieces = pieces[np.argsort(pieces["offset"])]
    if (pieces["cols"] != columns).any() or np.ptp(pieces["col"]):
        raise ValueError(f"{name} holds pieces side by side; expected one below the other, of whole rows")
    touched = touched_blocks(boxes_of(pieces))
    start, _ = entries_of(touched)
    entries = np.zeros((rows, int(touched["cols"][0])), dtype=np.int64)
    for piece, blocks, first in zip(pieces, touched, start.tolist(), strict=True):
        block_row = np.arange(piece["row"], piece["row"] + piece["rows"]) // BLOCK - blocks["row"]
        top = piece["offset"] // columns
        entries[top : top + piece["rows"]] = first + block_row[:, None] * blocks["cols"] + np.arange(blocks["cols"])
    first_column = int(pieces["col"][0])
    column_blocks = np.arange(first_column, first_column + columns) // BLOCK - first_column // BLOCK
    return ScalePlaces(entries, column_blocks)
