"""Log-probs and entropies from tensor-parallel logits, and the interface of a model for packed samples."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.kl import asked_tokens
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models.architecture import Architecture, Head
from rltrain.models.attention import soft_capped
from rltrain.models.products import wide_product
from rltrain.reshard.layout import Layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import model_group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.adapters import AdapterMode
from rltrain.training.packing import (
    ContextShare,
    MicroBatch,
    Packing,
    make_micro_batches,
    of_all_tokens,
    of_drawn_tokens,
)

# Log-probs and entropy from logits with columns split over a tensor-parallel group.
#
# The input is hidden states and the vocabulary's weights. Logits are computed tile by tile: for some rows and some
# columns, in forward and again in backward. They are never held for all rows and columns, unless they are few.

CHUNK_ELEMENTS = 1 << 26
"""Most logits kept from forward to backward, and in working memory where rows need all of their columns."""
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

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, place: tuple[slice, slice]) -> Tensor:
        """Returns the logits of some rows and columns, [rows, columns]. Without `weight` they can be a view."""
        rows, columns = place
        found = self.states[rows, columns] if self.weight is None else self._products(rows, columns)
        return found if self.softcap is None else soft_capped(found, self.softcap)

    def scaled(self, place: tuple[slice, slice], scale: float) -> Tensor:
        """Returns logits of some rows and columns times `scale`, fp32 in new memory."""
        if self.weight is not None and self.softcap is None and self.weight.dtype == torch.float32:
            rows, columns = place
            unread = self.weight.new_empty(())
            return torch.addmm(unread, self.states[rows], self.weight[columns].T, beta=0, alpha=scale)
        found = self[place].to(torch.float32, copy=self.weight is None and self.softcap is None)
        return found if scale == 1 else found.mul_(scale)

    def _products(self, rows: slice, columns: slice) -> Tensor:
        assert self.weight is not None
        return (wide_product if self.wide else torch.nn.functional.linear)(self.states[rows], self.weight[columns])

    @property
    def num_columns(self) -> int:
        return self.states.size(1) if self.weight is None else len(self.weight)

    def tiles(self, num_valid: int) -> tuple[list[slice], list[slice]]:
        """Returns slices of the rows, and of the first `num_valid` columns. A tile has a slice of each."""
        kind = "cpu" if self.states.device.type == "cpu" else "cuda"
        elements, rows = TILE_ELEMENTS[kind], max(min(len(self), TILE_ROWS[kind]), 1)
        rows_of_all_columns = max(elements // max(num_valid, 1), 1)
        if rows_of_all_columns >= min(rows, TILE_ROWS[kind] // 4):
            return _slices(len(self), rows_of_all_columns), _slices(num_valid, num_valid)
        return _slices(len(self), rows), _slices(num_valid, max(elements // rows, 1))

    def valid_columns(self, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """Returns the token id of the first column, and the number of columns without padding."""
        first = group.rank() * self.num_columns
        return first, min(max(vocab_size - first, 0), self.num_columns)


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
    is_kept = torch.is_grad_enabled() and logits.weight is not None and len(logits) * num_valid <= CHUNK_ELEMENTS
    how = logits.wide, logits.softcap, num_valid, 1.0 / temperature, is_kept
    logprobs, entropy = _VocabParallelLogprobs.apply(logits.states, logits.weight, how, flat, group)
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
    """Saves the inputs of the logits without a copy, the labels and two numbers per row. Backward recomputes the rest,
    but for few logits."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        how: tuple[bool, float | None, int, float, bool],
        labels: _Labels,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        wide, softcap, num_valid, scale, is_kept = how
        ctx.kept = dict[tuple[int, int], Tensor]() if is_kept and any(ctx.needs_input_grad) else None
        found = _statistics(Logits(states, weight, wide, softcap), labels, num_valid, scale, group, ctx.kept)
        log_normalizer = found.maximum + found.exp_sum.log()
        entropy = log_normalizer - found.maximum - found.weighted_sum / found.exp_sum
        ctx.save_for_backward(states, weight, labels.columns, labels.rows, log_normalizer, entropy)
        ctx.how, ctx.of_labels = how, (labels.starts, labels.of_each_row)
        ctx.set_materialize_grads(False)
        return found.targets - log_normalizer[labels.rows], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = gradients
        states, weight, columns, rows, log_normalizer, entropy = ctx.saved_tensors
        wide, softcap, num_valid, scale, _ = ctx.how
        logits, labels = Logits(states, weight, wide, softcap), _Labels(columns, rows, *ctx.of_labels)
        of_labels = (torch.zeros_like(columns, dtype=torch.float32) if of_logprobs is None else of_logprobs) * scale
        # d logprob / d logit = [label] - p;  d entropy / d logit = -p (log p + entropy)
        factor = labels.sums(of_labels, len(logits)).neg_()
        if of_entropy is not None:
            of_entropy = of_entropy * -scale
            factor.addcmul_(of_entropy, entropy)
        given = _Given(log_normalizer, factor, of_entropy, of_labels)
        kept, ctx.kept = ctx.kept or {}, None
        if weight is None:
            return _gradient_of_logits(logits, labels, given, num_valid, scale), *[None] * 4
        found = _gradients_of_inputs(logits, labels, given, num_valid, scale, kept, ctx.needs_input_grad)
        return *found, *[None] * 3


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

    maximum: Tensor
    exp_sum: Tensor
    weighted_sum: Tensor
    targets: Tensor

    def add(self, rows: slice, maximum: Tensor, exp_sum: Tensor, weighted_sum: Tensor, *, is_first: bool) -> None:
        """Adds the statistics of some rows over further columns, or over the first ones."""
        if is_first:
            self.maximum[rows], self.exp_sum[rows], self.weighted_sum[rows] = maximum, exp_sum, weighted_sum
            return
        before, sums, weighted_sums = (whole[rows] for whole in (self.maximum, self.exp_sum, self.weighted_sum))
        highest = torch.maximum(before, maximum)
        shifts = before - highest, maximum - highest
        shares = shifts[0].exp(), shifts[1].exp()
        self.weighted_sum[rows] = shares[0] * (weighted_sums + shifts[0] * sums) + shares[1] * (
            weighted_sum + shifts[1] * exp_sum
        )
        self.exp_sum[rows] = shares[0] * sums + shares[1] * exp_sum
        self.maximum[rows] = highest


