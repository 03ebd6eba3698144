"""The CUDA kernels against the CPU library, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard import native
from rltrain.reshard.checksums import BOX, checksums
from rltrain.reshard.copy_table import CopyTable, quantize_blocks, scales_of
from rltrain.reshard.native import BLOCK, PAIRS, SLICE, quantises
from tests.support.slice_examples import DTYPES, Example, aligned, assert_same_bits, examples, windows

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
DEVICE = torch.device("cuda")
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _native_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requires the native libraries. Without them these tests would compare torch with itself."""
    monkeypatch.setenv(native.VARIABLE, "require")


def run(example: Example, device: torch.device, first: int, last: int) -> list[Tensor]:
    """Returns the bases after amax and launch of slices[first:last] on the device."""
    bases = [base.to(device, copy=True) for base in example.bases()]
    table = CopyTable(example.slices, device)
    table.bind(bases)
    table.amax(first, last)
    table.launch(first, last)
    return [base.cpu() for base in bases]


@pytest.mark.parametrize("kind", ElementType)
@pytest.mark.parametrize(("cols", "gap"), [(4096, 0), (96, 4000), (33, 1)])
@pytest.mark.parametrize("exact", [True, False])
def test_checksums_equal_those_of_the_cpu(kind: ElementType, cols: int, gap: int, exact: bool) -> None:
    values = torch.randint(0, 256, (2**24,), dtype=torch.uint8).view(DTYPES[kind])
    boxes = np.zeros(2, BOX)
    boxes["cols"], boxes["stride"], boxes["width"], boxes["exact"] = cols, cols + gap, 3 * cols, exact
    boxes["rows"], boxes["entry"] = len(values) // (cols + gap) - 2, [0, 2]
    boxes["offset"], boxes["place"] = [0, 5], [7, 2**40]
    assert checksums(boxes, [values.to(DEVICE)], 3).tolist() == checksums(boxes, [values], 3).tolist()


def one_slice(**fields: int) -> Array:
    """Returns a slice of base 0 to base 1. Missing fields are those of an empty one of float32."""
    slices = np.zeros(1, SLICE)
    slices["amax_base"], slices["dst_base"] = -1, 1
    for name, value in fields.items():
        slices[name] = value
    return slices


@PROPERTY
@given(example=examples(), multiple=st.sampled_from([1, 4, 16]), data=st.data())
def test_ranges_of_random_slices(example: Example, multiple: int, data: st.DataObject) -> None:
    example = aligned(example, multiple)
    first = data.draw(st.integers(0, len(example.slices)))
    last = data.draw(st.integers(first, len(example.slices)))
    assert_same_bits(run(example, DEVICE, first, last), run(example, CPU, first, last))


