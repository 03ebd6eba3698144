"""Finds, encodes and applies changes of packed bytes, on CPUs, on GPUs or by torch (csrc/reshard_delta.h)."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard import native
from rltrain.reshard.copy_table import CopyTable, CudaKernels
from rltrain.reshard.native import DELTA_BLOCK, DELTA_WHOLE, SLICE

# Changes by torch operations. They are used without a native library, and as the reference for its results.

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class TorchChanges:
    """The search for changes and their application by torch operations.

    Tensors are contiguous bytes on one device. Sections begin at multiples of their item size.
    """

    keeps_as_it_marks = False
    """Whether `mark` already makes `kept` equal `packed`."""
    packs = False
    """Whether `mark` takes a `packing`."""

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: "Packing | None" = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Returns (lengths, bits, [places, values, changes]) of the differences, in elements of `item` bytes. `packing`
        makes `packed` on the way. Without it, `packed` must be ready."""
        differing = packed.view(BITS[item]) != kept.view(BITS[item])
        sizes = block_sizes(len(differing), packed.device)
        padded = torch.nn.functional.pad(differing, (0, len(sizes) * DELTA_BLOCK - len(differing)))
        counts = padded.view(-1, DELTA_BLOCK).sum(1)
        whole = (counts > 0) & (counts * (item + 1) >= sizes * item)
        lengths = torch.where(whole, DELTA_WHOLE, counts).to(torch.uint8)
        return lengths, differing, totals_of(counts, whole, sizes)

    def write(self, packed: Tensor, kept: Tensor, marks: "Marks", parts: tuple[Tensor, Tensor, Tensor]) -> None:
        """Encodes the marked differences into `parts` and makes `kept` equal `packed`. Neither may have been written
        since `mark`."""
        lengths, places, values = parts
        differing, bits = marks.bits, BITS[marks.extent.item]
        lengths.copy_(marks.lengths)
        whole = (marks.lengths == DELTA_WHOLE).repeat_interleave(DELTA_BLOCK)[: len(differing)]
        places.copy_((differing & ~whole).nonzero().view(-1) % DELTA_BLOCK)
        values.view(bits).copy_(packed.view(bits)[differing | whole])
        kept.copy_(packed)

    def apply(
        self, slices: Array, begin: int, extent: "Extent", parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        """Writes changed values to the destinations of `slices` [SLICE]. Returns false if they do not fit.

        The sources of the slices follow each other. Element `begin` of their source is the section's first.
        """
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
    """Returns the numbers of places, values and changes. `counts` are the changes of each block. Blocks in `whole` are
    sent whole."""
    columns = counts.masked_fill(whole, 0), torch.where(whole, sizes, counts), counts
    totals: list[int] = torch.stack(columns).sum(1).tolist()
    return totals


def block_sizes(elements: int, device: torch.device) -> Tensor:
    """Returns the number of elements of each block, shape [blocks]."""
    sizes = torch.full((-(-elements // DELTA_BLOCK),), DELTA_BLOCK, dtype=torch.int64, device=device)
    sizes[-1] = elements - (len(sizes) - 1) * DELTA_BLOCK
    return sizes


def _elements(lengths: Tensor, places: Tensor, extent: "Extent") -> Tensor | None:
    """Returns the number of each value's element, ascending, shape [values]. Returns None if the places do not match
    the lengths."""
    sizes = block_sizes(extent.elements, lengths.device)
    whole = lengths == DELTA_WHOLE
    block = torch.arange(len(sizes), device=lengths.device)
    sparse = block.repeat_interleave(lengths.to(torch.int64).masked_fill(whole, 0))
    if len(sparse) != len(places):
        return None
    some = sparse * DELTA_BLOCK + places
    if len(some) and bool((places >= sizes[sparse]).any()):
        return None
    begins = (block[whole] * DELTA_BLOCK)[:, None] + torch.arange(DELTA_BLOCK, device=lengths.device)
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
    """Returns float32 values as bits, with the NaNs of csrc/reshard.h."""
    if source == ElementType.BFLOAT16:
        return values.to(torch.int32) << 16
    halves = values.view(torch.float16)
    return (
        halves.to(torch.float32)
        .masked_fill(halves.isnan(), float("nan"))
        .view(torch.int32)
        .masked_fill(halves.isnan(), 0x7FFFFFFF)
    )


# Changes of packed bytes since they were last sent (csrc/reshard_delta.h).

ALIGNMENT = 16
"""Bytes. Each array of an encoded section begins at a multiple of it."""


def rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """The encoded size of a section with `elements` of `item` bytes. `places` and `values` are numbers of entries."""

    elements: int
    item: int
    places: int
    values: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of lengths, places and values, each rounded up to a multiple of ALIGNMENT. They are 0 if nothing
        changed."""
        if not self.values:
            return 0, 0, 0
        blocks = -(-self.elements // DELTA_BLOCK)
        return rounded_up(blocks), rounded_up(self.places), rounded_up(self.values * self.item)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def parts(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns lengths, places and values as views into `encoded`, at its beginning."""
        lengths, places, _ = self.sizes
        blocks = -(-self.elements // DELTA_BLOCK)
        return (
            encoded[:blocks],
            encoded[lengths : lengths + self.places],
            encoded[lengths + places : lengths + places + self.values * self.item],
        )


@dataclass(frozen=True, eq=False)
class Marks:
    """The differences of a section, in `changed` elements.

    `lengths` [blocks] uint8 are as encoded. `bits` belong to the implementation of `mark`. They are valid until it
    marks another section of the same item size.
    """

    extent: Extent
    changed: int
    lengths: Tensor
    bits: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """The slices `first:last` of `table` for packing a section. It begins at element `begin` of their destination."""

    table: CopyTable
    first: int
    last: int
    begin: int


class NativeChanges:
    """The twin of `TorchChanges` by csrc/reshard_cpu_delta.h, with torch's number of threads.

    Only the last marks of each item size are valid.
    """

    keeps_as_it_marks = packs = True

    def __init__(self) -> None:
        library = native.cpu_library()
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._counts, self._gather = library.rs_cpu_delta_counts, library.rs_cpu_delta_gather
        self._counts.argtypes, self._counts.restype = (size,), size
        self._gather.argtypes, self._gather.restype = (address, address, size, number, *(address,) * 3), None
        of_slices, of_packed = (address, size, address, size), (*(address,) * 2, size, number)
        self._mark = native.typed(library.rs_cpu_delta_mark, *of_slices, *of_packed, *(address,) * 3, number)
        self._apply = native.typed(library.rs_cpu_delta_apply, *of_slices, size, number, *(address,) * 4, number)
        self._found: dict[int, Tensor] = {}

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        elements = packed.numel() // item
        lengths = torch.empty(-(-elements // DELTA_BLOCK), dtype=torch.uint8)
        counts = torch.empty(self._counts(elements * item), dtype=torch.int64)
        found = self._room(elements * (item + 1), item)
        slices = (0, 0, 0, 0)
        if packing is not None:
            slices = (*packing.table.addresses(packing.first, packing.last), packing.begin)
        pointers = packed.data_ptr(), kept.data_ptr(), elements, item, found.data_ptr(), lengths.data_ptr()
        _expect_memory(self._mark(*slices, *pointers, counts.data_ptr(), torch.get_num_threads()))
        totals: list[int] = counts.view(-1, 3).sum(0).tolist()
        return lengths, found, totals

    def write(self, packed: Tensor, kept: Tensor, marks: Marks, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        lengths, places, values = parts
        lengths.copy_(marks.lengths)
        extent = marks.extent
        pointers = [tensor.data_ptr() for tensor in (lengths, places, values)]
        self._gather(packed.data_ptr(), marks.bits.data_ptr(), extent.elements, extent.item, *pointers)

    def _room(self, num_bytes: int, item: int) -> Tensor:
        """Returns memory for marks. Only the used part of it is touched."""
        if item not in self._found or self._found[item].numel() < num_bytes:
            self._found[item] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._found[item]

    def apply(
        self, slices: Array, begin: int, extent: Extent, parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        assert slices.dtype == SLICE and slices.flags.c_contiguous
        addresses = np.array([tensor.data_ptr() for tensor in bases], dtype=np.uint64)
        totals = np.array([extent.places, extent.values], dtype=np.int64)
        pointers = [tensor.data_ptr() for tensor in parts]
        error = self._apply(
            slices.ctypes.data,
            len(slices),
            addresses.ctypes.data,
            begin,
            extent.elements,
            extent.item,
            *pointers,
            totals.ctypes.data,
            torch.get_num_threads(),
        )
        _expect_memory(int(error == 1))
        return bool(error == 0)


def _expect_memory(error: int) -> None:
    if error:
        raise RuntimeError("the native library could not compare packed bytes: out of memory")


# Changes of packed bytes on NVIDIA GPUs by csrc/reshard_cuda_delta.h.

LANES = 32


class CudaChanges(CudaKernels):
    """The twin of `TorchChanges` by CUDA kernels. The host waits for the numbers it needs."""

    keeps_as_it_marks = packs = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._mark = self._kernel("rs_cuda_delta_mark", address, address, size, number, address, address)
        self._write = self._kernel("rs_cuda_delta_write", address, address, size, number, *(address,) * 6)
        self._apply = self._kernel("rs_cuda_delta_apply", address, size, address, size, size, number, *(address,) * 6)

    def mark(
        self, packed: Tensor, kept: Tensor, item: int, packing: "Packing | None" = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        elements = packed.numel() // item
        sizes = block_sizes(elements, packed.device)
        marks = torch.empty(len(sizes) * LANES, dtype=torch.uint8, device=packed.device)
        counts = torch.zeros(len(sizes), dtype=torch.int32, device=packed.device)
        tensors = packed.data_ptr(), kept.data_ptr(), elements, item, marks.data_ptr(), counts.data_ptr()
        self._launch(self._mark, *tensors)
        whole = (counts > 0) & (counts * (item + 1) >= sizes * item)
        lengths = torch.where(whole, DELTA_WHOLE, counts).to(torch.uint8)
        return lengths, marks, totals_of(counts.to(torch.int64), whole, sizes)

    def write(self, packed: Tensor, kept: Tensor, marks: "Marks", parts: tuple[Tensor, Tensor, Tensor]) -> None:
        lengths, places, values = parts
        lengths.copy_(marks.lengths)
        starts = _starts(marks.lengths, marks.extent.elements)
        tensors = (marks.bits, marks.lengths, *starts, places, values)
        pointers = [tensor.data_ptr() for tensor in tensors]
        extent = marks.extent
        self._launch(self._write, packed.data_ptr(), kept.data_ptr(), extent.elements, extent.item, *pointers)

    def apply(
        self, slices: Array, begin: int, extent: "Extent", parts: tuple[Tensor, Tensor, Tensor], bases: list[Tensor]
    ) -> bool:
        lengths, places, values = parts
        starts, device = _starts(lengths, extent.elements), lengths.device
        ends = [int(made[-1]) for made in _totals(lengths, extent.elements)]
        if ends != [extent.places, extent.values]:
            return False
        table = torch.from_numpy(np.ascontiguousarray(slices).view(np.uint8)).to(device)
        addresses = np.array([base.data_ptr() for base in bases], dtype=np.uint64)
        pointers = torch.from_numpy(addresses.view(np.int64)).to(device)
        wrong = torch.zeros(1, dtype=torch.int32, device=device)
        where = table.data_ptr(), len(slices), pointers.data_ptr(), begin, extent.elements, extent.item
        tensors = (lengths, places, *starts, values, wrong)
        self._launch(self._apply, *where, *[tensor.data_ptr() for tensor in tensors])
        return not bool(wrong.item())

    def _launch(self, kernel: Callable[..., int], *arguments: int) -> None:
        self._start(kernel, *arguments, told="cannot compare packed bytes")


def _totals(lengths: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers of places and of values up to the end of each block, shape [blocks] each."""
    whole, counts = lengths == DELTA_WHOLE, lengths.to(torch.int64)
    places = counts.masked_fill(whole, 0)
    values = torch.where(whole, block_sizes(elements, lengths.device), counts)
    return places.cumsum(0), values.cumsum(0)


def _starts(lengths: Tensor, elements: int) -> list[Tensor]:
    """Returns the indices of the first place and of the first value of each block, shape [blocks] each."""
    return [torch.nn.functional.pad(ends, (1, -1)) for ends in _totals(lengths, elements)]


assert DELTA_BLOCK == LANES * 8, "a lane marks its elements in a byte"


# The choice of an implementation.

Changes = TorchChanges | NativeChanges | CudaChanges


def changes_on(device: torch.device) -> Changes:
    """Returns the implementation for `device`. All implementations give the same bytes. Raises UserError as
    `native.backend` does."""
    match native.backend(device.type):
        case "cuda":
            return CudaChanges(device)
        case "native":
            return NativeChanges()
    return TorchChanges()


def mark(changes: Changes, packed: Tensor, kept: Tensor, item: int, packing: Packing | None = None) -> Marks:
    """Returns the differences between `packed` and `kept`, by elements of `item` bytes."""
    lengths, bits, (places, values, changed) = changes.mark(packed, kept, item, packing)
    return Marks(Extent(packed.numel() // item, item, places, values), changed, lengths, bits)