def _statistics(
    logits: Logits,
    labels: _Labels,
    num_valid: int,
    scale: float,
    group: dist.ProcessGroup,
    kept: dict[tuple[int, int], Tensor] | None,
) -> _Statistics:
    """Returns the statistics of the columns of all ranks. Tiles of scaled logits are left in `kept`.

    Collective over: the tensor-parallel group (one all-gather).
    """
    device = logits.states.device
    of_rows = torch.zeros(3, len(logits), dtype=torch.float32, device=device)
    of_rows[0] = ABSENT
    targets = torch.zeros(labels.columns.shape, dtype=torch.float32, device=device)
    own = _Statistics(of_rows[0], of_rows[1], of_rows[2], targets)
    row_slices, column_slices = logits.tiles(num_valid)
    labels_of = labels.by_tile(row_slices, column_slices) if num_valid else None
    for rows, columns in itertools.product(row_slices, column_slices):
        assert labels_of is not None
        scaled = logits.scaled((rows, columns), scale)
        of_tile = labels_of(rows, columns)
        own.targets[of_tile.chosen] = of_tile.masked(scaled.flatten()[of_tile.places])
        maximum = scaled.amax(1)
        if kept is not None:
            kept[rows.start, columns.start] = scaled
        shifted = scaled.sub_(maximum[:, None]) if kept is None else scaled - maximum[:, None]
        exponentials = shifted.exp()
        weighted_sum = shifted.mul_(exponentials).sum(1)
        own.add(rows, maximum, exponentials.sum(1), weighted_sum, is_first=columns.start == 0)
    return own if group.size() == 1 else _of_group(own, of_rows, group)


def _of_group(own: _Statistics, of_rows: Tensor, group: dist.ProcessGroup) -> _Statistics:
    gathered = _gather(torch.cat([of_rows.flatten(), own.targets]), group)
    maxima, exp_sums, weighted_sums = gathered[:, : of_rows.numel()].unflatten(1, of_rows.shape).unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    share = shift.exp()
    return _Statistics(
        maximum,
        (share * exp_sums).sum(0),
        (share * (weighted_sums + shift * exp_sums)).sum(0),
        gathered[:, of_rows.numel() :].sum(0),
    )


def _gather(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(gathered.unbind()), statistics, group=group)
    return gathered


def _gradient_of_logits(logits: Logits, labels: _Labels, given: _Given, num_valid: int, scale: float) -> Tensor:
    """Returns the gradient of logits without weights. It is zero at padding."""
    grad = torch.zeros_like(logits.states)
    row_slices, column_slices = logits.tiles(num_valid)
    labels_of = labels.by_tile(row_slices, column_slices) if num_valid else None
    for rows, columns in itertools.product(row_slices, column_slices):
        assert labels_of is not None
        scaled = logits.scaled((rows, columns), scale)
        grad[rows, columns] = _gradient_of_tile(scaled, rows, given, labels_of(rows, columns), logits.softcap, scale)
    return grad


