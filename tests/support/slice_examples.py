"""Example slices of tensors for the kernels, with any alignment."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard.native import PAIRS, SLICE, quantises

DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SOURCE_ELEMENTS = 24_000
UNTOUCHED = 0x55

# Zeros, subnormals, infinities, and NaNs of both signs with various payloads. Also values next to the thresholds of
# bfloat16, float16 and e4m3: rounding, overflow and subnormals.
SPECIAL_FLOATS = (
    "00000000 80000000 00000001 80000001 007fffff 7f800000 ff800000 7f800001 ffffffff 7fc12345 ff812345 7f7fffff "
    "33000000 33000001 33800000 38800000 387fffff 387ff000 477fefff 477ff000 477fe000 3f808000 3f818000 3f807fff"
)


@dataclass(frozen=True, eq=False)
class Example:
    """Bases 0 to 3 are sources of each type, 4 to 7 destinations, 8 holds amax entries."""

    slices: Array
    sources: tuple[Tensor, ...]
    destination_elements: tuple[int, ...]
    amax_elements: int

    def bases(self) -> list[Tensor]:
        destinations = [
            torch.full((size * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8).view(dtype)
            for size, dtype in zip(self.destination_elements, DTYPES.values(), strict=True)
        ]
        return [*self.sources, *destinations, torch.zeros(self.amax_elements)]


@st.composite
def examples(draw: st.DrawFn) -> Example:
    slices = np.zeros(draw(st.integers(1, 5)), SLICE)
    used, amax_elements = [0, 0, 0, 0], 0
    for entry in slices:
        source, destination = draw(st.sampled_from(sorted(PAIRS)))
        rows, cols = draw(st.integers(0, 90)), draw(st.integers(0, 200))
        entry["rows"], entry["cols"] = rows, cols
        entry["src_base"], entry["dst_base"], entry["amax_base"] = source, 4 + destination, -1
        entry["src_type"], entry["dst_type"] = source, destination
        entry["src_stride"] = cols + draw(st.sampled_from([0, 0, 1, 37]))
        entry["dst_stride"] = cols + draw(st.sampled_from([0, 0, 1, 29]))
        entry["src_offset"] = draw(st.integers(0, SOURCE_ELEMENTS - _extent(rows, cols, entry["src_stride"])))
        entry["dst_offset"] = used[destination] + draw(st.integers(0, 70))
        used[destination] = int(entry["dst_offset"]) + _extent(rows, cols, entry["dst_stride"])
        if quantises(entry):
            entry["amax_base"] = 8
            row_phase, col_phase = draw(st.integers(0, 127)), draw(st.integers(0, 127))
            amax_stride = (col_phase + cols + 127) // 128 + draw(st.integers(0, 2))
            entry["row_phase"], entry["col_phase"] = row_phase, col_phase
            entry["amax_stride"], entry["amax_offset"] = amax_stride, amax_elements
            amax_elements += (row_phase + rows + 127) // 128 * amax_stride
    sources = make_sources(draw(st.integers(0, 2**32 - 1)), specials=draw(st.booleans()))
    return Example(slices, sources, tuple(size + 9 for size in used), amax_elements)


def _extent(rows: int, cols: int, stride: int) -> int:
    return int((rows - 1) * stride + cols) if rows and cols else 0


def make_sources(seed: int, *, specials: bool) -> tuple[Tensor, ...]:
    """Returns tensors of all four types. With `specials` half of their elements have special values."""
    rng = np.random.default_rng(seed)
    floats = (rng.standard_normal(SOURCE_ELEMENTS) * 10.0 ** rng.integers(-12, 6)).astype(np.float32)
    result = []
    for dtype in DTYPES.values():
        tensor = torch.from_numpy(floats).to(dtype)
        if specials and dtype == torch.float32:
            values = np.array([int(digits, 16) for digits in SPECIAL_FLOATS.split()], dtype=np.uint32).view(np.int32)
            _scatter(rng, tensor, torch.from_numpy(values))
        elif specials:
            bits = BITS[dtype.itemsize]
            _scatter(rng, tensor, torch.arange(256**dtype.itemsize).to(bits))
        result.append(tensor)
    return tuple(result)


def _scatter(rng: np.random.Generator, tensor: Tensor, values: Tensor) -> None:
    places = torch.from_numpy(rng.permutation(SOURCE_ELEMENTS)[: SOURCE_ELEMENTS // 2])
    chosen = torch.from_numpy(rng.integers(0, len(values), len(places)))
    tensor.view(values.dtype)[places] = values[chosen]


def block(tensor: Tensor, entry: np.void, side: str) -> Tensor:
    shape, stride = (int(entry["rows"]), int(entry["cols"])), int(entry[f"{side}_stride"])
    return tensor.as_strided(shape, (stride, 1), int(entry[f"{side}_offset"]))


def expected_bases(example: Example, first: int, last: int) -> list[Tensor]:
    """Returns the bases after amax and copy of slices[first:last], computed by plain torch operations."""
    bases = example.bases()
    for entry in example.slices[first:last]:
        if entry["rows"] == 0 or entry["cols"] == 0:
            continue
        source = block(bases[entry["src_base"]], entry, "src")
        bits = BITS[bases[entry["dst_base"]].itemsize]
        destination = block(bases[entry["dst_base"]].view(bits), entry, "dst")
        if quantises(entry):
            destination.copy_(expected_quantised(source, entry, bases[entry["amax_base"]]))
        elif entry["src_type"] == entry["dst_type"]:
            destination.copy_(source.contiguous().view(bits))
        else:
            result = source.contiguous().to(DTYPES[ElementType(entry["dst_type"])]).view(bits)
            if entry["src_type"] != ElementType.BFLOAT16:
                result[source.isnan()] = {torch.int32: 0x7FFFFFFF, torch.int16: 0x7FFF}[bits]
            destination.copy_(result)
    return bases


def expected_quantised(source: Tensor, entry: np.void, amax: Tensor) -> Tensor:
    """Returns the quantised elements, and writes the block maxima to `amax`."""
    rows = (torch.arange(source.shape[0]) + int(entry["row_phase"])) // 128
    cols = (torch.arange(source.shape[1]) + int(entry["col_phase"])) // 128
    places = int(entry["amax_offset"]) + rows[:, None] * int(entry["amax_stride"]) + cols
    magnitudes = source.float().abs()
    magnitudes[magnitudes.isnan()] = torch.nan
    # As integers: scatter_reduce of floats does not promise to keep NaN.
    amax.view(torch.int32).scatter_reduce_(0, places.ravel(), magnitudes.view(torch.int32).ravel(), "amax")
    found = amax[places]
    inverse = torch.tensor(448.0).expand(found.shape).contiguous() / found.clamp(min=2.0**-100)
    inverse[~found.isfinite()] = torch.nan
    scaled = source.float() * inverse
    result = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    result[scaled.isnan()] = 0x7F
    return result


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        bits = BITS[one.itemsize]
        different = (one.view(bits) != other.view(bits)).nonzero().ravel()
        place = int(different[0]) if len(different) else 0
        assert not len(different), (
            f"base {number} differs at {len(different)} elements, first at {place}: "
            f"{one.view(bits)[place].item():#x}, expected {other.view(bits)[place].item():#x}"
        )


WIDTHS = (*range(1, 36), 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, 288, 384, 512, 528, 1040)
HEIGHTS = (1, 2, 3, 7, 33)


def aligned(example: Example, multiple: int) -> Example:
    """Returns `example` with offsets, strides, columns and column phases rounded down to multiples of `multiple`
    elements."""
    slices = example.slices.copy()
    for name in ("cols", "src_offset", "src_stride", "dst_stride", "col_phase"):
        slices[name] -= slices[name] % multiple
    used = dict.fromkeys(ElementType, 0)
    for entry in slices:
        destination = ElementType(entry["dst_type"])
        entry["dst_offset"] = used[destination]
        extent = int(entry["rows"] * np.maximum(entry["dst_stride"], entry["cols"]))
        used[destination] += -(-extent // multiple) * multiple
    return dataclasses.replace(example, slices=slices, destination_elements=tuple(used.values()))


def windows(source: ElementType, destination: ElementType, gap: int) -> Example:
    """Returns windows of every width and height from offset 0, with `gap` elements between rows on both sides."""
    slices = np.zeros(len(WIDTHS) * len(HEIGHTS), SLICE)
    slices["cols"], slices["rows"] = np.repeat(WIDTHS, len(HEIGHTS)), np.tile(HEIGHTS, len(WIDTHS))
    slices["src_stride"] = slices["dst_stride"] = slices["cols"] + gap
    slices["src_base"], slices["src_type"] = source, source
    slices["dst_base"], slices["dst_type"] = 4 + destination, destination
    slices["amax_base"] = np.where(quantises(slices), 8, -1)
    # Widths of 16 n elements begin at multiples of 16 elements.
    ends = np.cumsum(-(-(slices["rows"] * slices["dst_stride"]) // 16) * 16)
    slices["dst_offset"][1:] = ends[:-1]
    entries = -(-slices["cols"] // 128)
    slices["amax_stride"] = entries
    slices["amax_offset"][1:] = np.cumsum(entries)[:-1]
    elements = tuple(int(ends[-1]) if kind == destination else 0 for kind in ElementType)
    # Special values would make whole blocks NaN.
    sources = make_sources(7, specials=destination != ElementType.FLOAT8_E4M3 or source == destination)
    times = int((slices["rows"] * slices["src_stride"]).max()) // sources[0].numel() + 1
    repeated = tuple(tensor.view(torch.uint8).repeat(times).view(tensor.dtype) for tensor in sources)
    return Example(slices, repeated, elements, int(entries.sum()))
