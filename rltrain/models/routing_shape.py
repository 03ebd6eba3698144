"""The format of recorded routing: the experts visited by each token."""

from typing import NamedTuple

import torch
from torch import Tensor

from rltrain.models.architecture import Architecture

NOT_RECORDED = -1
"""The value for unknown experts."""


class RoutingShape(NamedTuple):
    """The routing of a token: the numbers of its `top_k` experts in each of `num_layers` layers with experts. `experts`
    is the dtype of the numbers."""

    num_layers: int
    top_k: int
    experts: torch.dtype

    @classmethod
    def of(cls, architecture: Architecture) -> "RoutingShape":
        """Returns the routing shape of a model. Raises ValueError if it has no experts."""
        if architecture.moe is None:
            raise ValueError("the model has no experts, so there is no routing to record")
        experts = torch.int8 if architecture.expert_number_bytes == 1 else torch.int16
        return cls(sum(architecture.sparse_layers), architecture.moe.top_k, experts)

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.top_k * self.experts.itemsize

    def new_buffer(self, *sizes: int, device: torch.device) -> Tensor:
        """Returns a zero buffer for experts, [layers, *sizes, top_k]."""
        return torch.zeros(self.num_layers, *sizes, self.top_k, dtype=self.experts, device=device)

    def unknown(self, num_tokens: int) -> Tensor:
        """Returns NOT_RECORDED for every entry, [tokens, layers, top_k], in host memory."""
        return torch.full((num_tokens, self.num_layers, self.top_k), NOT_RECORDED, dtype=self.experts)

    def packed(self, experts: Tensor) -> Tensor:
        """Packs experts [tokens, layers, top_k] into the field `routed_experts` of an Experience, [tokens, token_bytes]
        int8. The bytes can hold wider numbers."""
        return experts.to(self.experts).reshape(len(experts), self.num_layers * self.top_k).view(torch.int8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Returns the experts of a packed field. The inverse of `packed`."""
        return packed.contiguous().view(self.experts).view(len(packed), self.num_layers, self.top_k)
