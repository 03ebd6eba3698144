"""Tests of copies of slices: equal bits on every device, with casts and FP8."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard import copy_table, native
from rltrain.reshard.copy_table import (
    TILE_BYTES,
    CopyTable,
    CudaCopies,
    block_amax,
    cut,
    dequantize,
    quantize_blocks,
    scales_of,
)
from rltrain.reshard.native import BLOCK, PAIRS, SLICE, quantises
from tests.support.slice_examples import (
    BITS,
    DTYPES,
    Example,
    aligned,
    assert_same_bits,
    examples,
    expected_bases,
    windows,
)

CPU = torch.device("cpu")
INSTRUCTIONS = {"native for any processor": 0, "native with AVX2": 1, "native with AVX-512": 2}


IMPLEMENTATIONS = ("torch", *INSTRUCTIONS)


@contextmanager
def using(implementation: str) -> Iterator[None]:
    """Makes tables use this implementation with two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, "off" if implementation == "torch" else "require")
        if implementation != "torch":
            native_library().rs_cpu_limit_instructions(INSTRUCTIONS[implementation])
        yield
        if implementation != "torch":
            native_library().rs_cpu_limit_instructions(max(INSTRUCTIONS.values()))
    torch.set_num_threads(threads)


def runs_here(implementation: str) -> bool:
    if implementation == "torch":
        return True
    library, wanted = native_library(), INSTRUCTIONS[implementation]
    supported = library.rs_cpu_limit_instructions(wanted) == wanted
    library.rs_cpu_limit_instructions(max(INSTRUCTIONS.values()))
    return bool(supported)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes tables use one implementation."""
    if not runs_here(request.param):
        pytest.skip("this processor lacks the instructions")
    with using(request.param):
        yield request.param


@pytest.fixture(scope="module")
def implementations() -> list[str]:
    """Returns all implementations for this processor. Other tests skip the rest."""
    return [implementation for implementation in IMPLEMENTATIONS if runs_here(implementation)]


def native_library() -> object:
    try:
        return native.cpu_library()
    except native.LibraryError as error:
        if os.environ.get(native.VARIABLE) == "require":
            raise
        pytest.skip(f"{error}")


def run(example: Example, first: int, last: int, *, extra: Array | None = None) -> list[Tensor]:
    """Returns the bases after amax and launch of slices[first:last]. `extra` slices are launched with them."""
    slices = example.slices if extra is None else np.concatenate([example.slices[first:last], extra])
    bases = example.bases()
    table = CopyTable(slices, CPU)
    ballast = [] if extra is None else [torch.zeros(BALLAST_BYTES, dtype=torch.uint8) for _ in range(2)]
    table.bind([*bases, *ballast])
    span = (first, last) if extra is None else (0, len(slices))
    table.amax(*span)
    table.launch(*span)
    return bases


BALLAST_BYTES = 9 << 20
LOWER_HALVES = [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def all_upper_halves(low: int) -> Tensor:
    """Returns all floats with these lower 16 bits."""
    return torch.from_numpy(((np.arange(2**16, dtype=np.uint32) << 16) + np.uint32(low)).view(np.float32))


def ballast() -> Array:
    """Returns a slice so large that its launch bypasses the caches."""
    kind = ElementType.FLOAT8_E4M3
    return one_slice(rows=1, cols=BALLAST_BYTES, src_base=9, dst_base=10, src_type=kind, dst_type=kind)


@settings(max_examples=45)
@given(example=examples(), data=st.data(), large=st.booleans())
def test_copies_equal_torch_bit_for_bit_and_touch_nothing_else(
    implementations: list[str], example: Example, data: st.DataObject, large: bool
) -> None:
    first = data.draw(st.integers(0, len(example.slices)))
    last = data.draw(st.integers(first, len(example.slices)))
    expected = expected_bases(example, first, last)
    for implementation in implementations:
        note(implementation)
        with using(implementation):
            assert_same_bits(run(example, first, last, extra=ballast() if large else None), expected)


def one_slice(**fields: int) -> Array:
    """Returns a slice from base 0 to base 1. Other fields are those of an empty float32 slice."""
    slices = np.zeros(1, SLICE)
    slices["amax_base"], slices["dst_base"] = -1, 1
    for name, value in fields.items():
        slices[name] = value
    return slices


@pytest.mark.parametrize(
    ("source", "destination"), [pair for pair in sorted(PAIRS) if pair[0] != pair[1] and pair[0] != ElementType.FLOAT32]
)
def test_every_16_bit_value_is_converted_as_torch_does(
    implementation: str, source: ElementType, destination: ElementType
) -> None:
    values = torch.arange(2**16).to(torch.int16).view(DTYPES[source])
    fields = {}
    if destination == ElementType.FLOAT8_E4M3:
        values = values.nan_to_num(nan=3.0, posinf=5.0, neginf=-5.0)  # else whole blocks are NaN
        fields = {"amax_base": 8, "amax_stride": 512}
    check_row(values, source, destination, **fields)


def check_row(values: Tensor, source: ElementType, destination: ElementType, **fields: int) -> None:
    """Fails unless the conversion of a row equals torch's."""
    kinds = {"src_type": source, "dst_type": destination, "src_base": source, "dst_base": 4 + destination}
    sources = [torch.zeros(0, dtype=dtype) for dtype in DTYPES.values()]
    sources[source] = values
    sizes = tuple(len(values) if kind == destination else 0 for kind in ElementType)
    example = Example(one_slice(rows=1, cols=len(values), **kinds, **fields), tuple(sources), sizes, 512)
    assert_same_bits(run(example, 0, 1), expected_bases(example, 0, 1))


