"""Log-probs and entropies from tensor-parallel logits, and the interface of a model for packed samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.kl import asked_tokens
from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.models.architecture import Architecture, Head
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
# The input is logits, or hidden states and the vocabulary's weights. In the second case logits are computed for some
# rows at a time, in forward and again in backward. They are never held for all rows.

CHUNK_ELEMENTS = 1 << 26  # most logits in fp32 working memory per pass
ABSENT = -1e30  # maximum of a shard of padding columns alone; finite, so that 0 * (ABSENT - maximum) is 0


@dataclass(frozen=True)
class Logits:
    """This rank's columns of the padded vocabulary, for some rows."""

    states: Tensor
    """Logits [rows, columns]. With `weight`, hidden states [rows, hidden], equal on all ranks of the tensor-parallel
    group."""
    weight: Tensor | None = None
    """Weights of the vocabulary head, [columns, hidden], or None."""
    rows_at_once: int | None = None
    """Number of rows computed at a time from hidden states. None: all."""
    wide: bool = False
    """Whether logits are computed in fp32 from states and weights in half precision."""

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice) -> Tensor:
        """Returns the logits of `rows`, [rows, columns]."""
        states = self.states[rows]
        if self.weight is None:
            return states
        return (wide_product if self.wide else torch.nn.functional.linear)(states, self.weight)

    @property
    def num_columns(self) -> int:
        return self.states.size(1) if self.weight is None else len(self.weight)

    def chunks(self) -> list[slice]:
        """Returns the slices of rows to process together."""
        rows = max(1, CHUNK_ELEMENTS // self.num_columns)
        if self.weight is not None:
            rows = min(rows, self.rows_at_once or rows)
        return [slice(first, first + rows) for first in range(0, len(self), rows)]

    def valid_columns(self, vocab_size: int, group: dist.ProcessGroup) -> tuple[int, int]:
        """Returns the token id of the first column, and the number of columns without padding."""
        first = group.rank() * self.num_columns
        return first, min(max(vocab_size - first, 0), self.num_columns)


@dataclass(frozen=True)
class LabelledRows:
    """The row of each label, where rows have different numbers of labels. Labels are sorted by their rows."""

    rows: Tensor
    """[labels]."""
    starts: Tensor
    """First label of each row, and the number of labels, on the host, [rows + 1]."""

    def of(self, rows: slice) -> tuple[slice, Tensor]:
        """Returns the labels of some rows, and the place of each label's row among these rows."""
        first, last = self.starts[rows.start], self.starts[min(rows.stop, len(self.starts) - 1)]
        labels = slice(int(first), int(last))
        return labels, self.rows[labels] - rows.start


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
    local = labels - first if labels.dim() == 2 else (labels - first)[:, None]
    how = (logits.rows_at_once, logits.wide, labelled)
    logprobs, entropy = _VocabParallelLogprobs.apply(
        logits.states, logits.weight, how, local, num_valid, 1.0 / temperature, group
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
    no_labels = torch.empty(len(logits), 0, dtype=torch.int64, device=device)
    statistics = _statistics(logits, no_labels, None, num_valid, 1.0 / temperature, group)
    maximum, exp_sum = statistics.maximum, statistics.exp_sum
    values = torch.full((len(logits), count), ABSENT, dtype=torch.float32, device=device)
    ids = torch.zeros(len(logits), count, dtype=torch.int64, device=device)
    for rows in logits.chunks():
        found = (logits[rows][:, :num_valid].float() / temperature).topk(min(count, num_valid), dim=1)
        values[rows, : found.values.size(1)], ids[rows, : found.values.size(1)] = found.values, found.indices + first
    of_all, their_ids = (_gather(local, group).transpose(0, 1).flatten(1) for local in (values, ids))
    best = of_all.topk(count, dim=1)
    return their_ids.gather(1, best.indices), best.values - (maximum + exp_sum.log())[:, None]


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
    for rows in logits.chunks() if num_valid else ():
        scaled = logits[rows][:, :num_valid].float() / temperature
        own[0, rows] = scaled.amax(1)
        exponentials = (scaled - own[0, rows, None]).exp()
        own[1, rows], own[2, rows] = exponentials.sum(1), exponentials.square().sum(1)
    maxima, exp_sums, square_sums = _gather(own, group).unbind(1)
    weight = (maxima - maxima.amax(0)).exp()
    squares: Tensor = (weight.square() * square_sums).sum(0) / (weight * exp_sums).sum(0).square()
    return squares


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the inputs of the logits without a copy, the labels and two numbers per row. Backward recomputes the
    rest."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        how: tuple[int | None, bool, LabelledRows | None],
        labels: Tensor,
        num_valid: int,
        scale: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        rows_at_once, wide, labelled = how
        logits = Logits(states, weight, rows_at_once, wide)
        found = _statistics(logits, labels, labelled, num_valid, scale, group)
        log_normalizer = found.maximum + found.exp_sum.log()
        entropy = log_normalizer - found.maximum - found.weighted_sum / found.exp_sum
        ctx.save_for_backward(states, weight, labels, log_normalizer, entropy)
        ctx.how, ctx.num_valid, ctx.scale = how, num_valid, scale
        of_labels = log_normalizer if labelled is None else log_normalizer[labelled.rows]
        return found.targets - of_labels[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        states, weight, labels, log_normalizer, entropy = ctx.saved_tensors
        num_valid, scale = ctx.num_valid, ctx.scale
        rows_at_once, wide, labelled = ctx.how
        logits = Logits(states, weight, rows_at_once, wide)
        is_overwritten = num_valid and (weight is not None or num_valid == logits.num_columns)
        grad = torch.empty_like(states) if is_overwritten else torch.zeros_like(states)
        weight_grad = torch.zeros(() if weight is None else weight.shape, dtype=torch.float32, device=states.device)
        for rows in logits.chunks() if num_valid else ():
            logprobs = logits[rows][:, :num_valid].to(torch.float32, copy=True)
            logprobs.mul_(scale).sub_(log_normalizer[rows, None])
            own, places = (rows, None) if labelled is None else labelled.of(rows)
            given = grad_logprobs[own]
            of_labels = given.sum(1, keepdim=True)
            if places is not None:
                of_labels = torch.zeros_like(log_normalizer[rows, None]).index_put(
                    (places,), of_labels, accumulate=True
                )
            # d entropy / d logit = -p (log p + entropy);  d logprob / d logit = [label] - p
            factor = torch.addcmul(of_labels + (grad_entropy * entropy)[rows, None], logprobs, grad_entropy[rows, None])
            values = logprobs.exp_().mul_(factor).mul_(-scale)
            index, local = _local_labels(labels[own], num_valid)
            if places is None:
                values.scatter_add_(1, index, given * local * scale)
            else:  # unlike scatter_add_, it adds several labels of a row in a fixed order
                values.index_put_((places[:, None], index), given * local * scale, accumulate=True)
            of_logits = values.to(grad.dtype)
            if weight is None:
                grad[rows, :num_valid] = of_logits
            else:
                grad[rows] = of_logits @ weight[:num_valid]
                weight_grad[:num_valid] += of_logits.T @ states[rows]
        return grad, None if weight is None else weight_grad.to(weight.dtype), *[None] * 5


@dataclass(frozen=True)
class _Statistics:
    """Statistics over all columns z: max z, sum e^(z - max), sum (z - max) e^(z - max) [rows], and z at each label."""

    maximum: Tensor
    exp_sum: Tensor
    weighted_sum: Tensor
    targets: Tensor


def _statistics(
    logits: Logits,
    labels: Tensor,
    labelled: LabelledRows | None,
    num_valid: int,
    scale: float,
    group: dist.ProcessGroup,
) -> _Statistics:
    """Returns the statistics of the columns of all ranks. `labels` [labels, n] of other ranks are out of range.

    Collective over: the tensor-parallel group (one all-gather).
    """
    device = logits.states.device
    of_rows = torch.zeros(3, len(logits), dtype=torch.float32, device=device)
    targets = torch.zeros(labels.shape, dtype=torch.float32, device=device)
    if num_valid == 0:
        of_rows[0] = ABSENT
    for rows in logits.chunks() if num_valid else ():
        scaled = logits[rows][:, :num_valid].to(torch.float32, copy=True).mul_(scale)
        own, places = (rows, None) if labelled is None else labelled.of(rows)
        index, local = _local_labels(labels[own], num_valid)
        found = scaled.gather(1, index) if places is None else scaled[places[:, None], index]
        targets[own] = found * local
        maximum = scaled.amax(1)
        scaled.sub_(maximum[:, None])
        exponentials = scaled.exp()
        of_rows[0, rows] = maximum
        of_rows[1, rows] = exponentials.sum(1)
        of_rows[2, rows] = scaled.mul_(exponentials).sum(1)
    if group.size() == 1:
        return _Statistics(of_rows[0], of_rows[1], of_rows[2], targets)
    gathered = _gather(torch.cat([of_rows.flatten(), targets.flatten()]), group)
    maxima, exp_sums, weighted_sums = gathered[:, : of_rows.numel()].unflatten(1, of_rows.shape).unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    share = shift.exp()
    return _Statistics(
        maximum,
        (share * exp_sums).sum(0),
        (share * (weighted_sums + shift * exp_sums)).sum(0),
        gathered[:, of_rows.numel() :].sum(0).view(targets.shape),
    )


def _gather(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(gathered.unbind()), statistics, group=group)
    return gathered


def _local_labels(labels: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each label [rows, n], clamped into the shard, and whether the label is in the shard."""
    return labels.clamp(0, num_valid - 1), (labels >= 0) & (labels < num_valid)


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