def _gradients_of_inputs(
    logits: Logits,
    labels: _Labels,
    given: _Given,
    num_valid: int,
    scale: float,
    kept: dict[tuple[int, int], Tensor],
    is_needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of hidden states and weights, where they are needed. It consumes `kept`.

    Sums over tiles are fp32. Those of columns are complete after all rows, so no fp32 copy of the weights is made.
    """
    states, weight = logits.states, logits.weight
    assert weight is not None
    row_slices, column_slices = logits.tiles(num_valid)
    of_states = torch.zeros_like(states, dtype=torch.float32) if is_needed[0] else None
    of_weight = torch.empty_like(weight) if is_needed[1] else None
    if of_weight is not None:
        of_weight[num_valid if row_slices else 0 :] = 0
    labels_of = labels.by_tile(row_slices, column_slices) if num_valid else None
    for columns in column_slices if row_slices else ():
        assert labels_of is not None
        of_columns = None if of_weight is None else of_weight[columns]
        if of_columns is not None and len(row_slices) > 1:
            of_columns = torch.zeros_like(of_columns, dtype=torch.float32)
        for rows in row_slices:
            scaled = kept.pop((rows.start, columns.start), None)
            scaled = logits.scaled((rows, columns), scale) if scaled is None else scaled
            of_tile = labels_of(rows, columns)
            grad = _gradient_of_tile(scaled, rows, given, of_tile, logits.softcap, scale).to(weight.dtype)
            if of_states is not None:
                _add_product(of_states[rows], grad, weight[columns])
            if of_columns is not None and len(row_slices) > 1:
                _add_product(of_columns, grad.T, states[rows])
            elif of_columns is not None:
                torch.mm(grad.T, states[rows], out=of_columns)
        if of_weight is not None and of_columns is not None and len(row_slices) > 1:
            of_weight[columns] = of_columns
    return None if of_states is None else of_states.to(states.dtype), of_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to the fp32 `total`."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _gradient_of_tile(
    scaled: Tensor, rows: slice, given: _Given, labels: _LabelsOfTile, softcap: float | None, scale: float
) -> Tensor:
    """Turns scaled logits into their gradients, fp32, in the same memory."""
    slope = None if softcap is None else (scaled / (softcap * scale)).square_().neg_().add_(1)
    logprobs = scaled.sub_(given.log_normalizer[rows, None])
    if given.of_entropy is None:
        grad = logprobs.exp_().mul_(given.factor[rows, None])
    else:
        factor = torch.addcmul(given.factor[rows, None], logprobs, given.of_entropy[rows, None])
        grad = logprobs.exp_().mul_(factor)
    # Unlike scatter_add_, it adds several labels of a row in a fixed order.
    grad.view(-1).index_put_((labels.places,), labels.masked(given.of_labels[labels.chosen]), accumulate=True)
    return grad if slope is None else grad.mul_(slope)


# The outputs of a model per token, by its head. They are the arguments of its loss function.


def groups_of_rank(grid: Grid, groups: ProcessGroups) -> dict[str, dist.ProcessGroup | None]:
    """Returns this rank's process groups in `grid`, by the names of model_group_lists. None: the rank is in no such
    group.

    It only looks them up in `groups` and creates none.
    """
    rank, found = dist.get_rank(), dict[str, dist.ProcessGroup | None]()
    for name, rank_lists in model_group_lists(grid).items():
        mine = next((ranks for ranks in rank_lists if rank in ranks), None)
        found[name] = None if mine is None else groups[mine]
    return found


OnMicroBatch = Callable[[Sequence[int], Sequence[int], bool], None]
"""Takes the lengths of a micro-batch's sequences, the lengths of beginnings of them that are not computed again, and
whether gradients are computed."""


class PackedModel(ABC):
    """This rank's part of a model for packed samples. Each backend supplies the modules."""

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        groups: Any,
        layout: Layout,
        device: torch.device,
        settings: schema.Model,
    ) -> None:
        """Takes `groups` with `tp` for the columns of the logits, `cp` for shared sequences, and `dp`."""
        self.architecture, self.grid, self.pg_collection = architecture, grid, groups
        self.share = ContextShare(groups.cp.rank(), groups.cp.size())
        self.layout, self.device = layout, device
        self.trained_layout = layout
        """The layout of the weights without those of a frozen vision tower."""
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        """The dtype of the computation."""
        self.fake_quantization = settings.fake_quantization
        self.adapters: AdapterMode | None = None
        self.share_prefixes: Literal["auto"] | bool = False
        """Whether prefixes that samples share are computed once."""
        self.on_micro_batch: OnMicroBatch = lambda lengths, before, backward: None
        """Called at the start of every micro-batch."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """This rank's parameters by name, as in layout.on(rank), without adapters."""

    @property
    @abstractmethod
    def packing(self) -> Packing:
        """The packing requirements of the model."""

    @property
    def obstacle_to_sharing(self) -> str | None:
        """The reason why samples cannot share rows for their prefixes, or None if they can."""
        return None

    @abstractmethod
    def logits_of(self, outputs: Tensor) -> Logits:
        """Returns the model's outputs for some rows, [rows, ...], as logits."""

    def distribution(self, temperature: float) -> dict[str, Any]:
        """Returns the keyword arguments of the vocab_parallel functions."""
        vocab_size, group = self.architecture.vocab_size, self.pg_collection.tp
        return {"vocab_size": vocab_size, "temperature": temperature, "group": group}

    def micro_batches(self, experience: Experience, max_tokens: int, *, may_share: bool = True) -> list[MicroBatch]:
        """Splits `experience` into micro-batches of at most `max_tokens` on each rank of context parallelism.

        Without `may_share` samples have rows of their own. Collective over: the ranks of `packing.together`.
        """
        packing = self.packing if may_share else replace(self.packing, prefixes=False)
        return make_micro_batches(experience, max_tokens, packing)

    @property
    def learned_layout(self) -> Layout:
        """The layout of the trained parameters: the adapters if there are any, else the weights."""
        return self.adapters.layout if self.adapters else self.trained_layout

    @property
    def learned(self) -> Mapping[str, Tensor]:
        """This rank's trained parameters, as in learned_layout.on(rank)."""
        if self.adapters:
            return self.adapters.parameters
        weights = self.weights
        if self.trained_layout is self.layout:
            return weights
        return {name: weights[name] for name, _ in self.trained_layout.on(dist.get_rank()).parameters}


@dataclass(frozen=True)
class Objective:
    """The outputs of a model head per token.

    `token_outputs` takes (model, micro-batch, output of the last stage for its rows, temperature) and returns the
    differentiable arguments of the loss function, [tokens, ...]. An evaluation returns the first of them. It may be
    collective over the tensor- and context-parallel groups. `of_nothing` returns them for experience without samples.
    """

    token_outputs: Callable[[PackedModel, MicroBatch, Tensor, float], tuple[Tensor, ...]]
    of_nothing: Callable[[Experience], tuple[Tensor, ...]]


