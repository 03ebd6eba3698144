"""AdamW (Loshchilov and Hutter 2019, algorithm 2) in fp32, with moments that are kept in fp32 or bf16."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.training.optimization.rounding import keep_rounded

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Whose moments in fp32 exist at a time, where they are kept in bf16: as many as a processor's cache has, six times as
fast as 1 << 22, or a device's kernels are worth launching for."""


@dataclass(frozen=True)
class AdamRule:
    """A step's numbers for some parameters."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """The first one is 1."""


@dataclass(frozen=True, eq=False)
class AdamTensors:
    """Of one parameter or a range of it: flat, of one size, on one device; the moments fp32 or bf16."""

    weights: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def cut(self, size: int) -> Iterator["AdamTensors"]:
        """In ranges of at most `size` elements."""
        parts = (tensor.split(size) for tensor in (self.weights, self.gradient, self.exp_avg, self.exp_avg_sq))
        yield from map(AdamTensors, *parts)


def adam_step(parameters: Sequence[AdamTensors], rule: AdamRule) -> None:
    """Move weights and moments by one step; gradients, fp32, are left as they are."""
    parameters = [one for one in parameters if one.weights.numel()]
    if not parameters:
        return
    in_fp32 = [one for one in parameters if one.exp_avg.dtype == torch.float32]
    _fused(in_fp32, rule)
    for one in parameters:
        if one.exp_avg.dtype == torch.float32:
            continue
        for chunk in one.cut(CHUNK_ELEMENTS[one.weights.device.type]):
            wide = AdamTensors(chunk.weights, chunk.gradient, chunk.exp_avg.float(), chunk.exp_avg_sq.float())
            _fused([wide], rule)
            keep_rounded(chunk.exp_avg, wide.exp_avg, chunk.weights, rule.step, salt=1)
            keep_rounded(chunk.exp_avg_sq, wide.exp_avg_sq, chunk.weights, rule.step, salt=2)


def _fused(parameters: Sequence[AdamTensors], rule: AdamRule) -> None:
    """By torch's kernel, the one that torch.optim.AdamW(fused=True) takes: the same numbers."""
    if not parameters:
        return
    step = torch.tensor(float(rule.step), device=parameters[0].weights.device)
    torch._fused_adamw_(
        [one.weights for one in parameters],
        [one.gradient for one in parameters],
        [one.exp_avg for one in parameters],
        [one.exp_avg_sq for one in parameters],
        [],
        [step] * len(parameters),
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )
