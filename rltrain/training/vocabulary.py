"""Log-probs, entropies and their gradients from hidden states and the weights of the vocabulary, in tiles."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.attention import soft_capped
from rltrain.models.products import add_product, wide_product

# Log-probs and entropy from logits with columns split over a tensor-parallel group.
#
# The input is hidden states and the vocabulary's weights. Logits are computed tile by tile: for some rows and some
# columns, in forward and again in backward. They are never held for all rows and columns, unless they are few.

CHUNK_ELEMENTS = 1 << 26
"""Most logits in working memory where rows need all of their columns."""
KEPT_ELEMENTS = {"cpu": 1 << 28, "cuda": 1 << 26}
"""Most logits kept from forward to backward, by type of device. On CPUs products take longer than memory."""
TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Most logits of a tile, by type of device."""
TILE_ROWS = {"cpu": 1 << 10, "cuda": 1 << 14}
"""Most rows of a tile that has not all columns. A fourth of them makes products with all columns fast enough."""
ABSENT = -1e30  # maximum of a shard of padding columns alone; finite, so that 0 * (ABSENT - maximum) is 0


@dataclass(frozen=True)
class Logits:
    """This rank's columns of the padded vocabulary, for some rows."""

    states: Tensor
    """Hidden states [rows, hidden], equal on all ranks of the tensor-parallel group. Without `weight`, logits [rows,
    columns]."""
    weight: Tensor | None = None
    """Weights of the vocabulary head, [columns, hidden], or None."""
    wide: bool = False
    """Whether logits are computed in fp32 from states and weights in half precision."""
    softcap: float | None = None
    """c in c * tanh(x / c), the logits for products x. None: the products are the logits."""
    weight_grad: Tensor | None = None
    """fp32 sum [columns, hidden], to which backward adds the gradient of `weight`. None: it returns the gradient."""
    stands_in: bool = False
    """With `weight_grad`: whether backward returns a tensor without values for hooks that expect a gradient."""

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, place: tuple[slice, slice]) -> Tensor:
        """Returns the logits of some rows and columns, [rows, columns]. Without `weight` they can be a view."""
        rows, columns = place
        found = self.states[rows, columns] if self.weight is None else self.products(rows, columns)
        return found if self.softcap is None else soft_capped(found, self.softcap)

    def scaled(self, place: tuple[slice, slice], scale: float) -> Tensor:
        """Returns logits of some rows and columns times `scale`, fp32 in new memory."""
        if self.weight is not None and self.softcap is None and self.weight.dtype == torch.float32:
            rows, columns = place
            unread = self.weight.new_empty(())
            return torch.addmm(unread, self.states[rows], self.weight[columns].T, beta=0, alpha=scale)
        found = self[place].to(torch.float32, copy=self.weight is None and self.softcap is None)
        return found if scale == 1 else found.mul_(scale)

    def products(self, rows: slice, columns: slice) -> Tensor:
        """Returns the products of hidden states and weights. `weight` must be given."""
        assert self.weight is not None
        return (wide_product if self.wide else torch.nn.functional.linear)(self.states[rows], self.weight[columns])

    @property
    def num_columns(self) -> int:
        return self.states.size(1) if self.weight is None else len(self.weight)

    def tiles(self, num_valid: int) -> tuple[list[slice], list[slice]]:
        """Returns slices of the rows, and of the first `num_valid` columns. A tile has a slice of each."""
        kind = _kind(self.states)
        elements, rows = TILE_ELEMENTS[kind], max(min(len(self), TILE_ROWS[kind]), 1)
        rows_of_all_columns = max(elements // max(num_valid, 1), 1)
        if rows_of_all_columns >= min(rows, TILE_ROWS[kind] // 4):
            return _slices(len(self), rows_of_all_columns), _slices(num_valid, num_valid)
        return _slices(len(self), rows), _slices(num_valid, max(elements // rows, 1))

    def valid_columns(self, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """Returns the token id of the first column, and the number of columns without padding."""
        first = group.rank() * self.num_columns
        return first, min(max(vocab_size - first, 0), self.num_columns)


def _kind(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def _slices(length: int, at_once: int) -> list[slice]:
    return [slice(first, min(first + at_once, length)) for first in range(0, length, max(at_once, 1))]


@dataclass(frozen=True)
class LabelledRows:
    """The row of each label, where rows have different numbers of labels. Labels are sorted by their rows."""

    rows: Tensor
    """[labels]."""
    starts: Tensor
    """First label of each row, and the number of labels, on the host, [rows + 1]."""


@dataclass(frozen=True)
class _Labels:
    """The labels of all rows, sorted by rows."""

    columns: Tensor
    """The column of each label in this rank's shard, [labels]. Labels of other ranks are out of range."""
    rows: Tensor
    """The row of each label, [labels]."""
    starts: Tensor
    """First label of each row, and the number of labels, on the host, [rows + 1]."""
    of_each_row: int | None
    """Number of labels of each row, if all have equally many."""

    @staticmethod
    def of(columns: Tensor, labelled: LabelledRows | None, num_rows: int) -> "_Labels":
        """Takes columns [rows] or [rows, n], or those of `labelled`, [labels] or [labels, n]."""
        count = columns.size(1) if columns.dim() == 2 else 1
        if labelled is None:
            rows, starts = torch.arange(num_rows, device=columns.device), torch.arange(num_rows + 1)
        else:
            rows, starts = labelled.rows, labelled.starts
        rows = rows[:, None].expand(-1, count).flatten()
        return _Labels(columns.flatten(), rows, starts * count, count if labelled is None else None)

    def sums(self, of_labels: Tensor, num_rows: int) -> Tensor:
        """Returns the sum over the labels of each row, [rows]."""
        if self.of_each_row is not None:
            return of_labels.view(num_rows, self.of_each_row).sum(1)
        return of_labels.new_zeros(num_rows).index_put_((self.rows,), of_labels, accumulate=True)

    def by_tile(self, rows: list[slice], columns: list[slice]) -> "Callable[[slice, slice], _LabelsOfTile]":
        """Returns a function that finds the labels of a tile."""
        if len(columns) == 1:  # labels are sorted by tiles, but for those of other ranks
            return self._of_all_columns
        width, num_blocks = columns[0].stop - columns[0].start, len(columns)
        of_rows = self.rows // (rows[0].stop - rows[0].start)
        is_here = (self.columns >= 0) & (self.columns < columns[-1].stop)
        tiles = torch.where(is_here, of_rows * num_blocks + self.columns // width, len(rows) * num_blocks)
        order = tiles.argsort(stable=True)
        parts = order.split(tiles.bincount(minlength=len(rows) * num_blocks + 1).tolist())
        height = rows[0].stop - rows[0].start

        def found(of: slice, columns: slice) -> _LabelsOfTile:
            chosen = parts[of.start // height * num_blocks + columns.start // width]
            places = (self.rows[chosen] - of.start) * (columns.stop - columns.start)
            return _LabelsOfTile(chosen, places + self.columns[chosen] - columns.start, None)

        return found

    def _of_all_columns(self, rows: slice, columns: slice) -> "_LabelsOfTile":
        chosen = slice(int(self.starts[rows.start]), int(self.starts[rows.stop]))
        own, width = self.columns[chosen], columns.stop
        places = (self.rows[chosen] - rows.start) * width + own.clamp(0, width - 1)
        return _LabelsOfTile(chosen, places, (own >= 0) & (own < width))

    def of_kernels(self, device: torch.device) -> tuple[Tensor, Tensor | None, int]:
        """Returns the labels as arguments of kernels."""
        if self.of_each_row is not None:
            return self.columns, None, self.of_each_row
        return self.columns, self.starts.to(device), 0


@dataclass(frozen=True)
class _LabelsOfTile:
    chosen: slice | Tensor
    """The labels with rows of the tile, and at least those with its columns, [labels]."""
    places: Tensor
    """The element of the flat tile for each of them."""
    is_here: Tensor | None
    """Whether the tile has the label's column. None: all."""

    def masked(self, of_labels: Tensor) -> Tensor:
        return of_labels if self.is_here is None else of_labels * self.is_here


def vocab_parallel_logprobs(
    logits: Logits,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
    labelled: LabelledRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of `labels` under softmax(logits / temperature), and the entropies [rows], both fp32.

    Columns of `logits` past `vocab_size` are padding and are ignored. `labels` are token ids, one per row [rows] or
    several [rows, n]. With `labelled` they are [labels] or [labels, n], for the rows that it names. Log-probs have the
    shape of `labels`. The arithmetic is fp32 for logits of any dtype.

    Both results are equal on every rank of `group`. Gradients flow to the inputs of the logits, for the local columns
    alone. They assume equal upstream gradients on all ranks.

    Collective over: the tensor-parallel group (one all-gather forward, none backward).
    """
    if not temperature > 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    first, num_valid = logits.valid_columns(vocab_size, group)
    flat = _Labels.of(labels - first, labelled, len(logits))
    how = logits.wide, logits.softcap, logits.weight_grad, logits.stands_in
    logprobs, entropy = _VocabParallelLogprobs.apply(
        logits.states, logits.weight, how, num_valid, 1.0 / temperature, torch.is_grad_enabled(), flat, group
    )
    return logprobs.view(labels.shape), entropy


@torch.no_grad()
def vocab_parallel_top(
    logits: Logits, count: int, *, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Returns ids (int64) and log-probs (fp32) of the `count` likeliest tokens per row, [rows, count], in descending
    order.

    `count` is at most `vocab_size`. Collective over: the tensor-parallel group (three all-gathers).
    """
    first, num_valid = logits.valid_columns(vocab_size, group)
    device = logits.states.device
    values = torch.full((len(logits), count), ABSENT, dtype=torch.float32, device=device)
    ids = torch.zeros(len(logits), count, dtype=torch.int64, device=device)
    own = torch.zeros(2, len(logits), dtype=torch.float32, device=device)
    own[0] = ABSENT
    for rows, scaled in _whole_rows(logits, num_valid, 1.0 / temperature):
        found = scaled.topk(min(count, num_valid), dim=1)
        values[rows, : found.values.size(1)], ids[rows, : found.values.size(1)] = found.values, found.indices + first
        own[0, rows] = found.values[:, 0]
        own[1, rows] = scaled.sub_(found.values[:, :1]).exp_().sum(1)
    maxima, exp_sums = _gather(own, group).unbind(1)
    log_normalizer = maxima.amax(0) + ((maxima - maxima.amax(0)).exp() * exp_sums).sum(0).log()
    of_all, their_ids = (_gather(local, group).transpose(0, 1).flatten(1) for local in (values, ids))
    best = of_all.topk(count, dim=1)
    return their_ids.gather(1, best.indices), best.values - log_normalizer[:, None]


@torch.no_grad()
def vocab_parallel_squares(logits: Logits, *, vocab_size: int, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of squared probabilities over the vocabulary, fp32 [rows], without gradients.

    It is the probability of two samples being the same token under softmax(logits / temperature). Columns of `logits`
    past `vocab_size` are padding and are ignored. The result is equal on every rank of `group`. Collective over: the
    tensor-parallel group (one all-gather).
    """
    _, num_valid = logits.valid_columns(vocab_size, group)
    own = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.states.device)
    own[0] = ABSENT
    for rows, scaled in _whole_rows(logits, num_valid, 1.0 / temperature):
        own[0, rows] = scaled.amax(1)
        exponentials = scaled.sub_(own[0, rows, None]).exp_()
        own[1, rows], own[2, rows] = exponentials.sum(1), exponentials.square_().sum(1)
    maxima, exp_sums, square_sums = _gather(own, group).unbind(1)
    weight = (maxima - maxima.amax(0)).exp()
    squares: Tensor = (weight.square() * square_sums).sum(0) / (weight * exp_sums).sum(0).square()
    return squares


def _whole_rows(logits: Logits, num_valid: int, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows and their scaled logits of all columns, some rows at a time."""
    if num_valid:
        for rows in _slices(len(logits), max(1, CHUNK_ELEMENTS // num_valid)):
            yield rows, logits.scaled((rows, slice(0, num_valid)), scale)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the inputs of the logits without a copy, the labels, two numbers per row, and as many logits as may be
    kept. Backward recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        how: tuple[Any, ...],
        num_valid: int,
        scale: float,
        may_keep: bool,
        labels: _Labels,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        """Takes in `how` the other fields of the logits."""
        tiles = _tiles_of(Logits(states, weight, *how), labels, num_valid, scale)
        if may_keep and weight is not None and any(ctx.needs_input_grad):
            tiles.num_kept = KEPT_ELEMENTS[_kind(states)]
        found = _statistics(tiles, group)
        log_normalizer = found.maximum + found.exp_sum.log()
        entropy = log_normalizer - found.maximum - found.weighted_sum / found.exp_sum
        ctx.save_for_backward(states, weight, labels.columns, labels.rows, log_normalizer, entropy)
        ctx.how, ctx.of_labels, ctx.kept = (how, num_valid, scale), (labels.starts, labels.of_each_row), tiles.kept
        ctx.set_materialize_grads(False)
        return found.targets - log_normalizer[labels.rows], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        states, weight, columns, rows, log_normalizer, entropy = ctx.saved_tensors
        how, num_valid, scale = ctx.how
        labels = _Labels(columns, rows, *ctx.of_labels)
        tiles = _tiles_of(Logits(states, weight, *how), labels, num_valid, scale)
        tiles.kept, ctx.kept = ctx.kept, {}  # they are overwritten, so a second backward computes them again
        of_labels = (torch.zeros_like(columns, dtype=torch.float32) if of_logprobs is None else of_logprobs) * scale
        # d logprob / d logit = [label] - p;  d entropy / d logit = -p (log p + entropy)
        factor = labels.sums(of_labels, len(states)).neg_()
        if of_entropy is not None:
            of_entropy = of_entropy * -scale
            factor.addcmul_(of_entropy, entropy)
        given = _Given(log_normalizer, factor, of_entropy, of_labels)
        if weight is None:
            return _gradient_of_logits(tiles, given), *[None] * 7
        return *_gradients_of_inputs(tiles, given, ctx.needs_input_grad), *[None] * 6


@dataclass(frozen=True)
class _Given:
    """The terms of the gradients of logits. With log-probs l of all columns they are e^l (factor + of_entropy l), plus
    of_labels at each label."""

    log_normalizer: Tensor
    factor: Tensor
    of_entropy: Tensor | None
    of_labels: Tensor


@dataclass(frozen=True)
class _Statistics:
    """Statistics over all columns z: max z, sum e^(z - max), sum (z - max) e^(z - max) [rows], and z at each label."""

    of_rows: Tensor
    """The first three, [3, rows]."""
    targets: Tensor

    @property
    def maximum(self) -> Tensor:
        return self.of_rows[0]

    @property
    def exp_sum(self) -> Tensor:
        return self.of_rows[1]

    @property
    def weighted_sum(self) -> Tensor:
        return self.of_rows[2]

    def add(self, rows: slice, further: Sequence[Tensor], *, is_first: bool) -> None:
        """Adds the statistics of some rows over further columns, or over the first ones."""
        own = self.of_rows[:, rows]
        if not is_first:
            maxima, exp_sums, weighted_sums = (torch.stack(both) for both in zip(own, further, strict=True))
            further = _over_all_columns(maxima, exp_sums, weighted_sums)
        for whole, values in zip(own, further, strict=True):
            whole.copy_(values)


def _over_all_columns(maxima: Tensor, exp_sums: Tensor, weighted_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the statistics over all columns from those over parts of them, [parts, rows] each."""
    maximum = maxima.amax(0)
    shift = maxima - maximum
    share = shift.exp()
    return maximum, (share * exp_sums).sum(0), (share * (weighted_sums + shift * exp_sums)).sum(0)


def _statistics(tiles: "_Tiles", group: dist.ProcessGroup) -> _Statistics:
    """Returns the statistics of the columns of all ranks. Collective over: the tensor-parallel group (one
    all-gather)."""
    device, labels = tiles.logits.states.device, tiles.labels
    own = _Statistics(
        torch.zeros(3, len(tiles.logits), dtype=torch.float32, device=device),
        torch.zeros(labels.columns.shape, dtype=torch.float32, device=device),
    )
    own.maximum.fill_(ABSENT)
    for rows in tiles.rows:
        for columns in tiles.columns:
            tiles.read(rows, columns, own)
    if group.size() == 1:
        return own
    gathered = _gather(torch.cat([own.of_rows.flatten(), own.targets]), group)
    of_ranks = gathered[:, : own.of_rows.numel()].unflatten(1, own.of_rows.shape).unbind(1)
    return _Statistics(torch.stack(_over_all_columns(*of_ranks)), gathered[:, own.of_rows.numel() :].sum(0))


def _gather(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(gathered.unbind()), statistics, group=group)
    return gathered


def _gradient_of_logits(tiles: "_Tiles", given: _Given) -> Tensor:
    """Returns the gradient of logits without weights. It is zero at padding."""
    grad = torch.zeros_like(tiles.logits.states)
    for rows in tiles.rows:
        for columns in tiles.columns:
            grad[rows, columns] = tiles.gradient(rows, columns, given)
    return grad


def _gradients_of_inputs(
    tiles: "_Tiles", given: _Given, is_needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of hidden states and weights, where they are needed.

    Sums over tiles are fp32. Those of columns are complete after all rows, so no fp32 copy of the weights is made. A
    tensor that stands in is made after the tiles, so it does not add to their memory.
    """
    states, weight, total = tiles.logits.states, tiles.logits.weight, tiles.logits.weight_grad
    assert weight is not None
    of_states = torch.zeros_like(states, dtype=torch.float32) if is_needed[0] else None
    of_weight = torch.empty_like(weight) if is_needed[1] and total is None else None
    if of_weight is not None:
        of_weight[tiles.num_valid if tiles.rows else 0 :] = 0
    for columns in tiles.columns if tiles.rows else ():
        summed = _sum_of_columns(tiles, columns) if is_needed[1] else None
        for rows in tiles.rows:
            grad = tiles.gradient(rows, columns, given).to(weight.dtype)
            if of_states is not None:
                add_product(of_states[rows], grad, weight[columns])
            if summed is not None:
                add_product(summed, grad.T, states[rows])
            elif of_weight is not None:
                torch.mm(grad.T, states[rows], out=of_weight[columns])
            del grad
        if summed is not None and of_weight is not None:
            of_weight[columns] = summed
    if is_needed[1] and total is not None and tiles.logits.stands_in:
        of_weight = torch.empty_like(weight)
    return None if of_states is None else of_states.to(states.dtype), of_weight


def _sum_of_columns(tiles: "_Tiles", columns: slice) -> Tensor | None:
    """Returns the fp32 sum of the gradients of some weights over all rows. None: a product has all rows."""
    logits = tiles.logits
    if logits.weight_grad is not None:
        return logits.weight_grad[columns]
    assert logits.weight is not None
    return torch.zeros_like(logits.weight[columns], dtype=torch.float32) if len(tiles.rows) > 1 else None


# Tiles of logits: what is computed of each, and turned into its gradient.


class _Tiles:
    """The logits of a pass, by tiles, computed with torch's operations."""

    def __init__(self, logits: Logits, labels: _Labels, num_valid: int, scale: float) -> None:
        self.logits, self.labels, self.num_valid, self.scale = logits, labels, num_valid, scale
        self.rows, self.columns = logits.tiles(num_valid)
        self.kept = dict[tuple[int, int], tuple[Tensor, ...]]()
        """Parts of tiles that are kept for backward, by their first row and column."""
        self.num_kept = 0
        """Number of logits that may still be kept."""

    @functools.cached_property
    def _labels_of(self) -> "Callable[[slice, slice], _LabelsOfTile]":
        return self.labels.by_tile(self.rows, self.columns)

    def _keep(self, rows: slice, columns: slice, *kept: Tensor) -> None:
        """Keeps what was computed of a tile for backward, if the first tensor, of the tile's size, may be kept."""
        if kept[0].numel() <= self.num_kept:
            self.num_kept -= kept[0].numel()
            self.kept[rows.start, columns.start] = kept

    def read(self, rows: slice, columns: slice, statistics: _Statistics) -> None:
        """Adds a tile to the statistics."""
        scaled, labels = self.logits.scaled((rows, columns), self.scale), self._labels_of(rows, columns)
        statistics.targets[labels.chosen] = labels.masked(scaled.flatten()[labels.places])
        maximum = scaled.amax(1)
        shifted = scaled.sub_(maximum[:, None])
        self._keep(rows, columns, shifted, maximum)
        exponentials = shifted.exp()
        exp_sum = exponentials.sum(1)
        weighted_sum = exponentials.mul_(shifted).sum(1)
        statistics.add(rows, (maximum, exp_sum, weighted_sum), is_first=columns.start == 0)

    def gradient(self, rows: slice, columns: slice, given: _Given) -> Tensor:
        """Returns the gradients of a tile's logits, [rows, columns], fp32 or in the type of the weights."""
        kept, softcap = self.kept.pop((rows.start, columns.start), None), self.logits.softcap
        shift = given.log_normalizer[rows]
        if kept is None:
            logprobs = self.logits.scaled((rows, columns), self.scale).sub_(shift[:, None])
        else:
            logprobs = kept[0].sub_((shift - kept[1])[:, None])
        slope = None
        if softcap is not None:
            slope = (logprobs + shift[:, None]).div_(softcap * self.scale).square_().neg_().add_(1)
        labels = self._labels_of(rows, columns)
        if given.of_entropy is None:
            grad = logprobs.exp_().mul_(given.factor[rows, None])
        else:
            factor = torch.addcmul(given.factor[rows, None], logprobs, given.of_entropy[rows, None])
            grad = logprobs.exp_().mul_(factor)
        # Unlike scatter_add_, it adds several labels of a row in a fixed order.
        grad.view(-1).index_put_((labels.places,), labels.masked(given.of_labels[labels.chosen]), accumulate=True)
        return grad if slope is None else grad.mul_(slope)


class _KernelTiles(_Tiles):
    """Tiles that Triton kernels read once in each pass. Backward replaces logits by their gradients in place."""

    def __init__(self, kernels: Any, logits: Logits, labels: _Labels, num_valid: int, scale: float) -> None:
        super().__init__(logits, labels, num_valid, scale)
        self._kernels, self._arguments = kernels, labels.of_kernels(logits.states.device)

    def read(self, rows: slice, columns: slice, statistics: _Statistics) -> None:
        products = self.logits.products(rows, columns)
        self._keep(rows, columns, products)
        first, cap = (rows.start, columns.start), self.logits.softcap
        self._kernels.read(products, first, statistics.of_rows, statistics.targets, self._arguments, self.scale, cap)

    def gradient(self, rows: slice, columns: slice, given: _Given) -> Tensor:
        kept = self.kept.pop((rows.start, columns.start), None)
        products = self.logits.products(rows, columns) if kept is None else kept[0]
        assert self.logits.weight is not None
        found: Tensor = self._kernels.differentiate(
            products,
            (rows.start, columns.start),
            (given.log_normalizer, given.factor, given.of_entropy),
            given.of_labels,
            self._arguments,
            self.scale,
            self.logits.softcap,
            self.logits.weight.dtype,
        )
        return found


def _tiles_of(logits: Logits, labels: _Labels, num_valid: int, scale: float) -> _Tiles:
    kernels = None if logits.weight is None else _kernels(logits.states.device)
    if kernels is None:
        return _Tiles(logits, labels, num_valid, scale)
    return _KernelTiles(kernels, logits, labels, num_valid, scale)


@functools.cache
def _kernels(device: torch.device) -> Any:
    """Returns the module of kernels if they work on `device`, or None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        from rltrain.training import logit_kernels

        logit_kernels.check(device)
    except Exception as refusal:  # any failure of a version, GPU, compiler or driver
        reason = f"{type(refusal).__name__}: {refusal}".split("\n")[0]
        logging.getLogger(__name__).warning("no Triton kernels for log-probs, so they take longer: %s", reason)
        return None
    return logit_kernels
