"""Largest magnitudes and scales of a source rank's blocks, before it packs them as FP8."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.table import Array, ElementType, IntArray
from rltrain.reshard.copy_table import CopyTable, scales_of
from rltrain.reshard.fp8_blocks import SCALES_PARAMETER, QuantizedLayouts, entries_of, touched_blocks
from rltrain.reshard.layout import PIECE, Parameters, boxes_of, distinct, elements, overlaps
from rltrain.reshard.native import BLOCK, SLICE

PLACE_IN_BLOCKS = np.dtype([(name, SLICE[name]) for name in ("amax_offset", "amax_stride", "row_phase", "col_phase")])
"""Fields of SLICE for the amax entry of each element of a slice."""


class BlockTable:
    """The entries of one rank's blocks. There is one float32 per block touched by a quantised piece of its source
    layout, piece after piece, row by row. The rank's amax table and its scales are both in this order.

    It is empty for a rank outside the source layout. It has only arrays, computed from the layouts and the rank.
    """

    def __init__(self, layouts: QuantizedLayouts, rank: int) -> None:
        self._layouts = layouts
        held = rank in layouts.source.ranks
        self.parameters: Parameters = layouts.source.on(rank).parameters if held else ()
        """Parameters of the extended source layout. The scales are the first one, if there are any."""
        part = layouts.source.parts[layouts.source.ranks.index(rank)] if held else None
        self.pieces: Array = np.zeros(0, dtype=PIECE) if part is None else layouts.quantised_pieces(part)
        self._touched = touched_blocks(boxes_of(self.pieces))
        self._start, self.num_entries = entries_of(self._touched)
        self.num_split = len(layouts.split_blocks)
        """Number of blocks touched by several distinct boxes of the source, over all ranks. It is the same on every
        rank."""

    @cached_property
    def split(self) -> tuple[IntArray, IntArray]:
        """(entries of this rank, indices into the `num_split` blocks) of its parts of split blocks."""
        piece, block = self._layouts.cut_blocks(boxes_of(self.pieces))
        tensor = self.pieces["tensor"][piece]
        row, col = np.divmod(block - self._layouts.first_block[tensor], self._layouts.block_counts[tensor, 1])
        return self._entries(piece, row, col), np.searchsorted(self._layouts.split_blocks, block)

    @cached_property
    def slices(self) -> Array:
        """[SLICE] for CopyTable.amax over all pieces. Base i is source parameter i as bytes. Base 0 is the amax table
        instead of the scales."""
        slices = np.zeros(len(self.pieces), dtype=SLICE)
        # A kernel for magnitudes writes only them. Its descriptor still needs a destination of one-byte elements, and
        # the source itself is one.
        for side in ("src", "dst"):
            slices[f"{side}_base"] = self.pieces["parameter"]
            slices[f"{side}_offset"], slices[f"{side}_stride"] = self.pieces["offset"], self.pieces["stride"]
        for name in ("rows", "cols"):
            slices[name] = self.pieces[name]
        slices["src_type"] = self._layouts.source.types[self.pieces["tensor"]]
        slices["dst_type"] = ElementType.FLOAT8_E4M3
        for name in PLACE_IN_BLOCKS.names or ():
            slices[name] = self.places(boxes_of(self.pieces))[name]
        return slices

    def places(self, boxes: Array) -> Array:
        """Returns [PLACE_IN_BLOCKS] of boxes with any dtype with BOX_FIELDS. Raises ValueError unless each box is
        within a quantised piece of this rank."""
        own, inverse = distinct(boxes_of(self.pieces))
        piece_of = np.zeros(len(own), dtype=np.int64)
        piece_of[inverse] = np.arange(len(self.pieces))
        found = overlaps(boxes_of(boxes), own)
        whole = np.flatnonzero(elements(found.boxes) == elements(boxes)[found.piece])
        if not np.array_equal(found.piece[whole], np.arange(len(boxes))):
            raise ValueError("a box to be quantised is not within one piece of this rank")
        piece = piece_of[found.fragment[whole]]
        places = np.empty(len(boxes), dtype=PLACE_IN_BLOCKS)
        places["amax_offset"] = self._entries(piece, boxes["row"] // BLOCK, boxes["col"] // BLOCK)
        places["amax_stride"] = self._touched["cols"][piece]
        places["row_phase"], places["col_phase"] = boxes["row"] % BLOCK, boxes["col"] % BLOCK
        return places

    def _entries(self, piece: IntArray, row: IntArray, col: IntArray) -> IntArray:
        """Returns the entry of block (row, col) of the tensor in each of the pieces numbered `piece`."""
        touched = self._touched[piece]
        entry: IntArray = self._start[piece] + (row - touched["row"]) * touched["cols"] + col - touched["col"]
        return entry


class SplitBlocks:
    """A rank's blocks shared with other ranks. It combines the magnitudes of their parts."""

    def __init__(self, table: BlockTable, device: torch.device) -> None:
        self.num_blocks = table.num_split
        self._entry, self._place = (torch.from_numpy(numbers).to(device) for numbers in table.split)

    def share(self, amax: Tensor, group: dist.ProcessGroup | None) -> None:
        """Gives every entry of a split block in `amax` [entries] the magnitude of the whole block.

        Collective over: `group`, if any block is split. None means no other rank holds a part.
        """
        if not self.num_blocks:
            return
        largest = self.collect(amax)
        if group is not None:
            # gloo needs host memory.
            reduced = largest.cpu() if dist.get_backend(group) == "gloo" else largest
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group)
            largest = reduced.to(largest.device)
        self.spread(largest, amax)

    def collect(self, amax: Tensor) -> Tensor:
        """Returns the largest magnitude of this rank's part of each block, as the bits of a float, int32 [blocks]. It
        is 0 without a part.

        Bits of non-negative floats order as integers like the floats, with NaN on top. A float maximum over ranks may
        drop a NaN.
        """
        largest = torch.zeros(self.num_blocks, dtype=torch.int32, device=amax.device)
        return largest.scatter_reduce_(0, self._place, amax.view(torch.int32)[self._entry], "amax")

    def spread(self, largest: Tensor, amax: Tensor) -> None:
        """Writes the magnitudes `largest` [blocks] into this rank's entries."""
        amax.view(torch.int32)[self._entry] = largest[self._place]


