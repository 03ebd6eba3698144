"""Products of runs of rows, each with a matrix of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16
"""Bytes, of rows of what torch's grouped product takes."""


def is_grouped_on_device(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies all groups of `matrices`, read as `dtype`, in one launch, without a look of the host at
    the groups."""
    return (
        matrices.is_cuda
        and dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and all(size * dtype.itemsize % _ALIGNMENT == 0 for size in matrices.shape[1:])
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[rows, m] from `rows` [rows, n] and `matrices` [groups, m, n]: group g, which `ends` at that row, times the
    transpose of matrix g. What lies behind the last group is left undefined."""
    if is_grouped_on_device(matrices, matrices.dtype):
        product: Tensor = F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.int())
        return product
    product = rows.new_empty(len(rows), matrices.shape[1])
    start = 0
    for matrix, end in zip(matrices.unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix.t(), out=product[start:end])
        start = end
    return product
