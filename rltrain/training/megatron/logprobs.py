"""Log-probs and entropy from logits whose columns are spread over a tensor-parallel group."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 26  # fp32 working memory per pass is bounded by this many logits
ABSENT = -1e30  # maximum of a shard that holds padding columns only; finite, so that 0 * (ABSENT - maximum) is 0


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels` and entropies of the distributions softmax(logits / temperature), both fp32 [rows].

    `logits` [rows, columns] are this rank's columns of the padded vocabulary; columns past `vocab_size` are padding
    and take no part. `labels` [rows] are token ids. Computed in fp32 whatever the logits' dtype. Both results are the
    same on every rank of `group`; gradients flow to the local logits and assume equal upstream gradients on its ranks.
    Collective over: the tensor-parallel group (one all-gather forward, none backward).
    """
    if not temperature > 0:
        raise ValueError(f"log-probs need a temperature above 0, got {temperature}")
    first = group.rank() * logits.size(-1)
    num_valid = min(max(vocab_size - first, 0), logits.size(-1))
    logprobs, entropy = _VocabParallelLogprobs.apply(logits, labels - first, num_valid, 1.0 / temperature, group)
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the logits themselves (no copy), the labels and two numbers per row; recomputes the softmax backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_valid: int, scale: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        statistics = _gather(_local_statistics(logits, labels, num_valid, scale), group)
        maximum, exp_sum, weighted_sum, target = _combine(statistics)
        log_normalizer = maximum + exp_sum.log()
        entropy = log_normalizer - maximum - weighted_sum / exp_sum
        ctx.save_for_backward(logits, labels, log_normalizer, entropy)
        ctx.num_valid, ctx.scale = num_valid, scale
        return target - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = gradients
        logits, labels, log_normalizer, entropy = ctx.saved_tensors
        num_valid, scale = ctx.num_valid, ctx.scale
        grad = torch.zeros_like(logits) if num_valid < logits.size(1) else torch.empty_like(logits)
        if num_valid == 0:
            return grad, None, None, None, None
        for rows in _chunks(logits):
            logprobs = (
                logits[rows, :num_valid].to(torch.float32, copy=True).mul_(scale).sub_(log_normalizer[rows, None])
            )
            # d entropy / d logit = -p (log p + entropy);  d logprob / d logit = [label] - p
            factor = torch.addcmul(
                grad_logprobs[rows, None] + (grad_entropy * entropy)[rows, None], logprobs, grad_entropy[rows, None]
            )
            values = logprobs.exp_().mul_(factor).mul_(-scale)
            index, local = _local_labels(labels[rows], num_valid)
            values.scatter_add_(1, index, (grad_logprobs[rows] * local * scale)[:, None])
            grad[rows, :num_valid] = values.to(grad.dtype)
        return grad, None, None, None, None


def _local_statistics(logits: Tensor, labels: Tensor, num_valid: int, scale: float) -> Tensor:
    """[4, rows] over the local columns z: max z, sum e^(z - max), sum (z - max) e^(z - max), z at the label or 0."""
    statistics = torch.zeros(4, logits.size(0), dtype=torch.float32, device=logits.device)
    if num_valid == 0:
        statistics[0] = ABSENT
        return statistics
    for rows in _chunks(logits):
        scaled = logits[rows, :num_valid].to(torch.float32, copy=True).mul_(scale)
        index, local = _local_labels(labels[rows], num_valid)
        statistics[3, rows] = scaled.gather(1, index)[:, 0] * local
        maximum = scaled.amax(1)
        scaled.sub_(maximum[:, None])
        exponentials = scaled.exp()
        statistics[0, rows] = maximum
        statistics[1, rows] = exponentials.sum(1)
        statistics[2, rows] = scaled.mul_(exponentials).sum(1)
    return statistics


def _combine(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four statistics over all columns from those of every shard, [shards, 4, rows]."""
    if statistics.size(0) == 1:
        maximum, exp_sum, weighted_sum, target = statistics[0]
        return maximum, exp_sum, weighted_sum, target
    maxima, exp_sums, weighted_sums, targets = statistics.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    weight = shift.exp()
    return (
        maximum,
        (weight * exp_sums).sum(0),
        (weight * (weighted_sums + shift * exp_sums)).sum(0),
        targets.sum(0),
    )


def _gather(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return statistics[None]
    gathered = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(gathered.unbind()), statistics, group=group)
    return gathered


def _local_labels(labels: Tensor, num_valid: int) -> tuple[Tensor, Tensor]:
    """Column of each label, clamped into the shard, as [rows, 1]; and whether it lies in the shard."""
    local = (labels >= 0) & (labels < num_valid)
    return labels.clamp(0, num_valid - 1)[:, None], local


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.size(1))
    return [slice(i * rows, (i + 1) * rows) for i in range(math.ceil(logits.size(0) / rows))]
