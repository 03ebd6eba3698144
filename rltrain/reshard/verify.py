"""Verifies a reshard by checksums of canonical tensors. Every destination rank must hold the values of the source
ranks.

A checksum is a sum over elements, modulo 2**64. Each element gives a number made from its bits and its place in the
canonical tensor (csrc/reshard.h). So the checksum of a rank's part of a tensor is the sum over all boxes sent to it, by
any ranks. A sender computes it from its own memory instead of packed bytes, and converts by torch operations. A
destination computes it from the pieces of its layout instead of the plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rltrain.errors import SyncMismatchError
from rltrain.models.table import Array, CanonicalTensors, ElementType, IntArray
from rltrain.reshard.checksums import BOX, checksums
from rltrain.reshard.copy_table import (
    DTYPES,
    MAX_ELEMENTS,
    block_amax,
    inverse_scales_of,
    per_element,
    quantize_blocks,
    quantize_elements,
    scales_of,
)
from rltrain.reshard.fp8_blocks import SCALE_SUFFIX, SCALES_PARAMETER
from rltrain.reshard.fp8_scales import PLACE_IN_BLOCKS, BlockTable, SplitBlocks
from rltrain.reshard.layout import BOX_FIELDS, PIECE, Layout, boxes_of, distinct, elements
from rltrain.reshard.native import BLOCK
from rltrain.reshard.plan import RankPlan

RECORD = np.dtype([("peer", np.int64), ("tensor", np.int64), ("checksum", np.int64)])
"""The checksum of all boxes of one tensor between this rank and `peer`."""

Values = Callable[[int, int, int], Tensor]
"""(number of a box, first row, number of rows) -> these rows of the box, in the type of the destination."""


@torch.no_grad()
def verify(
    plan: RankPlan,
    source: Layout,
    destination: Layout,
    source_tensors: Mapping[str, Tensor] | None,
    destination_tensors: Mapping[str, Tensor] | None,
    *,
    group: dist.ProcessGroup | None,
    blocks: BlockTable | None = None,
) -> None:
    """Compares this rank's `destination_tensors` after a reshard with the `source_tensors` of all ranks.

    `plan` is this rank's plan for these layouts. With layouts of `quantized`, `blocks` is this rank's table, and
    `source_tensors` have no scales. They are computed again. Everything must be equal bit for bit, except for NaNs of a
    tensor with two types. Fanned-out boxes are compared with the memory of the forwarding rank. Values without
    conversion are read once, in place.

    Raises SyncMismatchError on every rank, about the lowest differing tensor of all ranks. Collective over: `group`
    (gloo), the ranks of both layouts. None means this rank is alone.
    """
    checksums = _Checksums(source, destination)
    wanted = _flats(plan.destination_parameters, destination_tensors)
    pieces = destination.on(plan.rank).pieces if plan.rank in destination.ranks else np.empty(0, dtype=PIECE)
    found = checksums.of(pieces, plan.rank, _as_held(wanted, pieces))
    held = _Source(plan, source_tensors, blocks, group)
    stages = (
        (plan.copies, plan.rank, held.converted(plan.copies, "source_")),
        (plan.direct.sends, plan.direct.sends["peer"], held.converted(plan.direct.sends)),
        (plan.fan_out.sends, plan.fan_out.sends["peer"], _as_held(wanted, plan.fan_out.sends)),
    )
    sent = np.concatenate([checksums.of(boxes, peer, memory) for boxes, peer, memory in stages])
    received = _exchange(sent, plan.rank, group)
    totals = np.zeros((2, len(source.tensors.names)), dtype=np.int64)
    for total, records in zip(totals, (found, received), strict=True):
        np.add.at(total, records["tensor"], records["checksum"])
    _compare(np.flatnonzero(totals[0] != totals[1]), sent, source.tensors, plan.rank, group)


@dataclass(frozen=True, eq=False)
class _Held:
    """The memory of boxes. Their places are in their fields with `prefix`.

    Boxes marked by `in_place` are read directly. The others are computed by `values`.
    """

    flats: Sequence[Tensor]
    prefix: str
    in_place: NDArray[np.bool_]
    values: Values | None = None


class _Checksums:
    """The checksums of boxes, per tensor and per peer."""

    def __init__(self, source: Layout, destination: Layout) -> None:
        self._widths = source.tensors.matrix_shapes[:, 1]
        self._same_type = source.types == destination.types

    def of(self, boxes: Array, peer: IntArray | int, held: _Held) -> Array:
        """Returns [RECORD], one per peer and tensor among `boxes`."""
        keys = np.stack([np.broadcast_to(peer, len(boxes)), boxes["tensor"]], axis=1)
        pairs, entries = np.unique(keys.astype(np.int64), axis=0, return_inverse=True)
        summed = self._summed(boxes, entries.reshape(-1), held.prefix)
        sums = checksums(summed[held.in_place], held.flats, len(pairs))
        for number in np.flatnonzero(~held.in_place).tolist():
            assert held.values is not None, "boxes that are not read in place are converted"
            self._add_converted(sums, summed[number], number, held.values)
        records = np.zeros(len(pairs), dtype=RECORD)
        records["peer"], records["tensor"], records["checksum"] = pairs[:, 0], pairs[:, 1], sums
        return records

    def _summed(self, boxes: Array, entries: IntArray, prefix: str) -> Array:
        """Returns `boxes` as [BOX]."""
        summed = np.zeros(len(boxes), dtype=BOX)
        summed["base"] = boxes[prefix + "parameter"]
        summed["offset"], summed["stride"] = boxes[prefix + "offset"], boxes[prefix + "stride"]
        summed["rows"], summed["cols"], summed["entry"] = boxes["rows"], boxes["cols"], entries
        summed["width"] = self._widths[boxes["tensor"]]
        summed["place"] = boxes["row"] * summed["width"] + boxes["col"]
        summed["exact"] = self._same_type[boxes["tensor"]]
        return summed

    def _add_converted(self, sums: IntArray, box: np.void, number: int, values: Values) -> None:
        """Adds the checksum of `box`. Its number for `values` is `number`."""
        step = max(MAX_ELEMENTS // max(int(box["cols"]), 1), 1)
        for first in range(0, int(box["rows"]), step):
            part = values(number, first, min(step, int(box["rows"]) - first)).contiguous()
            summed = np.array([box], dtype=BOX)
            summed["base"] = summed["offset"] = 0
            summed["rows"], summed["stride"] = len(part), box["cols"]
            summed["place"] += first * box["width"]
            sums += checksums(summed, [part], len(sums))


def _flats(parameters: Sequence[tuple[str, tuple[int, ...]]], tensors: Mapping[str, Tensor] | None) -> list[Tensor]:
    return [] if tensors is None else [tensors[name].detach().view(-1) for name, _ in parameters]


def _rows(flat: Tensor, box: np.void, prefix: str, first: int, rows: int) -> Tensor:
    """Returns rows of a box in its parameter, shape [rows, cols]."""
    stride = int(box[prefix + "stride"])
    return flat[int(box[prefix + "offset"]) + first * stride :].as_strided((rows, int(box["cols"])), (stride, 1))


def _as_held(flats: list[Tensor], boxes: Array) -> _Held:
    """Returns the memory of `boxes` in the destination."""
    return _Held(flats, "", np.ones(len(boxes), dtype=bool))


class _Source:
    """A rank's source parameters, converted by torch to the types of the destination.

    Collective over: `group`, if `blocks` are given and any of them is split.
    """

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, Tensor] | None,
        blocks: BlockTable | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._source_types, self._types, self._blocks = plan.source_types, plan.destination_types, blocks
        # The scales are the first parameter and are made here.
        self._flats = _flats([(n, shape) for n, shape in plan.source_parameters if n != SCALES_PARAMETER], tensors)
        if blocks is None:
            return
        device = self._flats[0].device if self._flats else torch.device("cpu")
        self._amax = torch.zeros(blocks.num_entries, device=device)
        if blocks.num_entries:
            self._flats.insert(0, self._amax)
            self._measure(blocks)
        SplitBlocks(blocks, device).share(self._amax, group)
        self._inverse = inverse_scales_of(self._amax)
        if blocks.num_entries:
            self._flats[0] = scales_of(self._amax)

    def converted(self, boxes: Array, prefix: str = "") -> _Held:
        """Returns the converted memory of `boxes`. Their places are in their fields with `prefix`."""
        to_float8, from_float8 = (
            types[boxes["tensor"]] == ElementType.FLOAT8_E4M3 for types in (self._types, self._source_types)
        )
        quantised = to_float8 & ~from_float8
        places = np.zeros(len(boxes), dtype=PLACE_IN_BLOCKS)
        if quantised.any():
            assert self._blocks is not None, "the plan quantises: its blocks must be given"
            places[quantised] = self._blocks.places(boxes[quantised])

        def values(number: int, first: int, rows: int) -> Tensor:
            box = boxes[number]
            part = _rows(self._flats[int(box[prefix + "parameter"])], box, prefix, first, rows)
            dtype = DTYPES[ElementType(self._types[box["tensor"]])]
            if not quantised[number]:
                return part.to(dtype)
            place = places[number]
            phases = int(place["row_phase"]) + first, int(place["col_phase"])
            inverse = _entries(self._inverse, place, phases[0] + rows, phases[1] + part.shape[1])
            return quantize_elements(part, per_element(inverse, part.shape, row_phase=phases[0], col_phase=phases[1]))

        as_it_is = self._types[boxes["tensor"]] == self._source_types[boxes["tensor"]]
        return _Held(self._flats, prefix, as_it_is, values)

    def _measure(self, blocks: BlockTable) -> None:
        """Writes the largest magnitudes of this rank's blocks, as far as it holds them."""
        for piece, place in zip(blocks.pieces, blocks.places(blocks.pieces), strict=True):
            rows, above, left = int(piece["rows"]), int(place["row_phase"]), int(place["col_phase"])
            entries = _entries(self._amax, place, above + rows, left + int(piece["cols"]))
            part = _rows(self._flats[int(piece["parameter"])], piece, "", 0, rows)
            entries.copy_(block_amax(torch.nn.functional.pad(part, (left, 0, above, 0))))