@pytest.mark.parametrize("destination", [ElementType.BFLOAT16, ElementType.FLOAT16])
@pytest.mark.parametrize("low", LOWER_HALVES)
def test_every_upper_half_of_a_float_is_rounded_as_torch_does(
    implementation: str, destination: ElementType, low: int
) -> None:
    check_row(all_upper_halves(low), ElementType.FLOAT32, destination)


@pytest.mark.parametrize("item", [ElementType.FLOAT8_E4M3, ElementType.BFLOAT16, ElementType.FLOAT32])
def test_a_matrix_cut_into_windows_is_packed_and_put_together_again(implementation: str, item: ElementType) -> None:
    dtype = BITS[DTYPES[item].itemsize]
    rows, edges = 300, [0, 5, 101, 102, 300, 301, 640, 777]
    matrix = torch.randint(-128 if dtype != torch.uint8 else 0, 128, (rows, edges[-1]), dtype=dtype)
    packed = torch.zeros(matrix.nbytes, dtype=torch.uint8)
    slices = one_slice(rows=rows, src_type=item, dst_type=item).repeat(len(edges) - 1)
    slices["cols"] = slices["dst_stride"] = np.diff(edges)
    slices["src_offset"], slices["dst_offset"] = edges[:-1], np.array(edges[:-1]) * rows
    slices["src_stride"] = edges[-1]
    source = matrix.view(DTYPES[item])
    pack = CopyTable(slices, CPU)
    pack.bind([source, packed])
    pack.launch(0, len(slices))
    parts = [matrix[:, begin:end].ravel() for begin, end in zip(edges, edges[1:], strict=False)]
    assert torch.equal(packed.view(dtype), torch.cat(parts))

    back = slices.copy()
    for name in ("base", "offset", "stride", "type"):
        back[f"src_{name}"], back[f"dst_{name}"] = slices[f"dst_{name}"], slices[f"src_{name}"]
    result = torch.zeros_like(matrix)
    unpack = CopyTable(back, CPU)
    unpack.bind([result.view(DTYPES[item]), packed])
    unpack.launch(0, len(back))
    assert torch.equal(result, matrix)


