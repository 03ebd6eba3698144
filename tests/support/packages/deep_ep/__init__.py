"""A stand-in for DeepEP without a GPU: its buffer over any process group.

It takes the calls of megatron-core 0.16.1 and has the signatures of DeepEP's buffers/legacy.py. It refuses types and
numbers of ranks without DeepEP kernels.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils import EventHandle, EventOverlap

__all__ = ["Buffer", "EventHandle", "EventOverlap"]

NUM_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
TYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in NUM_RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Returns five values: tokens to each rank, none over RDMA, tokens to each expert, whether a token goes to a
        rank, and an event."""
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        visits = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        visits.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)
        of_experts = visits[:, :num_experts]
        to_ranks = of_experts.unflatten(1, (self.group.size(), -1)).any(-1)
        return to_ranks.sum(0).int(), None, of_experts.sum(0).int(), to_ranks, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Returns the tokens of all ranks for this one, with the numbers of its own experts (-1: others') and their
        weights."""
        _check(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._sent(x, handle), None, None, None, None, EventOverlap(EventHandle())
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        size = self.group.size()
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        rows = torch.cat([is_token_in_rank[:, rank].nonzero().flatten() for rank in range(size)])
        handle = (rows, num_tokens_per_rank.tolist(), received.tolist(), len(x))
        of_rank = len(num_tokens_per_expert) // size
        numbers = self._sent(topk_idx, handle) - of_rank * self.group.rank()
        is_own = (numbers >= 0) & (numbers < of_rank)
        numbers = numbers.where(is_own, -1)
        weights = self._sent(topk_weights, handle).where(is_own, 0.0)
        counts = torch.bincount(numbers[is_own], minlength=of_rank).tolist()
        return self._sent(x, handle), numbers, weights, counts, handle, EventOverlap(EventHandle())

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns the sums of the expert outputs of all ranks, on the rank of each token."""
        _check(x)
        weights = None if topk_weights is None else self._summed(topk_weights, handle)
        return self._summed(x, handle), weights, EventOverlap(EventHandle())

    def _sent(self, x: Tensor, handle: tuple[Any, ...]) -> Tensor:
        rows, sent, received, _ = handle
        output = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(output, x[rows].contiguous(), received, sent, group=self.group)
        return output

    def _summed(self, x: Tensor, handle: tuple[Any, ...]) -> Tensor:
        rows, sent, received, num_tokens = handle
        output = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), sent, received, group=self.group)
        return x.new_zeros(num_tokens, *x.shape[1:]).index_add(0, rows, output)


def _check(x: Tensor) -> None:
    assert x.dtype in TYPES and x.dim() == 2 and x.is_contiguous()
    assert x.size(1) * x.element_size() % 16 == 0, "rows of whole int4"
