"""Descriptors of strided slices, what must hold of them, and their tiles for CUDA kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.models.table import ITEM_BYTES, Array, ElementType

# Descriptors of strided two-dimensional slices, and what must hold of them before a kernel may follow them.

Numbers = NDArray[Any]

BLOCK = 128
"""Rows and columns of a block that shares a scale."""

SLICE = np.dtype(
    [
        ("src_offset", np.int64),
        ("dst_offset", np.int64),
        ("src_stride", np.int64),
        ("dst_stride", np.int64),
        ("rows", np.int64),
        ("cols", np.int64),
        ("amax_offset", np.int64),
        ("amax_stride", np.int64),
        ("src_base", np.int32),
        ("dst_base", np.int32),
        ("amax_base", np.int32),
        ("src_type", np.uint8),
        ("dst_type", np.uint8),
        ("row_phase", np.uint8),
        ("col_phase", np.uint8),
    ]
)
"""rs_slice of csrc/reshard.h, field by field; the header says what each means. amax_base is -1 where nothing is
quantised."""

ANY_TYPE = -1
"""The element type of a base that serves every type: bytes."""

PAIRS = frozenset(
    {(kind, kind) for kind in ElementType}
    | {(ElementType.FLOAT32, kind) for kind in ElementType}
    | {(kind, ElementType.FLOAT32) for kind in (ElementType.BFLOAT16, ElementType.FLOAT16)}
    | {(kind, ElementType.FLOAT8_E4M3) for kind in (ElementType.BFLOAT16, ElementType.FLOAT16)}
)
"""The (source, destination) types that can be copied."""


@dataclass(frozen=True, eq=False)
class Bases:
    """The memory that slices address: element type (or ANY_TYPE) and bytes of every base."""

    types: NDArray[np.int64]
    num_bytes: NDArray[np.int64]


def is_empty(slices: Array) -> NDArray[np.bool_]:
    """Which slices [SLICE] have no elements: whatever else they say, nothing is done for them."""
    empty: NDArray[np.bool_] = (slices["rows"] == 0) | (slices["cols"] == 0)
    return empty


def quantises(slices: Array) -> NDArray[np.bool_]:
    """Which slices [SLICE] quantise."""
    to_float8: NDArray[np.bool_] = slices["dst_type"] == ElementType.FLOAT8_E4M3
    from_float8: NDArray[np.bool_] = slices["src_type"] == ElementType.FLOAT8_E4M3
    return to_float8 & ~from_float8


def check_slices(slices: Array) -> None:
    """Refuse slices [SLICE] that no memory could make right: ValueError that names the first one."""
    if slices.dtype != SLICE or slices.ndim != 1:
        raise ValueError(f"slices are {slices.dtype} of shape {slices.shape}; expected one dimension of SLICE")
    supported = np.zeros((256, 256), dtype=bool)
    supported[tuple(np.array(sorted(PAIRS)).T)] = True
    _refuse(~supported[slices["src_type"], slices["dst_type"]], slices, "its pair of types cannot be copied")
    for name in ("rows", "cols", "src_offset", "dst_offset", "src_stride", "dst_stride"):
        _refuse(slices[name] < 0, slices, f"{name} is negative")
    overlap = (slices["rows"] > 1) & (slices["dst_stride"] < slices["cols"])
    _refuse(overlap, slices, "its rows overlap in the destination: dst_stride is less than cols")
    quantised = quantises(slices)
    _refuse(quantised & (slices["amax_base"] < 0), slices, "it quantises and has no amax_base")
    _refuse(~quantised & (slices["amax_base"] != -1), slices, "it has an amax_base and does not quantise")
    for name in ("amax_offset", "amax_stride"):
        _refuse(quantised & (slices[name] < 0), slices, f"{name} is negative")
    for name in ("row_phase", "col_phase"):
        _refuse(quantised & (slices[name] >= BLOCK), slices, f"{name} is not within a block of {BLOCK}")


def check_bounds(slices: Array, bases: Bases) -> None:
    """Refuse slices [SLICE] that leave their bases or meet another element type there: ValueError that names the slice
    and the base."""
    for side in ("src", "dst"):
        check_side(slices, side, slices[f"{side}_type"], slices["rows"], slices["cols"], bases)
    quantised = quantises(slices) & ~is_empty(slices)
    rows = np.where(quantised, blocks_spanned(slices["row_phase"], slices["rows"]), 0)
    cols = np.where(quantised, blocks_spanned(slices["col_phase"], slices["cols"]), 0)
    check_side(slices, "amax", np.full(len(slices), ElementType.FLOAT32, dtype=np.uint8), rows, cols, bases)


def alignment(slices: Array, num_bases: int) -> NDArray[np.int64]:
    """[bases]: the bytes of which every base's address must be a multiple."""
    result = np.ones(num_bases, dtype=np.int64)
    slices = slices[~is_empty(slices)]
    for side in ("src", "dst"):
        np.maximum.at(result, slices[f"{side}_base"], ITEM_BYTES[slices[f"{side}_type"]])
    np.maximum.at(result, slices["amax_base"][quantises(slices)], ITEM_BYTES[ElementType.FLOAT32])
    return result


