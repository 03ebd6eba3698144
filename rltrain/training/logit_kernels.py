"""Triton kernels for tiles of logits. Import this module only if Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rltrain.models import layer_kernels

# Each kernel reads a tile's logits once: one for the statistics of log-probs, one for the gradients of the logits.

_MOST_COLUMNS = 4096
_ROW_STATISTICS = 3


@triton.jit
def _scaled(x, scale, softcap, is_capped: tl.constexpr):
    """Returns fp32 logits times `scale`. Capped ones are rounded to the type of `x` first."""
    z = x.to(tl.float32)
    if is_capped:
        shrunk = tl.exp(-2.0 * tl.abs(z / softcap))
        tanh = (1.0 - shrunk) / (1.0 + shrunk)
        z = (softcap * tl.where(z < 0, -tanh, tanh)).to(x.dtype).to(tl.float32)
    return z * scale


@triton.jit
def _labels_of(row, starts, of_each_row, has_starts: tl.constexpr):
    """Returns the first label of a row, and the first of the next."""
    if has_starts:
        return tl.load(starts + row), tl.load(starts + row + 1)
    else:
        return row * of_each_row, (row + 1) * of_each_row


@triton.jit(do_not_specialize=["first_row", "first_column", "num_columns", "num_rows", "of_each_row"])
def _read(
    logits, row_stride, first_row, first_column, num_columns, statistics, num_rows, targets,
    labels, starts, of_each_row, scale, softcap,
    block_columns: tl.constexpr, has_starts: tl.constexpr, is_capped: tl.constexpr,
):  # fmt: skip
    """Adds a tile to a row's statistics per program, with an online softmax (arXiv:1805.02867)."""
    own, row = tl.program_id(0).to(tl.int64), first_row + tl.program_id(0).to(tl.int64)
    logits += own * row_stride
    place = tl.arange(0, block_columns)
    largest = tl.load(statistics + row)
    total = tl.load(statistics + num_rows + row)
    weighted = tl.load(statistics + 2 * num_rows + row)
    first = 0
    while first < num_columns:  # Triton's interpreter has no ranges up to an argument with numpy 2.4
        is_there = first + place < num_columns
        z = _scaled(tl.load(logits + first + place, mask=is_there, other=0.0), scale, softcap, is_capped)
        new_largest = tl.maximum(largest, tl.max(tl.where(is_there, z, -1e30), 0))
        shift, shifted = largest - new_largest, z - new_largest
        exponentials = tl.where(is_there, tl.exp(shifted), 0.0)
        weighted = tl.exp(shift) * (weighted + shift * total) + tl.sum(shifted * exponentials, 0)
        total = tl.exp(shift) * total + tl.sum(exponentials, 0)
        largest = new_largest
        first += block_columns
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, total)
    tl.store(statistics + 2 * num_rows + row, weighted)
    label, stop = _labels_of(row, starts, of_each_row, has_starts)
    while label < stop:
        column = tl.load(labels + label) - first_column
        if (column >= 0) & (column < num_columns):
            tl.store(targets + label, _scaled(tl.load(logits + column), scale, softcap, is_capped))
        label += 1


