"""Cutting slices into the tiles that warps of the CUDA kernels take."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rltrain.models.table import ITEM_BYTES, Array
from rltrain.reshard.kernels.slices import BLOCK, quantises

TILE = np.dtype(
    [
        ("row", np.int64),
        ("col", np.int64),
        ("rows", np.int32),
        ("cols", np.int32),
        ("slice", np.int32),
        ("unused", np.int32),
    ]
)
"""rs_tile of csrc/reshard_cuda_tiles.h, field by field."""

TILE_BYTES = 16384
"""Most bytes of a tile in the wider of its two types: four rounds of a warp's loads."""

_ALIGNMENT = 16
"""Columns between tiles are a multiple of it, so that vectors fit in all of a row's tiles if they fit in the row."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Slices cut into tiles: those of slices[first:last] are tiles[first_tile[first]:first_tile[last]]."""

    slices: Array
    """As given, but that slices without gaps between their rows are one row."""
    tiles: Array
    first_tile: NDArray[np.int64]
    """[slices + 1]"""


def cut(slices: Array) -> Tiles:
    """Tiles of `slices` [SLICE], which they cover exactly: in the order of the slices, then by rows, then by columns.

    Tiles of slices that quantise lie within one block.
    """
    joined = _joined(slices)
    tile_rows, tile_cols, above, left = _shapes(joined)
    rows, cols = joined["rows"], joined["cols"]
    filled = (rows > 0) & (cols > 0)
    down = np.where(filled, -(-(above + rows) // tile_rows), 0)
    across = np.where(filled, -(-(left + cols) // tile_cols), 0)

    first_tile = np.zeros(len(joined) + 1, dtype=np.int64)
    np.cumsum(down * across, out=first_tile[1:])
    number = np.repeat(np.arange(len(joined)), np.diff(first_tile))
    i, j = np.divmod(np.arange(first_tile[-1]) - first_tile[number], across[number])

    tiles = np.zeros(len(number), dtype=TILE)
    tiles["slice"] = number
    tiles["row"], tiles["rows"] = _pieces(i, tile_rows[number], above[number], rows[number])
    tiles["col"], tiles["cols"] = _pieces(j, tile_cols[number], left[number], cols[number])
    return Tiles(joined, tiles, first_tile)


def _joined(slices: Array) -> Array:
    """Slices whose rows follow each other without gaps on both sides, as one row."""
    joined = slices.copy()
    without_gaps = (slices["src_stride"] == slices["cols"]) & (slices["dst_stride"] == slices["cols"])
    chosen = (without_gaps | (slices["rows"] == 1)) & ~quantises(slices)
    joined["cols"][chosen] *= joined["rows"][chosen]
    joined["rows"][chosen] = np.minimum(joined["rows"][chosen], 1)
    return joined


def _shapes(slices: Array) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the tiles of each slice, and those of its first tile that lie above and left of the slice."""
    quantised = quantises(slices)
    most = TILE_BYTES // np.maximum(ITEM_BYTES[slices["src_type"]], ITEM_BYTES[slices["dst_type"]])
    # About equal parts of a row.
    across = np.maximum(-(-slices["cols"] // most), 1)
    aligned = -(-slices["cols"] // (across * _ALIGNMENT)) * _ALIGNMENT
    tile_cols = np.where(quantised, BLOCK, np.maximum(aligned, 1))
    tile_rows = np.maximum(most // np.maximum(np.minimum(tile_cols, slices["cols"]), 1), 1)
    # A power of two, so that blocks are whole tiles.
    within_block = np.minimum(2 ** np.log2(tile_rows).astype(np.int64), BLOCK)
    tile_rows = np.where(quantised, within_block, tile_rows)
    above = np.where(quantised, slices["row_phase"] % tile_rows, 0)
    left = np.where(quantised, slices["col_phase"], 0)
    return tile_rows, tile_cols, above, left


def _pieces(
    number: NDArray[np.int64], size: NDArray[np.int64], before: NDArray[np.int64], length: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of the number-th piece of `length`, cut every `size` from `before` ahead of its start."""
    start = np.maximum(number * size - before, 0)
    end = np.minimum((number + 1) * size - before, length)
    return start, end - start
