"""What ranks that share sequences made of their rows, for all tokens, on each of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.training.packing import MicroBatch


def of_all_tokens(batch: MicroBatch, of_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tokens, ...] of the samples of a micro-batch what every rank made of its own rows.

    All ranks make the same loss of them, so each takes the gradients of its rows: their sum over the ranks is that of
    the loss. Collective over: the context-parallel group.
    """
    if batch.slices is None:
        return of_rows
    of_all: Tensor = _Gathered.apply(of_rows, group)
    return of_all.index_select(0, batch.slices.row_of_token)


class _Gathered(torch.autograd.Function):
    """[rows of this rank, ...] -> [rows of all ranks, ...], one rank's after the other."""

    @staticmethod
    def forward(ctx: Any, of_rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_rows = group.rank(), len(of_rows)
        of_all = of_rows.new_empty(group.size() * len(of_rows), *of_rows.shape[1:])
        dist.all_gather_into_tensor(of_all, of_rows.contiguous(), group=group)
        return of_all

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = ctx.rank * ctx.num_rows
        return gradients[0][first : first + ctx.num_rows].contiguous(), None
