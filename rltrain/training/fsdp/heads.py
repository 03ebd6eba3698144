"""Context parallelism by heads: every rank attends with all tokens in some heads (DeepSpeed-Ulysses,
arXiv:2309.14509)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.training.context_slices import ContextShare, inverse, places_of, places_of_all, ranges
from rltrain.training.packed_attention import PackedRows, packed_rows


@dataclass(frozen=True, eq=False)
class SpreadHeads:
    """Packed sequences of which each rank of `group` has slices, and in attention all tokens of its heads."""

    positions: Tensor
    """[rows of this rank] position of each in its sequence."""
    whole: PackedRows
    """All sequences, laid end to end."""
    row_of_place: Tensor
    """[tokens] the row of all ranks, one's after the other, of each token of `whole`."""
    place_of_row: Tensor
    """[tokens] the inverse."""
    group: dist.ProcessGroup

    def scattered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values [rows of this rank, heads, ...] -> [tokens, heads of this rank, ...] each. With
        fewer key-value heads than ranks several ranks have the same one. Collective over: the group."""
        size = self.group.size()
        found = []
        for x in tensors:
            copied = x.repeat_interleave(max(1, size // x.size(1)), dim=1)
            to_ranks = copied.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)
            received = _AllToAll.apply(to_ranks, self.group)
            found.append(received.index_select(0, self.row_of_place))
        return found

    def gathered(self, attended: Tensor) -> Tensor:
        """[tokens, heads of this rank, ...] -> [rows of this rank, heads, ...]. Collective over: the group."""
        received: Tensor = _AllToAll.apply(attended.index_select(0, self.place_of_row), self.group)
        return received.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """[heads] -> [heads of this rank]"""
        return of_heads.unflatten(0, (self.group.size(), -1))[self.group.rank()]


def spread_heads(
    lengths: Sequence[int], share: ContextShare, device: torch.device, group: dist.ProcessGroup
) -> SpreadHeads:
    """For packed sequences of these lengths, of each of which this rank has two slices."""
    places, order = places_of(lengths, share), places_of_all(lengths, share.size)
    positions = ranges(torch.zeros(len(lengths), dtype=torch.int64), torch.tensor(lengths))
    return SpreadHeads(
        positions=positions[places].to(device),
        whole=packed_rows(lengths, device, PackedRows),
        row_of_place=inverse(order).to(device),
        place_of_row=order.to(device),
        group=group,
    )


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dimension, one for each rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received
