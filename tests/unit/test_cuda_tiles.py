"""Tiles of the CUDA kernels, and what their threads do with them, run on the host: against plain torch operations."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard import copy_table, native
from rltrain.reshard.copy_table import TILE_BYTES, CudaCopies, cut
from rltrain.reshard.native import PAIRS, SLICE, quantises
from tests.aligned_examples import aligned, windows
from tests.slice_examples import Example, assert_same_bits, examples, expected_bases

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
PROPERTY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


class EmulatedCopies(CudaCopies):
    """Launches on the host."""

    def _ordinal_of(self, device: torch.device) -> int:
        return 0

    def _upload(self, table: Array) -> Tensor:
        return torch.from_numpy(table.view(np.uint8).copy())

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        yield 0


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("emulation") / "emulation.so"
    flags = ["-O2", "-std=c++17", "-Wno-unknown-pragmas", "-ffp-contract=off", "-fPIC", "-shared"]
    source = Path(__file__).with_name("cuda_emulation.cpp")
    subprocess.run([compiler, *flags, f"-I{REPOSITORY / 'csrc'}", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def emulated(emulation: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Makes tables on the CPU use the CUDA kernels' code."""
    monkeypatch.setattr(native, "cuda_library", lambda: emulation)
    monkeypatch.setattr(copy_table, "backend_class", lambda device: EmulatedCopies)
    return emulation


def run(example: Example, first: int, last: int) -> list[Tensor]:
    bases = example.bases()
    table = copy_table.CopyTable(example.slices, CPU)
    table.bind(bases)
    table.amax(first, last)
    table.launch(first, last)
    return bases


@PROPERTY
@given(example=examples(), multiple=st.sampled_from([1, 1, 4, 16]), data=st.data())
def test_threads_copy_as_torch_does_bit_for_bit_and_touch_nothing_else(
    emulated: ctypes.CDLL, example: Example, multiple: int, data: st.DataObject
) -> None:
    example = aligned(example, multiple)
    first = data.draw(st.integers(0, len(example.slices)))
    last = data.draw(st.integers(first, len(example.slices)))
    assert_same_bits(run(example, first, last), expected_bases(example, first, last))


@PROPERTY
@given(example=examples(), data=st.data())
def test_the_number_of_blocks_changes_nothing(emulated: ctypes.CDLL, example: Example, data: st.DataObject) -> None:
    bases = example.bases()
    copies = EmulatedCopies(example.slices, CPU)
    copies.bind(bases)
    copies.num_blocks = data.draw(st.integers(1, 20))
    copies.amax(0, len(example.slices))
    copies.launch(0, len(example.slices))
    assert_same_bits(bases, expected_bases(example, 0, len(example.slices)))


@pytest.mark.parametrize(("source", "destination"), [(0, 0), (1, 1), (3, 3), (0, 1), (1, 0), (0, 3), (2, 3)])
@pytest.mark.parametrize("gap", [0, 1, 16])
def test_windows_of_every_width_go_through_the_same_walk(
    emulated: ctypes.CDLL, source: ElementType, destination: ElementType, gap: int
) -> None:
    example = windows(ElementType(source), ElementType(destination), gap)
    count = len(example.slices)
    assert_same_bits(run(example, 0, count), expected_bases(example, 0, count))


def test_tables_follow_bases_that_move(emulated: ctypes.CDLL) -> None:
    slices = np.zeros(1, SLICE)
    slices["rows"], slices["cols"], slices["src_stride"], slices["dst_stride"] = 2, 3, 4, 3
    slices["dst_base"], slices["amax_base"] = 1, -1
    table = copy_table.CopyTable(slices, CPU)
    for _ in range(3):
        source, destination = torch.rand(2, 4), torch.zeros(2, 3)
        table.bind([source, destination])
        table.launch(0, 1)
        assert torch.equal(destination, source[:, :3])


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_of_a_float_is_rounded_as_torch_does(emulation: ctypes.CDLL, low: int) -> None:
    values = torch.from_numpy(((np.arange(2**16, dtype=np.uint32) << 16) + np.uint32(low)).view(np.float32))
    results = [torch.zeros(2**16, dtype=dtype) for dtype in (torch.int16, torch.int16, torch.uint8)]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, *results)]
    emulation.rs_cuda_narrow(pointers[0], ctypes.c_int64(2**16), *pointers[1:])
    expected = [
        values.bfloat16().view(torch.int16).masked_fill(values.isnan(), 0x7FFF),
        values.half().view(torch.int16).masked_fill(values.isnan(), 0x7FFF),
        values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(values.isnan(), 0x7F),
    ]
    assert_same_bits(results, expected)