def token_logprobs(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Returns the log-prob of every token given its prefix, and the entropy of its distribution, fp32 [tokens] each.

    Both are 0 at a sample's first token. If the experience has candidate tokens, their log-probs follow, [tokens, n].
    Collective over: the tensor- and context-parallel groups.
    """
    labels, asked = batch.experience.tokens, asked_tokens(batch.experience)
    if asked is not None:
        labels = torch.cat([labels[:, None], asked], dim=1)
    logits, distribution = model.logits_of(outputs), model.distribution(temperature)
    if batch.slices is None or batch.slices.drawn is None:
        following = batch.rows_of(labels.roll(-1, dims=0))
        logprobs, entropy = vocab_parallel_logprobs(logits, following, **distribution)
        logprobs = at_drawn(model, batch, logprobs)
    else:
        drawn = batch.slices.drawn
        labelled = LabelledRows(drawn.rows, drawn.starts)
        logprobs, entropy = vocab_parallel_logprobs(logits, labels[drawn.tokens], labelled=labelled, **distribution)
        logprobs = of_drawn_tokens(batch, logprobs, model.pg_collection.cp)
    entropy = at_drawn(model, batch, entropy)
    return (logprobs, entropy) if asked is None else (logprobs[:, 0], entropy, logprobs[:, 1:])


def likeliest_tokens(
    model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float, count: int
) -> tuple[Tensor, Tensor]:
    """Returns the `count` likeliest tokens at each token's position, and their log-probs, [tokens, count] each.

    Both are 0 at a sample's first token. Collective over: the tensor- and context-parallel groups.
    """
    ids, logprobs = vocab_parallel_top(model.logits_of(outputs), count, **model.distribution(temperature))
    return at_drawn(model, batch, ids), at_drawn(model, batch, logprobs)


def squared_probabilities(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> Tensor:
    """Returns the sum of squared probabilities over the vocabulary at each token's position, [tokens].

    It is 0 at a sample's first token. Collective over: the tensor- and context-parallel groups.
    """
    squares = vocab_parallel_squares(model.logits_of(outputs), **model.distribution(temperature))
    return at_drawn(model, batch, squares)


def at_drawn(model: PackedModel, batch: MicroBatch, of_rows: Tensor) -> Tensor:
    """Moves model outputs from each token to the following token of the same sample, [tokens, ...].

    The output at a token depends on the sample's tokens up to it. The result is 0 at a sample's first token. Gradients
    flow. Collective over: the context-parallel group.
    """
    moved = of_all_tokens(batch, of_rows, model.pg_collection.cp).roll(1, dims=0)
    drawn = torch.ones(batch.num_tokens, dtype=moved.dtype, device=moved.device)
    drawn[batch.experience.offsets()[:-1]] = 0
    return moved * drawn.view(-1, *[1] * (moved.dim() - 1))


def _scores(model: PackedModel, batch: MicroBatch, outputs: Tensor, temperature: float) -> tuple[Tensor]:
    return (of_all_tokens(batch, outputs, model.pg_collection.cp),)


def _no_logprobs(experience: Experience) -> tuple[Tensor, ...]:
    asked = asked_tokens(experience)
    return torch.zeros(0), torch.zeros(0), *([] if asked is None else [torch.zeros(asked.shape)])


def _no_scores(experience: Experience) -> tuple[Tensor]:
    return (torch.zeros(0),)


POLICY = Objective(token_logprobs, _no_logprobs)
"""Loss functions get the log-prob of every token and the entropy of its distribution. Log-probs of candidate tokens
follow if the experience has some."""

SCORE = Objective(_scores, _no_scores)
"""Loss functions get the score of the sample at every token, for its prefix up to there. Temperature is ignored."""

OBJECTIVES: dict[Head, Objective] = {"vocabulary": POLICY, "value": SCORE}
