"""Changes of packed bytes by torch operations: where no native library was built, and what the native ones equal."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard.kernels.delta_format import BLOCK, WHOLE

if TYPE_CHECKING:
    from rltrain.reshard.kernels.changes import Extent, Marks, Packing

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class TorchChanges:
    """A `Changes` (changes.py)."""

    keeps_as_it_marks = packs = False

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: "Packing | None" = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        differing = packed.view(BITS[item]) != kept.view(BITS[item])
        sizes = block_sizes(len(differing), packed.device)
        padded = torch.nn.functional.pad(differing, (0, len(sizes) * BLOCK - len(differing)))
        counts = padded.view(-1, BLOCK).sum(1)
        whole = (counts > 0) & (counts * (item + 1) >= sizes * item)
        lengths = torch.where(whole, WHOLE, counts).to(torch.uint8)
        return lengths, differing, totals_of(counts, whole, sizes)

    def write(self, packed: Tensor, kept: Tensor, marks: "Marks", parts: tuple[Tensor, Tensor, Tensor]) -> None:
        lengths, places, values = parts
        differing, bits = marks.bits, BITS[marks.extent.item]
        lengths.copy_(marks.lengths)
        whole = (marks.lengths == WHOLE).repeat_interleave(BLOCK)[: len(differing)]
        places.copy_((differing & ~whole).nonzero().view(-1) % BLOCK)
        values.view(bits).copy_(packed.view(bits)[differing | whole])
        kept.copy_(packed)

    def apply(
        self, slices: Array, begin: int, extent: "Extent", parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        lengths, places, values = parts
        elements = _elements(lengths, places, extent)
        if elements is None or len(elements) != extent.values:
            return False
        elements += begin
        ends = torch.from_numpy((slices["src_offset"] + slices["rows"] * slices["cols"]).astype(np.int64))
        bounds = torch.searchsorted(elements, ends.to(elements.device)).tolist()
        if int(slices["src_offset"][0]) > int(elements[0]) or bounds[-1] < len(elements):
            return False
        for first, last, made in zip([0, *bounds], bounds, slices, strict=False):
            if first < last:
                _put(made, elements[first:last], values.view(BITS[extent.item])[first:last], bases)
        return True


def totals_of(counts: Tensor, whole: Tensor, sizes: Tensor) -> list[int]:
    """Places, values and changes, where `counts` of each block changed and blocks that are `whole` are sent so."""
    columns = counts.masked_fill(whole, 0), torch.where(whole, sizes, counts), counts
    totals: list[int] = torch.stack(columns).sum(1).tolist()
    return totals


def block_sizes(elements: int, device: torch.device) -> Tensor:
    """[blocks]: how many elements each has."""
    sizes = torch.full((-(-elements // BLOCK),), BLOCK, dtype=torch.int64, device=device)
    sizes[-1] = elements - (len(sizes) - 1) * BLOCK
    return sizes


def _elements(lengths: Tensor, places: Tensor, extent: "Extent") -> Tensor | None:
    """[values], ascending: which element each is. None where places are not as many as lengths say."""
    sizes = block_sizes(extent.elements, lengths.device)
    whole = lengths == WHOLE
    block = torch.arange(len(sizes), device=lengths.device)
    sparse = block.repeat_interleave(lengths.to(torch.int64).masked_fill(whole, 0))
    if len(sparse) != len(places):
        return None
    some = sparse * BLOCK + places
    if len(some) and bool((places >= sizes[sparse]).any()):
        return None
    begins = (block[whole] * BLOCK)[:, None] + torch.arange(BLOCK, device=lengths.device)
    rest = begins.view(-1)
    return torch.cat([some, rest[rest < extent.elements]]).sort().values


def _put(made: np.void, elements: Tensor, values: Tensor, bases: list[Tensor]) -> None:
    source, destination = ElementType(made["src_type"]), ElementType(made["dst_type"])
    base = bases[int(made["dst_base"])].detach().view(-1).view(torch.uint8)
    item = int(ITEM_BYTES[destination])
    flat = base[: base.numel() // item * item].view(BITS[item])
    within = elements - int(made["src_offset"])
    cols = int(made["cols"])
    index = int(made["dst_offset"]) + within // cols * int(made["dst_stride"]) + within % cols
    flat[index] = values if source == destination else _widened(values, source)


def _widened(values: Tensor, source: ElementType) -> Tensor:
    """Bits of float32, with the NaNs of csrc/reshard.h."""
    if source == ElementType.BFLOAT16:
        return values.to(torch.int32) << 16
    halves = values.view(torch.float16)
    return (
        halves.to(torch.float32)
        .masked_fill(halves.isnan(), float("nan"))
        .view(torch.int32)
        .masked_fill(halves.isnan(), 0x7FFFFFFF)
    )