def test_parts_of_a_block_raise_its_amax_together_and_any_nan_wins(implementation: str) -> None:
    values = torch.tensor([1.0, -7.0, 3.0, 2.0, -torch.nan, 1.0, -torch.inf, 8.0])
    slices = one_slice(rows=1, cols=2, dst_type=ElementType.FLOAT8_E4M3, amax_base=2, amax_stride=1).repeat(4)
    slices["src_offset"], slices["dst_offset"] = [0, 2, 4, 6], [0, 2, 4, 6]
    slices["amax_offset"] = [0, 0, 1, 1]
    table = CopyTable(slices, CPU)
    amax = torch.zeros(2)
    table.bind([values, torch.zeros(8, dtype=torch.uint8), amax])
    table.amax(0, 2)
    assert amax.tolist() == [7.0, 0.0]
    table.amax(3, 4)
    assert amax.tolist() == [7.0, torch.inf]
    table.amax(0, 4)
    assert amax.view(torch.int32).tolist() == [0x40E00000, 0x7FC00000]


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        ({"rows": 1, "cols": 11}, (10, 20), "leaves base src_base, of 40 bytes: it ends 44 bytes after its beginning"),
        ({"rows": 1, "cols": 11}, (20, 10), "leaves base dst_base, of 40 bytes"),
        ({"rows": 3, "cols": 4, "src_stride": 8, "dst_stride": 4}, (19, 20), "leaves base src_base"),
        ({"rows": 2, "cols": 2, "dst_stride": 2**62, "src_stride": 2}, (20, 20), "leaves base dst_base"),
        ({"rows": 1, "cols": 1, "src_base": 2}, (20, 20), "src_base is not one of the 2 bases"),
        ({"rows": 1, "cols": 1, "dst_base": -1}, (20, 20), "dst_base is not one of the 2 bases"),
        ({"rows": 1, "cols": 1, "src_type": 1, "dst_type": 1}, (20, 20), "src_base does not hold the elements"),
    ],
)
def test_slices_that_leave_their_bases_are_refused(
    implementation: str, fields: dict[str, int], sizes: tuple[int, int], message: str
) -> None:
    table = CopyTable(np.concatenate([one_slice(), one_slice(**fields)]), CPU)
    with pytest.raises(ValueError, match=f"slice 1 of 2: .*{message}"):
        table.bind([torch.zeros(size) for size in sizes])
    with pytest.raises(RuntimeError, match="bind"):
        table.launch(0, 2)


def test_amax_entries_outside_their_base_are_refused() -> None:
    slices = one_slice(
        rows=2, cols=1, src_stride=1, dst_stride=1, dst_type=3, row_phase=127, amax_base=2, amax_stride=5, amax_offset=1
    )
    table = CopyTable(slices, CPU)
    bases = [torch.zeros(2), torch.zeros(2, dtype=torch.float8_e4m3fn)]
    with pytest.raises(ValueError, match="leaves base amax_base, of 24 bytes: it ends 28 bytes"):
        table.bind([*bases, torch.zeros(6)])
    table.bind([*bases, torch.zeros(7)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"src_type": 3, "dst_type": 0}, "pair of types"),
        ({"src_type": 1, "dst_type": 2}, "pair of types"),
        ({"src_type": 7, "dst_type": 7}, "pair of types"),
        ({"rows": -1}, "rows is negative"),
        ({"dst_offset": -1}, "dst_offset is negative"),
        ({"rows": 2, "cols": 2, "src_stride": 2, "dst_stride": 1}, "overlap in the destination"),
        ({"dst_type": 3}, "has no amax_base"),
        ({"amax_base": 2}, "does not quantise"),
        ({"dst_type": 3, "amax_base": 2, "col_phase": 128}, "col_phase is not within a block of 128"),
    ],
)
def test_slices_that_are_wrong_in_themselves_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"slice 0 of 1: .*{message}"):
        CopyTable(one_slice(**fields), CPU)


def test_bases_of_other_kinds_are_refused() -> None:
    table = CopyTable(one_slice(rows=1, cols=2), CPU)
    good = torch.zeros(8)
    for bad, message in (
        (torch.zeros(8, dtype=torch.float64), "base 1 has dtype torch.float64"),
        (torch.zeros(4, 2).t(), "base 1 is on cpu with strides"),
        (torch.zeros(8, device="meta"), "base 1 is on meta"),
        (torch.zeros(33, dtype=torch.uint8)[1:], "base 1 begins between two elements of 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            table.bind([good, bad])


def test_bytes_serve_every_type_and_tensors_can_move(implementation: str) -> None:
    values = torch.arange(6.0)
    table = CopyTable(one_slice(rows=1, cols=3, src_offset=2, dst_offset=1, dst_type=ElementType.BFLOAT16), CPU)
    for _ in range(2):
        staging = torch.zeros(11, dtype=torch.uint8)
        table.bind([values.clone(), staging])
        table.launch(0, 1)
        assert staging[2:8].view(torch.bfloat16).tolist() == [2, 3, 4]
        assert not staging[:2].any() and not staging[8:].any()
    assert table.num_launches == 2
    table.release()
    with pytest.raises(RuntimeError, match="bind"):
        table.launch(0, 1)


def test_a_range_must_be_within_the_table_and_an_empty_one_is_no_launch(implementation: str) -> None:
    table = CopyTable(one_slice(rows=1, cols=2), CPU)
    table.bind([torch.ones(2), torch.zeros(2)])
    for first, last in ((-1, 1), (0, 2), (1, 0)):
        with pytest.raises(ValueError, match="of a table of 1"):
            table.launch(first, last)
    table.launch(1, 1)
    assert table.num_launches == 0


ELEMENT_TYPES = {dtype: kind for kind, dtype in DTYPES.items() if kind != ElementType.FLOAT8_E4M3}


def e4m3_values() -> np.ndarray:
    """Returns the numbers of codes 0x00 to 0x7e: 4 bits of exponent with bias 7, 3 bits of mantissa."""
    codes = np.arange(0x7F)
    exponents, mantissas = codes >> 3, codes & 7
    return np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))