class BlockScales:
    """This rank's amax table and scales on `device`. They are renewed before every quantising reshard."""

    def __init__(self, table: BlockTable, device: torch.device) -> None:
        self.table = table
        self.amax = torch.zeros(table.num_entries, dtype=torch.float32, device=device)
        """The amax base of quantising slices."""
        self.scales = torch.zeros_like(self.amax)
        self._split = SplitBlocks(table, device)
        self._copies = CopyTable(table.slices, device) if table.num_entries else None

    @property
    def num_launches(self) -> int:
        return self._copies.num_launches if self._copies else 0

    @torch.no_grad()
    def prepare(
        self, source_tensors: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None
    ) -> Mapping[str, Tensor] | None:
        """Computes magnitudes and scales of the present `source_tensors`. Returns the tensors with the scales added,
        under the names of the extended source layout. For a rank of the destination alone, None stays None.

        On CUDA with an NCCL `group`, the host never waits. `group` has the ranks of both layouts. None means the source
        is on this rank alone.

        Collective over: `group`, if any block is split. The layouts decide this, equally on every rank.
        """
        if self._copies is not None:
            self._measure(self._copies, source_tensors)
        self._split.share(self.amax, group)
        self.scales.copy_(scales_of(self.amax))
        if source_tensors is None or self._copies is None:
            return source_tensors
        return {**source_tensors, SCALES_PARAMETER: self.scales}

    def _measure(self, copies: CopyTable, source_tensors: Mapping[str, Tensor] | None) -> None:
        if source_tensors is None:
            raise ValueError("this rank is in the source layout, but no source tensors were given")
        bytes_of = [source_tensors[name].detach().view(-1).view(torch.uint8) for name, _ in self.table.parameters[1:]]
        copies.bind([self.amax, *bytes_of])
        self.amax.zero_()
        copies.amax(0, len(self.table.slices))
        copies.release()