@pytest.mark.parametrize(("source", "destination"), sorted(PAIRS))
@pytest.mark.parametrize("gap", [0, 1, 16])
def test_windows_of_every_width(source: ElementType, destination: ElementType, gap: int) -> None:
    example = windows(source, destination, gap)
    count = len(example.slices)
    assert_same_bits(run(example, DEVICE, 0, count), run(example, CPU, 0, count))


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "elements"])
@pytest.mark.parametrize(("source", "destination"), sorted(pair for pair in PAIRS if pair[0] != pair[1]))
def test_every_16_bit_value_and_every_upper_half_of_a_float(
    source: ElementType, destination: ElementType, offset: int
) -> None:
    values = torch.arange(2**16).to(torch.int16).view(DTYPES[source]) if source != ElementType.FLOAT32 else floats()
    count = values.numel()
    # One row of blocks with amax 448: elements are not scaled, and larger ones are saturated.
    slices = one_slice(rows=1, cols=count, src_type=source, dst_type=destination, dst_offset=offset)
    slices["amax_base"] = np.where(quantises(slices), 2, -1)
    table_of = {device: CopyTable(slices, device) for device in (CPU, DEVICE)}
    results = []
    for device, table in table_of.items():
        result = torch.zeros(count + 1, dtype=DTYPES[destination], device=device)
        table.bind([values.to(device), result, torch.full((-(-count // BLOCK),), 448.0, device=device)])
        table.launch(0, 1)
        results.append([result.cpu()])
    assert_same_bits(results[1], results[0])


def floats() -> Tensor:
    """Returns all upper halves of float32, with lower halves next to thresholds of rounding."""
    lows = np.array([0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    bits = (np.arange(2**16, dtype=np.uint32) << 16)[:, None] + lows
    return torch.from_numpy(bits.ravel().view(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_of_a_tensor_are_quantised_as_the_whole(dtype: torch.dtype) -> None:
    rows, cols, row_edges, col_edges = 1000, 776, [0, 100, 101, 640, 1000], [0, 96, 300, 776]
    x = (torch.randn(rows, cols) * torch.logspace(-9, 3, cols)).to(dtype)
    x[130, 300], x[700, 5], x[:, 512:640] = torch.nan, torch.inf, 0
    kind = next(kind for kind, other in DTYPES.items() if other == dtype)
    amax_cols = -(-cols // BLOCK)
    slices = np.concatenate(
        [
            one_slice(rows=r1 - r0, cols=c1 - c0, src_offset=r0 * cols + c0, dst_offset=r0 * cols + c0)
            for r0, r1 in zip(row_edges, row_edges[1:], strict=False)
            for c0, c1 in zip(col_edges, col_edges[1:], strict=False)
        ]
    )
    slices["src_stride"] = slices["dst_stride"] = cols
    slices["src_type"], slices["dst_type"], slices["amax_base"] = kind, ElementType.FLOAT8_E4M3, 2
    row, col = np.divmod(slices["src_offset"], cols)
    slices["row_phase"], slices["col_phase"] = row % BLOCK, col % BLOCK
    slices["amax_stride"], slices["amax_offset"] = amax_cols, row // BLOCK * amax_cols + col // BLOCK
    table = CopyTable(slices, DEVICE)
    result = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn, device=DEVICE)
    amax = torch.zeros(-(-rows // BLOCK), amax_cols, device=DEVICE)
    table.bind([x.to(DEVICE), result, amax])
    table.amax(0, len(slices))
    table.launch(0, len(slices))
    assert table.num_launches == 2
    expected, scales = quantize_blocks(x)
    assert_same_bits([result.cpu().ravel(), scales_of(amax.cpu()).ravel()], [expected.ravel(), scales.ravel()])


def test_launches_under_way_keep_the_bases_they_were_given() -> None:
    count, streams = 1 << 20, [torch.cuda.Stream() for _ in range(2)]
    table = CopyTable(one_slice(rows=1, cols=count), DEVICE)
    kept = []
    torch.cuda.synchronize()
    for turn in range(20):
        source, destination = torch.full((count,), float(turn), device=DEVICE), torch.zeros(count, device=DEVICE)
        stream = streams[turn % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # about a millisecond: the next turns bind before this launch begins
            table.bind([source, destination])
            table.launch(0, 1)
        kept.append((source, destination))
    torch.cuda.synchronize()
    assert table.num_launches == 20
    for turn, (_, destination) in enumerate(kept):
        assert (destination == turn).all(), turn


def test_tables_may_go_before_their_launches_have_ended() -> None:
    source = torch.arange(1 << 20, device=DEVICE)
    results, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        result = torch.zeros_like(source)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            table = CopyTable(one_slice(rows=1, cols=2 << 20), DEVICE)
            table.bind([source.view(torch.float32), result.view(torch.float32)])
            table.launch(0, 1)
            del table
        results.append(result)
    torch.cuda.synchronize()
    assert all(torch.equal(result, source) for result in results)


def test_thousands_of_slices_in_one_launch_of_few_blocks() -> None:
    count, cols = 5000, 200
    slices = one_slice(rows=3, cols=cols, src_stride=cols + 8, dst_stride=cols).repeat(count)
    slices["src_type"] = slices["dst_type"] = ElementType.BFLOAT16
    slices["src_offset"] = np.arange(count) * 3 * (cols + 8)
    slices["dst_offset"] = np.arange(count)[::-1] * 3 * cols
    source = torch.randn(count, 3, cols + 8).bfloat16()
    result = torch.zeros(count, 3, cols, dtype=torch.bfloat16, device=DEVICE)
    table = CopyTable(slices, DEVICE)
    table._copies.num_blocks = 5
    table.bind([source.to(DEVICE), result])
    table.launch(0, count)
    assert table.num_launches == 1
    assert torch.equal(result.cpu(), source[:, :, :cols].flip(0))


def test_offsets_beyond_32_bits() -> None:
    size = 5 << 30
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip("needs 10 GiB of GPU memory")
    base = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    values = torch.randint(1, 255, (3, 100), dtype=torch.uint8, device=DEVICE)
    kind = ElementType.FLOAT8_E4M3
    stride = (5 << 29) - 64
    there = one_slice(rows=2, cols=100, src_stride=100, dst_stride=stride, dst_offset=7, src_type=kind, dst_type=kind)
    back = one_slice(rows=2, cols=100, src_stride=stride, dst_stride=100, src_offset=7, src_type=kind, dst_type=kind)
    back["src_base"], back["dst_base"] = 1, 2
    table = CopyTable(np.concatenate([there, back]), DEVICE)
    result = torch.zeros_like(values)
    table.bind([values, base, result])
    table.launch(0, 1)
    table.launch(1, 2)
    assert torch.equal(result[:2], values[:2])
    assert torch.equal(base[7 + stride : 107 + stride], values[1])
    assert int(base.count_nonzero()) == 200


CASES = {
    "bf16, whole rows": (ElementType.BFLOAT16, ElementType.BFLOAT16, 4096),
    "bf16, windows of 96 columns": (ElementType.BFLOAT16, ElementType.BFLOAT16, 96),
    "bf16, windows of 1536 columns": (ElementType.BFLOAT16, ElementType.BFLOAT16, 1536),
    "fp32 -> bf16": (ElementType.FLOAT32, ElementType.BFLOAT16, 1536),
    "bf16 -> fp32": (ElementType.BFLOAT16, ElementType.FLOAT32, 1536),
    "fp32 -> e4m3": (ElementType.FLOAT32, ElementType.FLOAT8_E4M3, 1536),
    "bf16 -> e4m3": (ElementType.BFLOAT16, ElementType.FLOAT8_E4M3, 1536),
    "bf16, odd addresses": (ElementType.BFLOAT16, ElementType.BFLOAT16, 1535),
}


@pytest.mark.parametrize("name", CASES)
def test_bandwidth(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source_type, destination_type, cols = CASES[name]
    rows = (1 << 29) // 4096
    windows_per_row = 4096 // cols
    slices = one_slice(rows=rows, cols=cols, src_stride=4096, dst_stride=cols).repeat(windows_per_row)
    slices["src_offset"] = np.arange(windows_per_row) * cols
    slices["dst_offset"] = np.arange(windows_per_row) * cols * rows
    slices["src_type"], slices["dst_type"] = source_type, destination_type
    slices["amax_base"] = np.where(quantises(slices), 2, -1)
    source = torch.randn(rows, 4096, device=DEVICE).to(DTYPES[source_type])
    result = torch.zeros(rows * cols * windows_per_row, dtype=DTYPES[destination_type], device=DEVICE)
    table = CopyTable(slices, DEVICE)
    table.bind([source, result, torch.ones(rows, 32, device=DEVICE)])
    num_bytes = result.numel() * (source.itemsize + result.itemsize)
    plain = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(plain)
    ours_ms = milliseconds(lambda: table.launch(0, len(slices)))
    bound_ms = milliseconds(lambda: other.copy_(plain))
    with capsys.disabled():
        speeds = [num_bytes / ms / 1e6 for ms in (ours_ms, bound_ms)]
        print(f"\n{name}: {speeds[0]:.0f} GB/s read and written, device copy {speeds[1]:.0f}, {bound_ms / ours_ms:.2f}")
    assert bound_ms / ours_ms > 0.1


def milliseconds(work) -> float:
    """Returns the median of several runs, without the first one."""
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times[1:]))
