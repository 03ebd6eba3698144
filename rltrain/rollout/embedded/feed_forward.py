"""What a layer does after its attention: one MLP for all tokens, or experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.rollout.embedded.attention_layer import Attention
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix
from rltrain.rollout.embedded.residual import Norm, add_product

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu_squared": lambda inner: F.relu(inner).square_(),
}

_NORMS = ("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight")
_POST_NORMS = ("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight")
"""What families call the norms before an MLP and behind it: the first that is there."""


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
    """Implements `FeedForward`: one MLP, with a gate or without."""

    stores = False

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._activate = group, ACTIVATIONS[architecture.activation]
        self._norm = Norm(parameters.first(*_NORMS), architecture, parameters.get("post_attention_layernorm.bias"))
        self._post_norm = None
        if architecture.post_norms:
            self._post_norm = Norm(parameters.first(*_POST_NORMS), architecture)
        self._is_gated = architecture.gates_mlps
        inner = f"mlp.{'gate_up' if self._is_gated else 'up'}_proj"
        self._inner, self._inner_bias = parameters.matrix(f"{inner}.weight"), parameters.get(f"{inner}.bias")
        self._down, self._down_bias = parameters.matrix("mlp.down_proj.weight"), parameters.get("mlp.down_proj.bias")

    def add(self, hidden: Tensor, attention: Attention) -> None:
        normed = self._norm(hidden)
        if self._is_gated:
            inner = gated(normed, self._inner, self._activate, self._inner_bias)
        else:
            inner = self._activate(self._inner.product(normed, self._inner_bias))
        add_product(hidden, inner, self._down, self._group, self._post_norm)
        if self._down_bias is not None:
            hidden.add_(self._down_bias)

    def store(self, hidden: Tensor, attention: Attention) -> None:
        """There is nothing to keep."""


def gated(
    inner: Tensor, gate_up: Matrix, activate: Callable[[Tensor], Tensor] = F.silu, bias: Tensor | None = None
) -> Tensor:
    """activate(gate) * up, of which `gate_up` and `bias` have the rows of both."""
    gate, up = gate_up.product(inner, bias).chunk(2, dim=-1)
    return activate(gate).mul_(up)
