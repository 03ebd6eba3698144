"""Copies of slices: every implementation against plain torch operations, and what a table refuses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard import native
from rltrain.reshard.copy_table import CopyTable
from rltrain.reshard.native import PAIRS, SLICE
from tests.slice_examples import BITS, DTYPES, Example, assert_same_bits, examples, expected_bases

CPU = torch.device("cpu")
INSTRUCTIONS = {"native for any processor": 0, "native with AVX2": 1, "native with AVX-512": 2}


IMPLEMENTATIONS = ("torch", *INSTRUCTIONS)


@contextmanager
def using(implementation: str) -> Iterator[None]:
    """Tables use this implementation, and two threads."""
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
    """Makes tables use it."""
    if not runs_here(request.param):
        pytest.skip("this processor lacks the instructions")
    with using(request.param):
        yield request.param


@pytest.fixture(scope="module")
def implementations() -> list[str]:
    """All that this processor can run; for the others other tests are skipped."""
    return [implementation for implementation in IMPLEMENTATIONS if runs_here(implementation)]


def native_library() -> object:
    try:
        return native.cpu_library()
    except native.LibraryError as error:
        if os.environ.get(native.VARIABLE) == "require":
            raise
        pytest.skip(f"{error}")


def run(example: Example, first: int, last: int, *, extra: Array | None = None) -> list[Tensor]:
    """The bases after amax and launch of slices[first:last]; `extra` is launched along with them."""
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


def ballast() -> Array:
    """A slice large enough that its launch is written past the caches."""
    slices = np.zeros(1, SLICE)
    slices["rows"], slices["cols"], slices["amax_base"] = 1, BALLAST_BYTES, -1
    slices["src_base"], slices["dst_base"] = 9, 10
    slices["src_type"] = slices["dst_type"] = ElementType.FLOAT8_E4M3
    return slices


@settings(max_examples=30)
@given(example=examples(), data=st.data())
def test_copies_equal_torch_bit_for_bit_and_touch_nothing_else(
    implementations: list[str], example: Example, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(example.slices)))
    last = data.draw(st.integers(first, len(example.slices)))
    expected = expected_bases(example, first, last)
    for implementation in implementations:
        note(implementation)
        with using(implementation):
            assert_same_bits(run(example, first, last), expected)


@settings(max_examples=30)
@given(example=examples())
def test_large_launches_equal_torch_too(implementations: list[str], example: Example) -> None:
    count = len(example.slices)
    expected = expected_bases(example, 0, count)
    for implementation in implementations:
        note(implementation)
        with using(implementation):
            assert_same_bits(run(example, 0, count, extra=ballast()), expected)


def one_slice(**fields: int) -> Array:
    """A slice of base 0 to base 1; what is not given is as in an empty one of float32."""
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
    slices = one_slice(rows=1, cols=2**16, src_type=source, dst_type=destination)
    if destination == ElementType.FLOAT8_E4M3:
        values = values.nan_to_num(nan=3.0, posinf=5.0, neginf=-5.0)  # else whole blocks are NaN
        slices["amax_base"], slices["amax_stride"] = 8, 512
    slices["src_base"], slices["dst_base"] = source, 4 + destination
    sources = [torch.zeros(0, dtype=dtype) for dtype in DTYPES.values()]
    sources[source] = values
    sizes = tuple(2**16 if kind == destination else 0 for kind in ElementType)
    example = Example(slices, tuple(sources), sizes, 512)
    assert_same_bits(run(example, 0, 1), expected_bases(example, 0, 1))


@pytest.mark.parametrize("destination", [ElementType.BFLOAT16, ElementType.FLOAT16])
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_of_a_float_is_rounded_as_torch_does(
    implementation: str, destination: ElementType, low: int
) -> None:
    values = torch.from_numpy(((np.arange(2**16, dtype=np.uint32) << 16) + low).astype(np.uint32).view(np.float32))
    slices = one_slice(rows=1, cols=2**16, dst_base=4 + destination, dst_type=destination)
    empty = [torch.zeros(0, dtype=dtype) for dtype in DTYPES.values()]
    sizes = tuple(2**16 if kind == destination else 0 for kind in ElementType)
    example = Example(slices, (values, *empty[1:]), sizes, 0)
    assert_same_bits(run(example, 0, 1), expected_bases(example, 0, 1))


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

    names = ("base", "offset", "stride", "type")
    back = slices.copy()
    for name in names:
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
