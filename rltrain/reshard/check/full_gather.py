"""The slow way to do a reshard, to compare the fast way with: every tensor is assembled in full on every rank.

It shares the layouts with the fast way and nothing else: no plan, no buckets, no kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.table import Array, ElementType, IntArray
from rltrain.reshard.fp8.blocks import SCALE_SUFFIX, SCALES_PARAMETER
from rltrain.reshard.kernels.quantize import quantize_blocks
from rltrain.reshard.kernels.torch_types import DTYPES
from rltrain.reshard.layout import BOX_FIELDS, Layout
from rltrain.reshard.plan.match import boxes_of, distinct, elements

# As csrc/reshard.h has them: torch's own differ between devices. From bfloat16 to float32 a NaN keeps its bits.
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
    """Write this rank's `destination_tensors` from all ranks' `source_tensors`, both by the names of their layouts.

    A rank that is in one layout only passes None for the other. Takes layouts of `blocks.quantized` too, and makes the
    scales itself: `source_tensors` are without them. At any time a rank holds one tensor of the model twice besides its
    own. Raises ValueError where the source lacks a part of a tensor.

    Collective over: `group`, the ranks of both layouts; None where that is this rank alone.
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
    """`x` in `dtype`, rounded to nearest even, with the NaNs of csrc/reshard.h."""
    if x.dtype == dtype:
        return x
    result = x.to(dtype)
    if x.dtype != torch.bfloat16:
        result.view(_BITS[dtype.itemsize]).masked_fill_(x.isnan(), _NANS[dtype])
    return result


@dataclass(frozen=True)
class _Link:
    """This rank, the group that it is in, and where that group's messages lie."""

    rank: int
    group: dist.ProcessGroup | None
    device: torch.device


def copy_bits(destination: Tensor, source: Tensor) -> None:
    """As integers: a copy of floats may quieten a NaN."""
    if destination.dtype != source.dtype:
        raise ValueError(f"a tensor is {destination.dtype}, another {source.dtype}; their layouts say they are alike")
    bits = _BITS[source.dtype.itemsize]
    destination.view(bits).copy_(source.view(bits))


class _Share:
    """What one rank holds in a layout: parameters as flat views, and the pieces of every tensor."""

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
        """The elements of a piece, [rows, cols]."""
        flat = self.flats[int(piece["parameter"])]
        rows, cols, stride = (int(piece[name]) for name in ("rows", "cols", "stride"))
        return flat[int(piece["offset"]) :].as_strided((rows, cols), (stride, 1))

    def find(self, box: np.void) -> Tensor:
        """The elements of a box that is one of the pieces."""
        pieces = self.pieces[int(box["tensor"])]
        return self.box(next(piece for piece in pieces if all(piece[name] == box[name] for name in BOX_FIELDS)))

    def write(self, tensor: int, full: Tensor) -> None:
        """Cut this rank's pieces of `tensor` out of all of it."""
        for piece in self.pieces.get(tensor, []):
            row, col, rows, cols = (int(piece[name]) for name in ("row", "col", "rows", "cols"))
            part = full[row : row + rows, col : col + cols]
            copy_bits(self.box(piece), part)


def _scales(source: Layout, destination: Layout) -> dict[int, int]:
    """Number of a tensor that is to be quantised -> number of its scales."""
    float8 = ElementType.FLOAT8_E4M3
    quantised = np.flatnonzero((destination.types == float8) & (source.types != float8)).tolist()
    names = source.tensors.names
    return {number: source.tensors.numbers[names[number] + SCALE_SUFFIX] for number in quantised}


def _distinct_boxes(layout: Layout) -> tuple[Array, IntArray]:
    """(the distinct boxes of all ranks sorted by tensor, the lowest rank that holds each)."""
    per_rank = [boxes_of(layout.on(rank).pieces) for rank in sorted(layout.ranks)]
    boxes, inverse = distinct(np.concatenate(per_rank))
    holder = np.repeat(sorted(layout.ranks), [len(boxes) for boxes in per_rank])
    first = np.full(len(boxes), np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, holder)
    return boxes, first


def _assembled(source: Layout, boxes: Array, first_holder: IntArray, held: _Share, tensor: int, link: _Link) -> Tensor:
    """Tensor number `tensor` in full, from its distinct `boxes`; collective over the group of `link`."""
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
