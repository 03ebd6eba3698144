"""Gated delta nets in attention's place."""

from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.delta_rule import (
    PackedStates,
    convolve,
    convolve_step,
    delta_rule_step,
    gated_delta_rule,
    gated_norm,
    gates,
)
from rltrain.rollout.embedded.attention_layer import Attention
from rltrain.rollout.embedded.kv_cache import PrefillAttention
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters
from rltrain.rollout.embedded.residual import Norm, add_product
from rltrain.rollout.embedded.rotary import Rotation


class DeltaLayer:
    """Implements `AttentionLayer` and `DeltaHeads`, on a rank that has some of the heads. Keeps nothing of a token, and
    of a sample a state."""

    def __init__(self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> None:
        assert architecture.delta is not None
        self._delta, self._group, self._eps = architecture.delta.shared_by(group.size), group, architecture.norm_eps
        self._norm = Norm(parameters["input_layernorm.weight"], architecture)
        self._projection = parameters.matrix("linear_attn.in_proj.weight")
        self._convolution = parameters["linear_attn.conv1d.weight"]
        self._log_rate, self._bias = parameters["linear_attn.A_log"], parameters["linear_attn.dt_bias"]
        self._head_norm = parameters["linear_attn.norm.weight"]
        self._output = parameters.matrix("linear_attn.out_proj.weight")

    def add(self, layer: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        add_product(hidden, self._made(layer, hidden, attention), self._output, self._group)

    def store(self, layer: int, hidden: Tensor, rotation: Rotation, attention: PrefillAttention) -> None:
        self._made(layer, hidden, attention)

    def whole(
        self, projected: Tensor, packed: PackedStates, before: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, gate, taken, kept = self._split(projected)
        mixed, last = convolve(mixed, self._convolution, packed, before)
        heads, final = gated_delta_rule(*self._heads(mixed), taken, kept, packed, initial)
        return self._normed(heads, gate), last, final

    def step(self, projected: Tensor, before: Tensor, states: Tensor) -> Tensor:
        mixed, gate, taken, kept = self._split(projected)
        mixed = convolve_step(mixed, self._convolution, before)
        return self._normed(delta_rule_step(*self._heads(mixed), taken, kept, states), gate)

    def _made(self, layer: int, hidden: Tensor, attention: Attention) -> Tensor:
        assert attention.states is not None, "a cache for this model keeps states"
        return attention.states.run(layer, self, self._projection.product(self._norm(hidden)))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the convolution mixes, the gates of heads, how much of a token they take in, what they keep."""
        delta = self._delta
        sizes = [delta.channels, delta.values, delta.num_heads, delta.num_heads]
        mixed, gate, weights, decays = projected.split(sizes, dim=-1)
        return mixed, gate, *gates(weights, decays, self._log_rate, self._bias)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [tokens, heads, elements]."""
        delta = self._delta
        queries, keys, values = mixed.split([delta.keys, delta.keys, delta.values], dim=-1)
        q, k = (part.unflatten(-1, (-1, delta.key_dim)) for part in (queries, keys))
        return q, k, values.unflatten(-1, (-1, delta.value_dim))

    def _normed(self, heads: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(heads, gate.reshape(heads.shape), self._head_norm, self._eps).flatten(1)