def slow_code(x: np.float32) -> int:
    """Returns the code of the nearest e4m3 number. Ties go to the even code."""
    if np.isnan(x):
        return 0x7F
    distances = np.abs(e4m3_values() - abs(float(x)))
    nearest = np.flatnonzero(distances == distances.min())
    code = int(nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0])
    return code | (0x80 if np.signbit(x) else 0)


def slow_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q = np.zeros(x.shape, dtype=np.uint8)
    scales = np.zeros([-(-size // BLOCK) for size in x.shape], dtype=np.float32)
    for i, j in np.ndindex(scales.shape):
        place = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        amax = np.abs(x[place]).max()
        if np.isfinite(amax):
            amax = max(amax, np.float32(2.0**-100))
            scales[i, j] = amax / np.float32(448)
            with np.errstate(under="ignore"):
                q[place] = np.vectorize(slow_code)(x[place] * (np.float32(448) / amax))
        else:
            scales[i, j], q[place] = np.uint32(0x7FC00000).view(np.float32), 0x7F
    return q, scales


@pytest.mark.parametrize(
    ("shape", "magnitude"),
    [*product([(1, 1), (3, 200)], [0.0, 1e-44, 1e-31, 1e-6, 1.0, 300.0, 3e38]), ((130, 129), 1.0), ((130, 129), 1e-44)],
)
def test_quantised_blocks_follow_the_formula(shape: tuple[int, int], magnitude: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.uniform(-1, 1, shape) * magnitude).astype(np.float32)
    x.flat[::7] *= np.float32(2.0**-12)  # some values become subnormal or zero
    q, scales = quantize_blocks(torch.from_numpy(x))
    slow_q, slow_scales = slow_quantize(x)
    assert np.array_equal(q.view(torch.uint8).numpy(), slow_q)
    assert np.array_equal(scales.numpy().view(np.uint32), slow_scales.view(np.uint32))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_others_are_not(bad: float) -> None:
    x = torch.ones(130, 260)
    x[129, 140] = bad
    q, scales = quantize_blocks(x)
    block = np.s_[128:, 128:256]
    assert (q[block].view(torch.uint8) == 0x7F).all()
    assert scales[1, 1].view(torch.int32).item() == 0x7FC00000
    scales[1, 1] = 1
    q[block] = 1
    assert not q.float().isnan().any() and scales.isfinite().all()


def test_dequantised_values_are_near() -> None:
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    q, scales = quantize_blocks(x)
    back = dequantize(q, scales)
    assert q.dtype == torch.float8_e4m3fn and scales.shape == (2, 3)
    # Half a step of 3 mantissa bits, or half of the smallest subnormal.
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2**-4, scales.max() * 2**-10) * 1.001).all()
    assert back.abs().max() == x.abs().max()


@st.composite
def cut_matrices(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int]]:
    """Draws a matrix, and the rows and columns of its cuts."""
    rows, cols = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    matrix = torch.randn(rows, cols, generator=generator) * 10.0 ** draw(st.integers(-6, 4))
    if draw(st.booleans()):
        matrix[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = draw(
            st.sampled_from([torch.nan, torch.inf, -torch.inf, -0.0])
        )
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))}) for size in (rows, cols)]
    return matrix.to(draw(st.sampled_from(sorted(ELEMENT_TYPES, key=str)))), cuts[0], cuts[1]


