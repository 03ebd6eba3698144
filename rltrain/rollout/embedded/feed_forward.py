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
    """Implements `FeedForward`: one gated MLP."""

    stores = False

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._activate = group, ACTIVATIONS[architecture.activation]
        self._norm, self._post_norm = Norm(parameters.first(*_NORMS), architecture), None
        if architecture.post_norms:
            self._post_norm = Norm(parameters.first(*_POST_NORMS), architecture)
        self._gate_up = parameters.matrix("mlp.gate_up_proj.weight")
        self._down = parameters.matrix("mlp.down_proj.weight")

    def add(self, hidden: Tensor, attention: Attention) -> None:
        inner = gated(self._norm(hidden), self._gate_up, self._activate)
        add_product(hidden, inner, self._down, self._group, self._post_norm)

    def store(self, hidden: Tensor, attention: Attention) -> None:
        """There is nothing to keep."""


def gated(inner: Tensor, gate_up: Matrix, activate: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """activate(gate) * up, of which `gate_up` has the rows of both."""
    gate, up = gate_up.product(inner).chunk(2, dim=-1)
    return activate(gate).mul_(up)