def _entries(table: Tensor, place: np.void, rows: int, cols: int) -> Tensor:
    """Returns the entries of the blocks spanned by `rows` and `cols` elements. Elements count from the beginning of the
    first block."""
    shape = -(-rows // BLOCK), -(-cols // BLOCK)
    return table[int(place["amax_offset"]) :].as_strided(shape, (int(place["amax_stride"]), 1))


def _exchange(sent: Array, rank: int, group: dist.ProcessGroup | None) -> Array:
    """Exchanges records [RECORD] between the ranks of `group`. Takes the records `sent` by this rank and returns those
    sent to it, with the senders as peers."""
    if group is None:
        return sent
    ranks = np.array(dist.get_process_group_ranks(group), dtype=np.int64)
    sent = sent[np.argsort(np.searchsorted(ranks, sent["peer"]), kind="stable")]
    counts = torch.from_numpy(np.bincount(np.searchsorted(ranks, sent["peer"]), minlength=len(ranks)))
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    outgoing = torch.from_numpy(np.stack([sent["tensor"], sent["checksum"]], axis=1))
    incoming = torch.empty((int(theirs.sum()), 2), dtype=torch.int64)
    dist.all_to_all_single(incoming, outgoing, theirs.tolist(), counts.tolist(), group=group)
    received = np.zeros(len(incoming), dtype=RECORD)
    received["peer"] = np.repeat(ranks, theirs.numpy())
    received["tensor"], received["checksum"] = incoming.numpy().T
    return received


def _compare(
    differing: IntArray, sent: Array, tensors: CanonicalTensors, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Raises SyncMismatchError on all ranks, about the lowest differing tensor of all ranks. `differing` are the
    differing tensors of this rank."""
    none = len(tensors.names)
    lowest = torch.tensor([differing[0] if len(differing) else none])
    if group is not None:
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    tensor = int(lowest[0])
    if tensor == none:
        return
    wrong = _ranks_where(tensor in differing, rank, group)
    receivers = sent["peer"][sent["tensor"] == tensor]
    senders = _ranks_where(bool(np.isin(receivers, wrong).any()), rank, group)
    raise SyncMismatchError(
        f"after the weight sync {tensors.names[tensor]} differs on rank(s) {_listed(wrong)} from what rank(s) "
        f"{_listed(senders)} sent: its checksums were expected to be equal (weight_sync.verify). Either values changed "
        "on the way, or one side wrote to its weights meanwhile. To find out, sync with "
        "weight_sync.transport=full_gather, which uses no plan, and with RLTRAIN_NATIVE=off, which uses no kernels."
    )


def _ranks_where(condition: bool, rank: int, group: dist.ProcessGroup | None) -> list[int]:
    """Returns the ranks of `group` with a true `condition`."""
    if group is None:
        return [rank] if condition else []
    ranks = dist.get_process_group_ranks(group)
    flags = torch.zeros(len(ranks), dtype=torch.int32)
    flags[ranks.index(rank)] = int(condition)
    dist.all_reduce(flags, group=group)
    return [other for other, flag in zip(ranks, flags.tolist(), strict=True) if flag]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


# A slow reshard, to compare the fast one with. Every tensor is assembled in full on every rank.
#
# It shares only the layouts with the fast reshard. It has no plan, no buckets and no kernels.

# As in csrc/reshard.h, because torch's own differ between devices. From bfloat16 to float32 a NaN keeps its bits.
_NANS = {torch.float32: 0x7FFFFFFF, torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def full_gather_sync(
    source: Layout,
    destination: Layout,
    source_tensors: Mapping[str, Tensor] | None,
    destination_tensors: Mapping[str, Tensor] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Writes this rank's `destination_tensors` from the `source_tensors` of all ranks. Both are given by the names of
    their layouts.

    A rank of only one layout passes None for the other. Takes layouts of `quantized` too, and makes the scales itself.
    `source_tensors` must then have no scales. At any time a rank holds one tensor of the model twice, in addition to
    its own tensors. Raises ValueError if the source lacks a part of a tensor.

    Collective over: `group`, the ranks of both layouts. None means this rank is alone.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    held, wanted = _Share(source, rank, source_tensors), _Share(destination, rank, destination_tensors)
    flats = [*held.flats.values(), *wanted.flats.values()]
    over_gloo = group is not None and dist.get_backend(group) == "gloo"
    link = _Link(rank, group, torch.device("cpu") if over_gloo else flats[0].device)
    boxes, first_holder = _distinct_boxes(source)
    scales_of = _scales(source, destination)
    needed = {tensor for part in set(destination.parts) for tensor in destination.part(part).pieces["tensor"].tolist()}
    for tensor in sorted(needed - set(scales_of.values())):
        low, high = np.searchsorted(boxes["tensor"], [tensor, tensor + 1])
        full = _assembled(source, boxes[low:high], first_holder[low:high], held, tensor, link)
        if tensor in scales_of:
            full, scales = quantize_blocks(full)
            wanted.write(scales_of[tensor], scales)
        wanted.write(tensor, converted(full, DTYPES[ElementType(destination.types[tensor])]))


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in `dtype`, rounded to nearest even, with the NaNs of csrc/reshard.h."""
    if x.dtype == dtype:
        return x
    result = x.to(dtype)
    if x.dtype != torch.bfloat16:
        result.view(_BITS[dtype.itemsize]).masked_fill_(x.isnan(), _NANS[dtype])
    return result


@dataclass(frozen=True)
class _Link:
    """This rank, its group, and the device of the group's messages."""

    rank: int
    group: dist.ProcessGroup | None
    device: torch.device


def copy_bits(destination: Tensor, source: Tensor) -> None:
    """Copies as integers, because a copy of floats may quieten a NaN. Raises ValueError if the types differ."""
    if destination.dtype != source.dtype:
        raise ValueError(f"a tensor is {destination.dtype}, another {source.dtype}; their layouts say they are alike")
    bits = _BITS[source.dtype.itemsize]
    destination.view(bits).copy_(source.view(bits))


class _Share:
    """One rank's part of a layout, with parameters as flat views and the pieces of every tensor."""

    def __init__(self, layout: Layout, rank: int, tensors: Mapping[str, Tensor] | None) -> None:
        self.flats: dict[int, Tensor] = {}
        self.pieces: dict[int, list[np.void]] = {}
        if rank not in layout.ranks:
            return
        if tensors is None:
            raise ValueError(f"rank {rank} is in the layout of ranks {layout.ranks}, but no tensors of it were given")
        on = layout.on(rank)
        for number, (name, shape) in enumerate(on.parameters):
            if name == SCALES_PARAMETER:
                continue
            if name not in tensors or tuple(tensors[name].shape) != shape:
                found = tuple(tensors[name].shape) if name in tensors else "absent"
                raise ValueError(f"tensor {name} of rank {rank} is {found}; the layout says {shape}")
            self.flats[number] = tensors[name].detach().view(-1)
        for piece in on.pieces:
            self.pieces.setdefault(int(piece["tensor"]), []).append(piece)

    def box(self, piece: np.void) -> Tensor:
        """Returns the elements of a piece, shape [rows, cols]."""
        flat = self.flats[int(piece["parameter"])]
        rows, cols, stride = (int(piece[name]) for name in ("rows", "cols", "stride"))
        return flat[int(piece["offset"]) :].as_strided((rows, cols), (stride, 1))

    def find(self, box: np.void) -> Tensor:
        """Returns the elements of a box. The box must be one of the pieces."""
        pieces = self.pieces[int(box["tensor"])]
        return self.box(next(piece for piece in pieces if all(piece[name] == box[name] for name in BOX_FIELDS)))

    def write(self, tensor: int, full: Tensor) -> None:
        """Writes this rank's pieces of `tensor` from the full tensor."""
        for piece in self.pieces.get(tensor, []):
            row, col, rows, cols = (int(piece[name]) for name in ("row", "col", "rows", "cols"))
            part = full[row : row + rows, col : col + cols]
            copy_bits(self.box(piece), part)


def _scales(source: Layout, destination: Layout) -> dict[int, int]:
    """Returns the number of each quantised tensor's scales, by the number of the tensor."""
    float8 = ElementType.FLOAT8_E4M3
    quantised = np.flatnonzero((destination.types == float8) & (source.types != float8)).tolist()
    names = source.tensors.names
    return {number: source.tensors.numbers[names[number] + SCALE_SUFFIX] for number in quantised}


def _distinct_boxes(layout: Layout) -> tuple[Array, IntArray]:
    """Returns (the distinct boxes of all ranks sorted by tensor, the lowest holder of each)."""
    per_rank = [boxes_of(layout.on(rank).pieces) for rank in sorted(layout.ranks)]
    boxes, inverse = distinct(np.concatenate(per_rank))
    holder = np.repeat(sorted(layout.ranks), [len(boxes) for boxes in per_rank])
    first = np.full(len(boxes), np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, holder)
    return boxes, first


def _assembled(source: Layout, boxes: Array, first_holder: IntArray, held: _Share, tensor: int, link: _Link) -> Tensor:
    """Returns tensor number `tensor` in full, from its distinct `boxes`. Collective over: the group of `link`."""
    name, (rows, cols) = source.tensors.names[tensor], source.tensors.matrix_shapes[tensor].tolist()
    if elements(boxes).sum() != rows * cols:
        raise ValueError(f"the source holds {elements(boxes).sum()} of {rows * cols} elements of {name}")
    full = torch.empty((rows, cols), dtype=DTYPES[ElementType(source.types[tensor])], device=link.device)
    parts, broadcasts = [], []
    for box, holder in zip(boxes, first_holder.tolist(), strict=True):
        part = torch.empty((int(box["rows"]), int(box["cols"])), dtype=full.dtype, device=link.device)
        if holder == link.rank:
            copy_bits(part, held.find(box))
        parts.append(part)
        if link.group is not None:
            broadcasts.append(dist.broadcast(part.view(torch.uint8), src=holder, group=link.group, async_op=True))
    for work in broadcasts:
        work.wait()
    for box, part in zip(boxes, parts, strict=True):
        row, col, rows, cols = (int(box[field]) for field in ("row", "col", "rows", "cols"))
        copy_bits(full[row : row + rows, col : col + cols], part)
    return full
