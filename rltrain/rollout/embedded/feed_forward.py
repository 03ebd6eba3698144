"""What a layer does after its attention: one MLP for all tokens, or experts."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.rollout.embedded.attention_layer import Attention
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix
from rltrain.rollout.embedded.residual import add_product, normed


class FeedForward(Protocol):
    """That of a layer on this rank."""

    def add(self, hidden: Tensor, attention: Attention) -> None:
        """Add what it makes of `hidden` [tokens, hidden] to that, in place. What is to be kept of the tokens beside
        keys and values goes to `attention`.

        Collective over: the engine's tensor-parallel group.
        """
        ...

    def store(self, hidden: Tensor, attention: Attention) -> None:
        """Only keep what is to be kept of the tokens."""
        ...

    @property
    def stores(self) -> bool:
        """Whether that is anything."""
        ...


class DenseFeedForward:
    """Implements `FeedForward`: one gated MLP."""

    stores = False

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._eps = group, architecture.norm_eps
        self._norm = parameters["post_attention_layernorm.weight"]
        self._gate_up = parameters.matrix("mlp.gate_up_proj.weight")
        self._down = parameters.matrix("mlp.down_proj.weight")

    def add(self, hidden: Tensor, attention: Attention) -> None:
        add_product(hidden, gated(normed(hidden, self._norm, self._eps), self._gate_up), self._down, self._group)

    def store(self, hidden: Tensor, attention: Attention) -> None:
        """There is nothing to keep."""


def gated(inner: Tensor, gate_up: Matrix) -> Tensor:
    """SiLU(gate) * up, of which `gate_up` has the rows of both."""
    gate, up = F.linear(inner, gate_up.read()).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
