"""How the experts that a model's tokens visit are written down, by whoever routes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.models.architecture import Architecture

NOT_RECORDED = -1
"""In the place of a token's experts."""


class RoutingShape(NamedTuple):
    """Of a token: in each of the `num_layers` layers that have experts the `top_k` that it visits, as numbers of type
    `experts`."""

    num_layers: int
    top_k: int
    experts: torch.dtype

    @classmethod
    def of(cls, architecture: Architecture) -> "RoutingShape":
        """ValueError where the model has no experts."""
        if architecture.moe is None:
            raise ValueError("the model has no experts, so there is no routing to record")
        experts = torch.int8 if architecture.expert_number_bytes == 1 else torch.int16
        return cls(sum(architecture.sparse_layers), architecture.moe.top_k, experts)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.top_k * self.experts.itemsize

    def new_buffer(self, *sizes: int, device: torch.device) -> Tensor:
        """[layers, *sizes, top_k] experts."""
        return torch.zeros(self.num_layers, *sizes, self.top_k, dtype=self.experts, device=device)

    def unknown(self, num_tokens: int) -> Tensor:
        """[tokens, layers, top_k] NOT_RECORDED, in host memory."""
        return torch.full((num_tokens, self.num_layers, self.top_k), NOT_RECORDED, dtype=self.experts)

    def packed(self, experts: Tensor) -> Tensor:
        """[tokens, layers, top_k] experts as field `routed_experts` of an Experience has them: [tokens, token_bytes]
        int8, whatever the type of the numbers."""
        return experts.to(self.experts).reshape(len(experts), self.num_layers * self.top_k).view(torch.int8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """The inverse."""
        return packed.contiguous().view(self.experts).view(len(packed), self.num_layers, self.top_k)