@triton.jit(do_not_specialize=["first_row", "first_column", "num_columns", "of_each_row"])
def _differentiate(
    logits, row_stride, gradients, gradient_stride, first_row, first_column, num_columns,
    log_normalizers, factors, of_entropies, of_labels, labels, starts, of_each_row, scale, softcap,
    block_columns: tl.constexpr, has_starts: tl.constexpr, is_capped: tl.constexpr, has_entropies: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of some columns of a row per program."""
    own, row = tl.program_id(0).to(tl.int64), first_row + tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_there = place < num_columns
    z = _scaled(tl.load(logits + own * row_stride + place, mask=is_there, other=0.0), scale, softcap, is_capped)
    logprobs = z - tl.load(log_normalizers + row)
    factor = tl.load(factors + row)
    if has_entropies:
        gradient = tl.exp(logprobs) * (factor + tl.load(of_entropies + row) * logprobs)
    else:
        gradient = tl.exp(logprobs) * factor
    label, stop = _labels_of(row, starts, of_each_row, has_starts)
    lowest = tl.program_id(1) * block_columns
    while label < stop:
        column = tl.load(labels + label) - first_column
        if (column >= lowest) & (column < lowest + block_columns):
            gradient += tl.where(place == column, tl.load(of_labels + label), 0.0)
        label += 1
    if is_capped:
        bent = z / (softcap * scale)
        gradient *= 1.0 - bent * bent
    tl.store(gradients + own * gradient_stride + place, gradient, mask=is_there)


def _block_columns(num_columns: int) -> int:
    return min(triton.next_power_of_2(num_columns), _MOST_COLUMNS)


def read(
    logits: Tensor,
    first: tuple[int, int],
    statistics: Tensor,
    targets: Tensor,
    labels: tuple[Tensor, Tensor | None, int],
    scale: float,
    softcap: float | None,
) -> None:
    """Adds a tile of logits [rows, columns] to `statistics` [3, all rows], and stores scaled logits of its labels.

    `first` are the tile's first row and column. The statistics are max z, sum e^(z - max) and sum (z - max) e^(z - max)
    of the scaled logits z. `labels` are the columns of all labels, sorted by rows, with either the first label of each
    row or the number of labels of every row. `targets` [labels] are written for labels with columns of the tile.
    """
    columns, starts, of_each_row = labels
    assert len(statistics) == _ROW_STATISTICS and statistics.is_contiguous()
    layer_kernels.launch(
        _read, (len(logits),),
        logits, logits.stride(0), *first, logits.size(1), statistics, statistics.size(1), targets,
        columns, columns if starts is None else starts, of_each_row, scale, softcap or 1.0,
        block_columns=_block_columns(logits.size(1)), has_starts=starts is not None, is_capped=softcap is not None,
        num_warps=8,
    )  # fmt: skip


def differentiate(
    logits: Tensor,
    first: tuple[int, int],
    rows: tuple[Tensor, Tensor, Tensor | None],
    of_labels: Tensor,
    labels: tuple[Tensor, Tensor | None, int],
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradients of a tile of logits [rows, columns], in the tile's memory if it has the `dtype`.

    `rows` are the log-normalizers of all rows, and the factors a and b in e^l (a + b l) for log-probs l, with None for
    b = 0. `of_labels` are the terms of labels. The other arguments are those of `read`.
    """
    columns, starts, of_each_row = labels
    gradients = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    log_normalizers, factors, of_entropies = rows
    block_columns = _block_columns(logits.size(1))
    layer_kernels.launch(
        _differentiate, (len(logits), triton.cdiv(logits.size(1), block_columns)),
        logits, logits.stride(0), gradients, gradients.stride(0), *first, logits.size(1),
        log_normalizers, factors, factors if of_entropies is None else of_entropies, of_labels,
        columns, columns if starts is None else starts, of_each_row, scale, softcap or 1.0,
        block_columns=block_columns, has_starts=starts is not None, is_capped=softcap is not None,
        has_entropies=of_entropies is not None, num_warps=8,
    )  # fmt: skip
    return gradients


def check(device: torch.device) -> None:
    """Raises an error if the kernels fail on `device`, or compute other numbers than torch."""
    logits = torch.arange(10.0, device=device).view(2, 5).cos()
    columns, statistics = torch.tensor([4, 0], device=device), torch.zeros(3, 2, device=device)
    targets, labels = torch.zeros(2, device=device), (columns, None, 1)
    statistics[0] = -1e30
    read(logits, (0, 0), statistics, targets, labels, 0.5, None)
    log_softmax = torch.log_softmax(logits * 0.5, 1)
    log_normalizer = statistics[0] + statistics[1].log()
    torch.testing.assert_close(targets - log_normalizer, log_softmax.gather(1, columns[:, None])[:, 0])
    given = log_normalizer, torch.full_like(log_normalizer, -0.5), None
    expected = 0.5 * (torch.nn.functional.one_hot(columns, 5) - log_softmax.exp())
    found = differentiate(logits, (0, 0), given, torch.full_like(targets, 0.5), labels, 0.5, None, torch.float32)
    torch.testing.assert_close(found, expected)
