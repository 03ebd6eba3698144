"""FP8 in blocks: the reference against a formula written element by element, and whole tensors against their parts."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import CopyTable, block_amax, dequantize, quantize_blocks, scales_of
from rltrain.reshard.native import BLOCK, SLICE

DTYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
}


def e4m3_values() -> np.ndarray:
    """The numbers of codes 0x00 to 0x7e: 4 bits of exponent with bias 7, 3 of mantissa."""
    codes = np.arange(0x7F)
    exponents, mantissas = codes >> 3, codes & 7
    return np.where(exponents == 0, mantissas / 8 * 2.0**-6, (1 + mantissas / 8) * 2.0 ** (exponents - 7.0))


def slow_code(x: np.float32) -> int:
    """The nearest e4m3 number, of two equally near ones that with an even code."""
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
    x.flat[::7] *= np.float32(2.0**-12)  # some of it becomes subnormal or zero
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
    """A matrix and the rows and columns at which it is cut."""
    rows, cols = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    matrix = torch.randn(rows, cols, generator=generator) * 10.0 ** draw(st.integers(-6, 4))
    if draw(st.booleans()):
        matrix[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = draw(
            st.sampled_from([torch.nan, torch.inf, -torch.inf, -0.0])
        )
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))}) for size in (rows, cols)]
    return matrix.to(draw(st.sampled_from(sorted(DTYPES, key=str)))), cuts[0], cuts[1]


@pytest.mark.parametrize("native", ["off", "auto"])
@settings(max_examples=25)
@given(case=cut_matrices())
def test_parts_with_reduced_amax_equal_the_whole_tensor_quantised(
    native: str, case: tuple[Tensor, list[int], list[int]]
) -> None:
    """Every part lies in a tensor of its own, as on a rank of its own; what it knows of the others is the amax."""
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
        entry["src_base"], entry["src_type"], entry["src_stride"] = 2 + number, DTYPES[matrix.dtype], cols
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