@st.composite
def large_slices(draw: st.DrawFn) -> Array:
    """Slices of many shapes, of memory that nobody has."""
    slices = np.zeros(draw(st.integers(0, 6)), SLICE)
    sizes = st.one_of(st.integers(0, 300), st.integers(0, 100_000), st.just(1))
    for entry in slices:
        entry["rows"], entry["cols"] = draw(sizes), draw(sizes)
        if entry["rows"] * entry["cols"] > 20_000_000:
            entry["rows"] = 130
        entry["src_stride"] = entry["cols"] + draw(st.sampled_from([0, 0, 5]))
        entry["dst_stride"] = entry["cols"] + draw(st.sampled_from([0, 0, 7]))
        entry["src_type"], entry["dst_type"] = draw(st.sampled_from(sorted(PAIRS)))
        entry["amax_base"] = 0 if quantises(entry) else -1
        entry["row_phase"], entry["col_phase"] = draw(st.integers(0, 127)), draw(st.integers(0, 127))
    return slices


@settings(max_examples=75)
@given(slices=large_slices())
def test_tiles_cover_every_element_once_and_fit_a_warp(slices: Array) -> None:
    result = cut(slices)
    tiles = result.tiles
    assert result.first_tile[0] == 0 and result.first_tile[-1] == len(tiles)
    for number, entry in enumerate(result.slices):
        mine = tiles[result.first_tile[number] : result.first_tile[number + 1]]
        assert (mine["slice"] == number).all()
        assert entry["rows"] * entry["cols"] == slices[number]["rows"] * slices[number]["cols"]
        assert covers(mine, entry)
        item = max(ITEM_BYTES[entry["src_type"]], ITEM_BYTES[entry["dst_type"]])
        assert (mine["rows"].astype(np.int64) * mine["cols"] * item <= TILE_BYTES).all()
        if quantises(entry):
            for axis in ("row", "col"):
                begin = int(entry[f"{axis}_phase"]) + mine[axis]
                assert (begin // 128 == (begin + mine[f"{axis}s"] - 1) // 128).all()
        else:
            assert (mine["col"] % 16 == 0).all()


def covers(tiles: Array, entry: np.void) -> bool:
    """Whether the tiles are a grid of adjacent rows and columns that is exactly the slice."""
    if entry["rows"] == 0 or entry["cols"] == 0:
        return len(tiles) == 0
    row_starts, row_of = np.unique(tiles["row"], return_inverse=True)
    col_starts, col_of = np.unique(tiles["col"], return_inverse=True)
    row_sizes = np.diff(np.append(row_starts, entry["rows"]))
    col_sizes = np.diff(np.append(col_starts, entry["cols"]))
    return bool(
        row_starts[0] == 0
        and col_starts[0] == 0
        and (row_sizes > 0).all()
        and (col_sizes > 0).all()
        and len(tiles) == len(row_starts) * len(col_starts)
        and len(np.unique(row_of * len(col_starts) + col_of)) == len(tiles)
        and (tiles["rows"] == row_sizes[row_of]).all()
        and (tiles["cols"] == col_sizes[col_of]).all()
    )


def test_slices_without_gaps_are_cut_as_one_row_and_windows_into_full_tiles() -> None:
    slices = np.zeros(3, SLICE)
    slices["amax_base"] = -1
    slices["src_type"] = slices["dst_type"] = ElementType.BFLOAT16
    slices["rows"], slices["cols"] = [1000, 1000, 1], [8, 96, 8193]
    slices["src_stride"], slices["dst_stride"] = [8, 100, 0], [8, 96, 0]
    result = cut(slices)
    assert result.slices["rows"].tolist() == [1, 1000, 1]
    assert np.diff(result.first_tile).tolist() == [1, 12, 2]
    assert result.tiles["cols"].tolist() == [8000, *[96] * 12, 4112, 4081]
