"""FP8 as layouts. The scales of blocks are tensors of the checkpoint. Every rank's share of them is in separate
parameters.

A quantised tensor [R, C] is cut into blocks of 128 x 128 of its own rows and columns, even if it is fused with other
tensors on either side. Its scales are one more canonical tensor, `<name>_scale_inv` [ceil(R / 128), ceil(C / 128)].

If pieces of a tensor begin or end inside a block, several of them touch it. On a source rank every piece has an entry
for each touched block. In the layout, however, a block belongs only to the piece with its first element, because the
boxes of a source must not overlap. On a destination, a share holds the scales of all touched blocks.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from rltrain.models.table import Array, CanonicalTensors, ElementType, IntArray
from rltrain.reshard.layout import BOX_FIELDS, PIECE, Layout, Parameters, RankLayout, boxes_of
from rltrain.reshard.native import BLOCK

BoolArray = NDArray[np.bool_]

SCALES_PARAMETER = "block_scales"
"""The parameter of a source rank for the scales of all blocks touched by its pieces."""

SCALE_SUFFIX = "_scale_inv"
"""The suffix of scales, added to the names of quantised tensors and parameters."""


@dataclass(frozen=True, eq=False)
class QuantizedLayouts:
    """Both layouts of a reshard, extended by scales.

    Tensors keep their numbers. `which` [tensors] marks the quantised tensors, without the scales. `scale_of` [tensors]
    is the number of each tensor's scales, or -1 without scales.
    """

    source: Layout
    destination: Layout
    which: BoolArray
    scale_of: IntArray

    @cached_property
    def num_tensors(self) -> int:
        """The number of tensors without the scales."""
        return len(self.which)

    @cached_property
    def block_counts(self) -> IntArray:
        """Rows and columns of blocks of every tensor without the scales, shape [tensors, 2]."""
        counts: IntArray = -(-self.source.tensors.matrix_shapes[: self.num_tensors] // BLOCK)
        return counts

    @cached_property
    def first_block(self) -> IntArray:
        """The number of every tensor's first block, shape [tensors]. Blocks of all tensors are numbered
        consecutively."""
        sizes = self.block_counts.prod(axis=1)
        first: IntArray = np.cumsum(sizes) - sizes
        return first

    @cached_property
    def split_blocks(self) -> IntArray:
        """Numbers of the blocks touched by several distinct boxes of the source, ascending. They are equal on every
        rank."""
        per_part = [self.quantised_pieces(part) for part in sorted(set(self.source.parts))]
        boxes = np.concatenate([boxes_of(pieces[self._cuts_blocks(pieces)]) for pieces in per_part])
        return np.unique(self.cut_blocks(boxes)[1])

    def quantised_pieces(self, part: int) -> Array:
        """Returns the pieces [PIECE] of a source part to be quantised, in their order there."""
        pieces = self.source.part(part).pieces
        chosen: Array = pieces[self.destination.types[pieces["tensor"]] == ElementType.FLOAT8_E4M3]
        return chosen

    def cut_blocks(self, boxes: Array) -> tuple[IntArray, IntArray]:
        """Returns (index into `boxes`, block number) of all blocks touched but only partly held by a box.

        Some occur more than once. The boxes of a source cover its tensors, so other boxes touch these blocks too.
        """
        at = np.flatnonzero(self._cuts_blocks(boxes))
        touched = touched_blocks(boxes[at])
        top, bottom, left, right = self._cut_sides(boxes[at])
        last_row, last_col = touched["row"] + touched["rows"] - 1, touched["col"] + touched["cols"] - 1
        sides = []
        for cut, field, place, extent in (
            (top, "row", touched["row"], "rows"),
            (bottom, "row", last_row, "rows"),
            (left, "col", touched["col"], "cols"),
            (right, "col", last_col, "cols"),
        ):
            strip = touched[cut].copy()
            strip[field], strip[extent] = place[cut], 1
            box, row, col = _cells(strip)
            sides.append((np.flatnonzero(cut)[box], self.block_numbers(strip["tensor"][box], row, col)))
        box, block = (np.concatenate(field) for field in zip(*sides, strict=True))
        return at[box], block

    def block_numbers(self, tensor: IntArray, row: IntArray, col: IntArray) -> IntArray:
        """Returns the numbers of blocks, given by rows and columns of blocks."""
        numbers: IntArray = self.first_block[tensor] + row * self.block_counts[tensor, 1] + col
        return numbers

    def _cuts_blocks(self, boxes: Array) -> BoolArray:
        cuts: BoolArray = np.logical_or.reduce(self._cut_sides(boxes))
        return cuts

    def _cut_sides(self, boxes: Array) -> tuple[BoolArray, BoolArray, BoolArray, BoolArray]:
        """Returns (top, bottom, left, right), whether each side of a box is inside a block. The tensor's edges do not
        count."""
        sides = []
        shapes = self.source.tensors.matrix_shapes[boxes["tensor"]]
        for axis, (start, extent) in enumerate((("row", "rows"), ("col", "cols"))):
            stop = boxes[start] + boxes[extent]
            sides += [boxes[start] % BLOCK != 0, (stop % BLOCK != 0) & (stop < shapes[:, axis])]
        top, bottom, left, right = sides
        return top, bottom, left, right


def quantized(source: Layout, destination: Layout, which: BoolArray) -> QuantizedLayouts:
    """Returns both layouts with the tensors `which` [tensors] in FP8 on the destination, and with their scales.

    A source rank with any quantised tensor gets the parameter SCALES_PARAMETER, one flat float32 array. On the
    destination every parameter of quantised tensors gets the float32 parameter `<parameter>_scale_inv`. Its pieces are
    stacked like the parameter's, in blocks. If blocks of unequal shapes do not stack, it is flat, one piece after
    another. Raises ValueError if a tensor of `which` cannot be quantised.
    """
    which = np.asarray(which, dtype=bool)
    _check(source, destination, which)
    quantised = np.flatnonzero(which)
    scale_of = np.full(len(which), -1, dtype=np.int64)
    scale_of[quantised] = len(which) + np.arange(len(quantised))
    tensors = _with_scales(source.tensors, quantised)
    scale_types = np.full(len(quantised), ElementType.FLOAT32, dtype=np.uint8)
    destination_types = np.where(which, ElementType.FLOAT8_E4M3, destination.types).astype(np.uint8)
    return QuantizedLayouts(
        source=Layout(
            ranks=source.ranks,
            parts=source.parts,
            tensors=tensors,
            types=np.concatenate([source.types, scale_types]),
            build=partial(_build_source, source, scale_of),
        ),
        destination=Layout(
            ranks=destination.ranks,
            parts=destination.parts,
            tensors=tensors,
            types=np.concatenate([destination_types, scale_types]),
            build=partial(_build_destination, destination, scale_of),
        ),
        which=which,
        scale_of=scale_of,
    )


def touched_blocks(boxes: Array) -> Array:
    """Returns boxes of blocks, in rows and columns of blocks. They have all blocks with an element of each box."""
    return _in_blocks(boxes, boxes["row"] // BLOCK, boxes["col"] // BLOCK)


def owned_blocks(boxes: Array) -> Array:
    """Returns boxes of blocks, possibly empty, in rows and columns of blocks. They have the blocks with their first
    element in each box."""
    return _in_blocks(boxes, -(-boxes["row"] // BLOCK), -(-boxes["col"] // BLOCK))


def _in_blocks(boxes: Array, row: IntArray, col: IntArray) -> Array:
    blocks = boxes_of(boxes)
    blocks["row"], blocks["col"] = row, col
    blocks["rows"] = -(-(boxes["row"] + boxes["rows"]) // BLOCK) - row
    blocks["cols"] = -(-(boxes["col"] + boxes["cols"]) // BLOCK) - col
    return blocks


def _cells(boxes: Array) -> tuple[IntArray, IntArray, IntArray]:
    """Returns (number of its box, row, column) of every cell of every box, row by row."""
    count = boxes["rows"] * boxes["cols"]
    box = np.repeat(np.arange(len(boxes)), count)
    inside = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    width = boxes["cols"][box]
    return box, boxes["row"][box] + inside // width, boxes["col"][box] + inside % width


def _check(source: Layout, destination: Layout, which: BoolArray) -> None:
    tensors = source.tensors
    if tensors is not destination.tensors and tensors != destination.tensors:
        raise ValueError("the layouts are of different models: their canonical tensors differ")
    if which.shape != (len(tensors.names),):
        raise ValueError(f"which tensors to quantise has shape {which.shape}; expected ({len(tensors.names)},)")
    for number in np.flatnonzero(which).tolist():
        if len(tensors.shapes[number]) < 2:
            raise ValueError(
                f"{tensors.names[number]} {tensors.shapes[number]} cannot be quantised: it is not a matrix"
            )
    for side, types in (("source", source.types), ("destination", destination.types)):
        already = np.flatnonzero(which & (types == ElementType.FLOAT8_E4M3))
        if len(already):
            raise ValueError(
                f"{tensors.names[already[0]]} cannot be quantised: it is float8_e4m3 in the {side} already"
            )


def _with_scales(tensors: CanonicalTensors, quantised: IntArray) -> CanonicalTensors:
    shapes = -(-tensors.matrix_shapes[quantised] // BLOCK)
    return CanonicalTensors(
        names=(*tensors.names, *(tensors.names[number] + SCALE_SUFFIX for number in quantised.tolist())),
        shapes=(*tensors.shapes, *map(tuple, shapes.tolist())),
    )


def _build_source(base: Layout, scale_of: IntArray, part: int) -> RankLayout:
    on = base.build(part)
    boxes = boxes_of(on.pieces[scale_of[on.pieces["tensor"]] >= 0])
    if not len(boxes):
        return on
    touched, owned = touched_blocks(boxes), owned_blocks(boxes)
    start, num_entries = entries_of(touched)
    scales = np.zeros(len(boxes), dtype=PIECE)
    for name in BOX_FIELDS:
        scales[name] = owned[name]
    scales["tensor"], scales["stride"] = scale_of[boxes["tensor"]], touched["cols"]
    above, before = owned["row"] - touched["row"], owned["col"] - touched["col"]
    scales["offset"] = start + above * touched["cols"] + before
    scales = scales[(owned["rows"] > 0) & (owned["cols"] > 0)]

    def parameters() -> Parameters:
        return ((SCALES_PARAMETER, (num_entries,)), *base.build(part).parameters)

    return RankLayout(parameters, _after(1, scales, on.pieces))


def _after(num_parameters: int, scales: Array, pieces: Array) -> Array:
    """Returns pieces of scales in the first `num_parameters` parameters, and `pieces` in the following ones.

    Scales come first, because the number of other parameters is not known before they are listed.
    """
    pieces = pieces.copy()
    pieces["parameter"] += num_parameters
    return np.concatenate([scales, pieces])


def entries_of(touched: Array) -> tuple[IntArray, int]:
    """Returns (the first entry of each piece, the number of entries). A piece has one entry per touched block, row by
    row."""
    size = touched["rows"] * touched["cols"]
    end = np.cumsum(size)
    return end - size, int(end[-1]) if len(end) else 0


def _build_destination(base: Layout, scale_of: IntArray, part: int) -> RankLayout:
    on = base.build(part)
    pieces = _by_parameter(on, scale_of)
    if not len(pieces):
        return on
    numbers, first, count = np.unique(pieces["parameter"], return_index=True, return_counts=True)
    mixed = np.intersect1d(numbers, on.pieces["parameter"][scale_of[on.pieces["tensor"]] < 0])
    if len(mixed):
        raise ValueError(f"{on.parameters[mixed[0]][0]} holds both tensors to be quantised and others")
    touched = touched_blocks(pieces)
    start, _ = entries_of(touched)
    scales = np.zeros(len(pieces), dtype=PIECE)
    for name in BOX_FIELDS:
        scales[name] = touched[name]
    scales["tensor"] = scale_of[pieces["tensor"]]
    scales["parameter"] = np.repeat(np.arange(len(numbers)), count)
    scales["offset"], scales["stride"] = start - np.repeat(start[first], count), touched["cols"]
    parameters = partial(_destination_parameters, base, scale_of, part)
    return RankLayout(parameters, _after(len(numbers), scales, on.pieces))


def _destination_parameters(base: Layout, scale_of: IntArray, part: int) -> Parameters:
    """Builds the parameters each time, because only one rank asks. So they are not kept for all parts."""
    on = base.build(part)
    pieces = _by_parameter(on, scale_of)
    numbers, first = np.unique(pieces["parameter"], return_index=True)
    scales = [
        (on.parameters[number][0] + SCALE_SUFFIX, _shape_of_scales(on.parameters[number][1], held))
        for number, held in zip(numbers.tolist(), np.split(pieces, first[1:]), strict=True)
    ]
    return (*scales, *on.parameters)


def _by_parameter(on: RankLayout, scale_of: IntArray) -> Array:
    """Returns the pieces to be quantised, by parameter and offset."""
    pieces = on.pieces[scale_of[on.pieces["tensor"]] >= 0]
    ordered: Array = pieces[np.lexsort((pieces["offset"], pieces["parameter"]))]
    return ordered


def _shape_of_scales(shape: tuple[int, ...], pieces: Array) -> tuple[int, ...]:
    """Returns the shape of the scales of a parameter of this shape. `pieces` must be sorted by offset.

    If the pieces are equally wide and one below the other, so are their blocks. The shape is then [rows, cols], or
    [experts, rows, cols] if every expert has as many rows. All others have a flat shape. In memory both are one piece
    after another.
    """
    touched = touched_blocks(pieces)
    width, rows, cols = shape[-1], touched["rows"], touched["cols"]
    below = (pieces["stride"] == width) | (pieces["rows"] == 1)
    if not below.all() or np.ptp(pieces["offset"] % width) or np.ptp(cols):
        return (int((rows * cols).sum()),)
    if len(shape) == 3:
        per_expert = np.bincount(pieces["offset"] // (shape[1] * width), weights=rows, minlength=shape[0])
        if not np.ptp(per_expert):
            return shape[0], int(per_expert[0]), int(cols[0])
    return int(rows.sum()), int(cols[0])


# The scale of every element of quantised parameters, on a destination rank.


@dataclass(frozen=True, eq=False)
class ScalePlaces:
    """The places of a matrix's scales. Element (r, c) is scaled by number `entries[r, column_blocks[c]]` of its
    flattened scales.

    `entries` has shape [rows, blocks of a row], and `column_blocks` has shape [columns]. Rows of stacked matrices are
    numbered consecutively.
    """

    entries: IntArray
    column_blocks: IntArray


def scale_places(layout: Layout, rank: int) -> dict[str, ScalePlaces]:
    """Returns the scale places of every FP8 matrix of `rank`, by name. `layout` is the destination of `quantized`.

    Raises ValueError for a parameter with pieces side by side. No engine has one.
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