def blocks_spanned(phase: Numbers, length: Numbers) -> NDArray[np.int64]:
    """Blocks that `length` elements touch of which the first is at `phase` within its block."""
    result: NDArray[np.int64] = (phase + length + BLOCK - 1) // BLOCK
    return result


def check_side(slices: Array, side: str, kinds: Numbers, rows: Numbers, cols: Numbers, bases: Bases) -> None:
    """`check_bounds` on one side ("src", "dst", "amax"), where slices have `rows` and `cols` of types `kinds`."""
    used = np.flatnonzero((rows > 0) & (cols > 0))
    base = slices[f"{side}_base"][used]
    stranger = (base < 0) | (base >= len(bases.types))
    _refuse(stranger, slices, f"{side}_base is not one of the {len(bases.types)} bases", at=used)
    other = (bases.types[base] != ANY_TYPE) & (bases.types[base] != kinds[used])
    _refuse(other, slices, f"base {side}_base does not hold the elements that it copies there", at=used)
    # In float64, which is exact below 2**53 and does not wrap around above.
    last_row = (rows[used] - 1.0) * slices[f"{side}_stride"][used]
    num_bytes = (slices[f"{side}_offset"][used] + last_row + cols[used]) * ITEM_BYTES[kinds[used]]
    outside = num_bytes > bases.num_bytes[base]
    _refuse(outside, slices, f"it leaves base {side}_base", at=used, num_bytes=(num_bytes, bases.num_bytes[base]))


def _refuse(
    wrong: NDArray[np.bool_],
    slices: Array,
    reason: str,
    *,
    at: NDArray[np.intp] | None = None,
    num_bytes: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None,
) -> None:
    """ValueError about the first slice that is `wrong`, which is said of slices[at]."""
    if not wrong.any():
        return
    place = int(wrong.argmax())
    number = place if at is None else int(at[place])
    fields = ", ".join(f"{name}={slices[number][name]}" for name in SLICE.names or ())
    if num_bytes is not None:
        reason += f", of {num_bytes[1][place]} bytes: it ends {num_bytes[0][place]:.0f} bytes after its beginning"
    raise ValueError(f"slice {number} of {len(slices)}: {reason} ({fields})")


# Cutting slices into the tiles that warps of the CUDA kernels take.

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


# Numbers of csrc/reshard_delta.h. Apart from changes.py because that loads torch.

DELTA_BLOCK, DELTA_WHOLE = 256, 255
"""RS_DELTA_BLOCK and RS_DELTA_WHOLE: elements of a block, and the length of one that is sent whole."""