@pytest.mark.parametrize("native", ["off", "auto"])
@settings(max_examples=25)
@given(case=cut_matrices())
def test_parts_with_reduced_amax_equal_the_whole_tensor_quantised(
    native: str, case: tuple[Tensor, list[int], list[int]]
) -> None:
    """Every part is a separate tensor, as on its own rank. The parts share only the amax."""
    matrix, row_cuts, col_cuts = case
    boxes = [
        (top, left, bottom - top, right - left)
        for top, bottom in zip(row_cuts, row_cuts[1:], strict=False)
        for left, right in zip(col_cuts, col_cuts[1:], strict=False)
    ]
    parts = [matrix[top : top + rows, left : left + cols].clone() for top, left, rows, cols in boxes]
    blocks = -(-matrix.shape[1] // BLOCK)
    slices = np.zeros(len(boxes), SLICE)
    for number, (entry, (top, left, rows, cols)) in enumerate(zip(slices, boxes, strict=True)):
        entry["src_base"], entry["src_type"], entry["src_stride"] = 2 + number, ELEMENT_TYPES[matrix.dtype], cols
        entry["rows"], entry["cols"] = rows, cols
        entry["dst_type"], entry["dst_stride"] = ElementType.FLOAT8_E4M3, matrix.shape[1]
        entry["dst_offset"] = top * matrix.shape[1] + left
        entry["amax_base"], entry["amax_stride"] = 1, blocks
        entry["amax_offset"] = top // BLOCK * blocks + left // BLOCK
        entry["row_phase"], entry["col_phase"] = top % BLOCK, left % BLOCK
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLTRAIN_NATIVE", native)
        table = CopyTable(slices, torch.device("cpu"))
    q, amax = torch.zeros_like(matrix, dtype=torch.float8_e4m3fn), torch.zeros(-(-matrix.shape[0] // BLOCK), blocks)
    table.bind([q, amax, *parts])
    table.amax(0, len(slices))
    table.launch(0, len(slices))

    whole_q, whole_scales = quantize_blocks(matrix)
    assert torch.equal(amax.view(torch.int32), block_amax(matrix).view(torch.int32))
    assert torch.equal(scales_of(amax).view(torch.int32), whole_scales.view(torch.int32))
    assert torch.equal(q.view(torch.uint8), whole_q.view(torch.uint8))


REPOSITORY = Path(__file__).parents[2]
PROPERTY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


class EmulatedCopies(CudaCopies):
    """A copy table with launches on the host."""

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


@PROPERTY
@given(example=examples(), multiple=st.sampled_from([1, 1, 4, 16]), data=st.data())
def test_any_number_of_threads_copies_as_torch_does_bit_for_bit_and_touches_nothing_else(
    emulated: ctypes.CDLL, example: Example, multiple: int, data: st.DataObject
) -> None:
    example = aligned(example, multiple)
    bases, copies = example.bases(), EmulatedCopies(example.slices, CPU)
    first = data.draw(st.integers(0, len(example.slices)))
    last = data.draw(st.integers(first, len(example.slices)))
    copies.bind(bases)
    copies.num_blocks = data.draw(st.just(copies.num_blocks) | st.integers(1, 20))
    copies.amax(first, last)
    copies.launch(first, last)
    assert_same_bits(bases, expected_bases(example, first, last))


@pytest.mark.parametrize(("source", "destination"), [(0, 0), (1, 1), (3, 3), (0, 1), (1, 0), (0, 3), (2, 3)])
@pytest.mark.parametrize("gap", [0, 1, 16])
def test_windows_of_every_width_go_through_the_same_walk(
    emulated: ctypes.CDLL, source: ElementType, destination: ElementType, gap: int
) -> None:
    example = windows(ElementType(source), ElementType(destination), gap)
    count = len(example.slices)
    assert_same_bits(run(example, 0, count), expected_bases(example, 0, count))


def test_tables_follow_bases_that_move(emulated: ctypes.CDLL) -> None:
    table = CopyTable(one_slice(rows=2, cols=3, src_stride=4, dst_stride=3), CPU)
    for _ in range(3):
        source, destination = torch.rand(2, 4), torch.zeros(2, 3)
        table.bind([source, destination])
        table.launch(0, 1)
        assert torch.equal(destination, source[:, :3])


@pytest.mark.parametrize("low", LOWER_HALVES)
def test_the_emulation_rounds_every_upper_half_of_a_float_as_torch_does(emulation: ctypes.CDLL, low: int) -> None:
    values = all_upper_halves(low)
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
    """Draws slices of many shapes, larger than any memory."""
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
    """Returns whether the tiles form a grid of adjacent rows and columns over exactly the slice."""
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
