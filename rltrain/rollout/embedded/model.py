"""The decoder on this rank's shard: layers, MLPs and experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.architecture import ExpertLayers
from rltrain.models.attention import axis_of_frequency, inverse_frequencies, soft_capped
from rltrain.models.products import clamped_swiglu, wide_product
from rltrain.models.routing_shape import RoutingShape
from rltrain.models.table import EMBEDDING, FINAL_NORM, stages_of_layer
from rltrain.rollout.embedded.image_features import Shown
from rltrain.rollout.embedded.kv_cache import DecodeAttention, PrefillAttention, StateShape
from rltrain.rollout.embedded.layers import (
    GATE_KERNELS,
    Attention,
    AttentionLayer,
    DeltaLayer,
    FusedResidual,
    GroupedAttention,
    LatentAttention,
    LayerKernels,
    Norm,
    Residual,
    RotaryEmbedding,
    Rotation,
)
from rltrain.rollout.embedded.parameters import (
    LayerParameters,
    Matrix,
    TensorParallel,
    TransposedMatrices,
    is_grouped_on_device,
    local_token_ids,
)

# The part of a layer after attention: one MLP for all tokens, or experts.

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu_squared": lambda inner: F.relu(inner).square_(),
}

Gate = Callable[..., Tensor]
"""A function (gates, ups, weights or nothing) -> activation(gates) * ups * weights, all [rows, columns] but the weights
[rows, 1]. It may overwrite `gates`."""


def gate_of(activation: str, kernels: LayerKernels | None) -> Gate:
    """Returns the gate with an activation, by a kernel if there is one for it."""
    if kernels is not None and activation in GATE_KERNELS:
        return lambda gates, ups, weights=None: kernels.gate_rows(gates, ups, activation, weights)
    activate = ACTIVATIONS[activation]

    def gate(gates: Tensor, ups: Tensor, weights: Tensor | None = None) -> Tensor:
        made = activate(gates).mul_(ups)
        return made if weights is None else made.mul_(weights)

    return gate


_NORMS = ("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight")
_POST_NORMS = ("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight")
"""Names of the norms before and after an MLP. The first existing one is used."""


class FeedForward(Protocol):
    """The MLP or the experts of a layer on this rank."""

    def add(self, hidden: Residual, attention: Attention) -> None:
        """Adds the output for `hidden` to it. Passes data to be cached, other than keys and values, to `attention`.

        Collective over: the engine's tensor-parallel group.
        """
        ...

    def store(self, hidden: Residual, attention: Attention) -> None:
        """Only passes the data to be cached."""
        ...

    @property
    def stores(self) -> bool:
        """Whether there is such data."""
        ...


class DenseFeedForward:
    """Implements `FeedForward` with one MLP, gated or not."""

    stores = False

    def __init__(
        self,
        parameters: LayerParameters,
        architecture: Architecture,
        group: TensorParallel,
        kernels: LayerKernels | None = None,
    ) -> None:
        self._group, self._activate = group, ACTIVATIONS[architecture.activation]
        self._gate = gate_of(architecture.activation, kernels)
        self._norm = Norm(parameters.first(*_NORMS), architecture, parameters.get("post_attention_layernorm.bias"))
        self._post_norm = None
        if architecture.post_norms:
            self._post_norm = Norm(parameters.first(*_POST_NORMS), architecture)
        self._is_gated = architecture.gates_mlps
        inner = f"mlp.{'gate_up' if self._is_gated else 'up'}_proj"
        self._inner, self._inner_bias = parameters.matrix(f"{inner}.weight"), parameters.get(f"{inner}.bias")
        self._down, self._down_bias = parameters.matrix("mlp.down_proj.weight"), parameters.get("mlp.down_proj.bias")

    def add(self, hidden: Residual, attention: Attention) -> None:
        inner = self._inner.product(hidden.normed(self._norm), self._inner_bias)
        inner = self._gate(*inner.chunk(2, -1)) if self._is_gated else self._activate(inner)
        hidden.add_product(inner, self._down, self._group, bias=self._down_bias, norm=self._post_norm)

    def store(self, hidden: Residual, attention: Attention) -> None:
        """Does nothing, since an MLP caches nothing."""


# Matrices of a layer's experts on a rank.


class Visits(NamedTuple):
    """The expert of each row.

    `expert` [rows] is ascending. It counts this rank's experts; rows of other ranks have a number after all of them.
    `ends` [experts] has the end row of each expert. The rank holds part number `part` of every expert.
    """

    expert: Tensor
    ends: Tensor
    part: int


class GatedMatrices:
    """Gated expert matrices with SiLU, each [experts, outputs, inputs]: gate and up in one, and down."""

    def __init__(self, parameters: LayerParameters, block: str, kernels: LayerKernels | None) -> None:
        self._gate = gate_of("silu", kernels)
        names = [f"{block}.experts.w13_weight", f"{block}.experts.w2_weight"]
        self._gate_up, self._down = (parameters.matrix(name) for name in names)
        self._weights = [parameters[name] for name in names]
        self.count = len(self._weights[0])

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """Returns whether all grouped products run on the device only (see `is_grouped_on_device`)."""
        adapters = (matrix.adapter for matrix in (self._gate_up, self._down) if matrix.adapter)
        plain = (is_grouped_on_device(weight, dtype) for weight in self._weights)
        return all(plain) and all(adapter.is_grouped_on_device(dtype) for adapter in adapters)

    def made(self, rows: Tensor, weights: Tensor, visits: Visits) -> Tensor:
        """Returns this rank's part of the experts' outputs for `rows`, both [rows, hidden], times `weights` [rows, 1].

        Rows of other ranks' experts are undefined.
        """
        gates, ups = self._gate_up.grouped_product(rows, visits.ends).chunk(2, -1)
        # The weight is applied before the last product, as in Megatron, so both round at the same place.
        return self._down.grouped_product(self._gate(gates, ups, weights), visits.ends)


class InterleavedMatrices:
    """The expert matrices of gpt-oss, [experts, inputs, outputs], with biases."""

    def __init__(self, parameters: LayerParameters, block: str, kernels: LayerKernels | None) -> None:
        weights = [parameters[f"{block}.experts.{name}"] for name in ("gate_up_proj", "down_proj")]
        self._weights, self.count = weights, len(weights[0])
        matrices: list[Matrix] = [TransposedMatrices(weight) for weight in weights]
        self._gate_up, self._down = matrices
        self._gate_up_bias = parameters[f"{block}.experts.gate_up_proj_bias"]
        self._down_bias = parameters[f"{block}.experts.down_proj_bias"]

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """Returns whether all grouped products run on the device only (see `is_grouped_on_device`)."""
        return all(is_grouped_on_device(weight, dtype) for weight in self._weights)

    def made(self, rows: Tensor, weights: Tensor, visits: Visits) -> Tensor:
        """Returns this rank's part of the outputs (see GatedMatrices). Only part 0 of an expert adds the output
        bias."""
        own = visits.expert.clamp(max=self.count - 1)
        gate_up = self._gate_up.grouped_product(rows, visits.ends) + self._gate_up_bias.index_select(0, own)
        inner = clamped_swiglu(gate_up)
        made = self._down.grouped_product((inner * weights).to(inner.dtype), visits.ends)
        if visits.part == 0:
            made += self._down_bias.index_select(0, own) * weights
        return made


# Routing of tokens to experts, equal to the models in transformers.

_GROUP_SCORE_EXPERTS = 2
"""The score of a group of experts is the sum of so many best ones."""
_LEAST_SUM = 1e-20


class Routing(NamedTuple):
    """For each token its experts [tokens, top_k] int64 and their weights [tokens, top_k] float32."""

    experts: Tensor
    weights: Tensor


def route(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, moe: ExpertLayers, *, logit_bias: Tensor | None = None
) -> Routing:
    """Returns the experts for `hidden` [tokens, hidden], computed in float32 because close scores decide between
    experts.

    `weight` [experts, hidden] and `logit_bias` [experts] give the router's logits. `bias` [experts] affects the choice
    of experts but not their weights.
    """
    logits = F.linear(hidden.float(), weight.float(), None if logit_bias is None else logit_bias.float())
    scores = torch.softmax(logits, -1) if moe.score == "softmax" else logits.sigmoid()
    choosing = scores if bias is None else scores + bias
    if moe.top_groups < moe.num_groups:
        choosing = _within_groups(choosing, moe)
    experts = choosing.topk(moe.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if moe.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return Routing(experts, weights if moe.scaling == 1 else weights * moe.scaling)


def _within_groups(choosing: Tensor, moe: ExpertLayers) -> Tensor:
    """Returns `choosing` with -inf for experts outside each token's best groups."""
    by_group = choosing.unflatten(-1, (moe.num_groups, -1))
    best = by_group.topk(_GROUP_SCORE_EXPERTS, -1).values.sum(-1).topk(moe.top_groups, -1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(-2)


# The experts of a layer. Each token visits a few of them. Some layers also have shared experts for all tokens.

_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router")
"""Names of a router in different families. Its experts are in the same block."""
_ROUTER_BIASES = ("gate.e_score_correction_bias", "e_score_correction_bias")
"""Names of the bias for choosing experts."""
_SHARED = ("shared_experts", "shared_expert")
"""Names of the shared experts."""


class Experts:
    """Implements `FeedForward` with a router, this rank's share of the experts, and any shared experts.

    The engine's ranks form runs. Each run holds some whole experts, and its ranks cut each of them (see
    `engine_layout`). Every rank has all tokens and adds the output of its share. One sum over all ranks completes the
    result.
    """

    def __init__(
        self,
        parameters: LayerParameters,
        architecture: Architecture,
        group: TensorParallel,
        kernels: LayerKernels | None = None,
        kept_as: int | None = None,
    ) -> None:
        """`kept_as` is the layer's number among those with experts. None if the routing is not recorded."""
        moe = architecture.moe
        assert moe is not None
        self._group, self._moe, self._kept_as = group, moe, kept_as
        router = next(name for name in _ROUTERS if parameters.get(f"{name}.weight") is not None)
        block = router.partition(".")[0]
        self._norm = Norm(parameters["post_attention_layernorm.weight"], architecture)
        self._router, self._logit_bias = parameters[f"{router}.weight"], parameters.get(f"{router}.bias")
        biases = (parameters.get(f"{block}.{name}") for name in _ROUTER_BIASES)
        self._router_bias = next((bias for bias in biases if bias is not None), None)
        self._matrices = (InterleavedMatrices if moe.interleaved else GatedMatrices)(parameters, block, kernels)
        self._gate = gate_of("silu", kernels)
        self.needs_host = not self._matrices.is_grouped_on_device(self._norm.dtype)
        """Whether the host must know the number of tokens per expert. Steps cannot be recorded then."""
        self._count = self._matrices.count
        ranks_of_each = group.size * self._count // moe.num_experts
        self._first, self._part_of_each = group.rank // ranks_of_each * self._count, group.rank % ranks_of_each
        self._shared, self._shared_gate = None, parameters.get(f"{block}.shared_expert_gate.weight")
        if moe.shared_ffn_hidden_size:
            named = (f"{block}.{name}" for name in _SHARED)
            shared = next(name for name in named if parameters.get(f"{name}.gate_up_proj.weight") is not None)
            self._shared = (
                parameters.matrix(f"{shared}.gate_up_proj.weight"),
                parameters.matrix(f"{shared}.down_proj.weight"),
            )

    @property
    def stores(self) -> bool:
        return self._kept_as is not None

    def add(self, hidden: Residual, attention: Attention) -> None:
        inner = hidden.normed(self._norm)
        share = self._visited(inner, self._routed(inner, attention))
        if self._shared is not None:
            gate_up, down = self._shared
            made = down.product(self._gate(*gate_up.product(inner).chunk(2, -1)))
            share += made if self._shared_gate is None else made * F.linear(inner, self._shared_gate).sigmoid()
        hidden.add(self._group.all_reduce(share))

    def store(self, hidden: Residual, attention: Attention) -> None:
        self._routed(hidden.normed(self._norm), attention)

    def _routed(self, inner: Tensor, attention: Attention) -> Routing:
        """Returns the routing of the normed tokens [tokens, hidden]. It is equal on all ranks."""
        routing = route(inner, self._router, self._router_bias, self._moe, logit_bias=self._logit_bias)
        if self._kept_as is not None:
            attention.keep_routing(self._kept_as, routing.experts)
        return routing

    def _visited(self, inner: Tensor, routing: Routing) -> Tensor:
        """Returns the output of this rank's share of the experts, shape [tokens, hidden].

        Visits are sorted by expert, so each expert needs one product. Visits to experts of other ranks come last.
        """
        expert = routing.experts.flatten()
        if self._count < self._moe.num_experts:
            expert = expert - self._first
            expert = torch.where((expert < 0) | (expert >= self._count), self._count, expert)
        expert, order = expert.sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self._count, device=expert.device), right=True)
        rows = inner.index_select(0, order // self._moe.top_k)
        weights = routing.weights.flatten().index_select(0, order)[:, None]
        made = self._matrices.made(rows, weights, Visits(expert, ends, self._part_of_each))
        if self._count < self._moe.num_experts:
            made.masked_fill_((expert == self._count)[:, None], 0)
        # Sums over the visits of each token in a fixed order. Scattered additions on GPUs have none.
        return torch.empty_like(made).index_copy_(0, order, made).view(len(inner), self._moe.top_k, -1).sum(1)


# The whole decoder. It reads parameters directly from the memory written by weight syncs.


class _Layer(NamedTuple):
    number: int
    """Its number among the layers of its kind, with attention or with states."""
    attention: AttentionLayer
    feed_forward: FeedForward
    stages: tuple[str, str]


class EngineModel:
    """The decoder on this rank. It holds parameters by reference, so an in-place update takes effect at the next token.

    With `record_routing` layers with experts cache the tokens' routing beside keys and values. `kernels` replace
    torch's operators around products.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        matrices: Mapping[str, Matrix],
        tensor_parallel: TensorParallel,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        residual_dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        record_routing: bool = False,
        kernels: LayerKernels | None = None,
    ) -> None:
        self._tp, self.kernels = tensor_parallel, kernels
        self._residual_dtype, self._wide_head = residual_dtype or dtype, head_dtype == torch.float32
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale, dtype=dtype))
        self._vocab_size, self._logits_softcap = architecture.vocab_size, architecture.logits_softcap
        self.num_layers, self.num_attention_layers = architecture.num_layers, architecture.num_attention_layers
        attention = LatentAttention if architecture.mla else GroupedAttention
        self.attention_shape = attention.shape(architecture, tensor_parallel.size)
        """Shape of attention and of the cached data per token in attention layers."""
        self.state_shape = StateShape.of(architecture, tensor_parallel.size)
        """Shape of the states per sample in the other layers."""
        self._parameters = tuple(parameters.values())
        self._embedding = parameters["model.embed_tokens.weight"]
        self.routing_shape = RoutingShape.of(architecture) if record_routing else None
        self.sees = architecture.mrope is not None
        """Whether positions for rotary embeddings differ from places in the context after an image."""
        layers: list[_Layer] = []
        num_sparse, num_of_kind = 0, [0, 0]
        for index, kind in enumerate(architecture.layer_kinds):
            own = LayerParameters(parameters, matrices, index)
            feed_forward: FeedForward
            if kind.sparse:
                kept_as = num_sparse if record_routing else None
                feed_forward = Experts(own, architecture, tensor_parallel, kernels, kept_as)
                num_sparse += 1
            else:
                feed_forward = DenseFeedForward(own, architecture, tensor_parallel, kernels)
            mixer: AttentionLayer
            if kind.delta:
                mixer = DeltaLayer(own, architecture, tensor_parallel)
            else:
                mixer = attention(own, architecture, tensor_parallel, kernels)
            layers.append(_Layer(num_of_kind[kind.delta], mixer, feed_forward, stages_of_layer(index)))
            num_of_kind[kind.delta] += 1
        self._layers = tuple(layers)
        self._final_norm = Norm(parameters["model.norm.weight"], architecture, parameters.get("model.norm.bias"))
        self._head = parameters.get("lm_head.weight", self._embedding)
        self._rotaries = _rotaries(architecture, max_positions, device)
        windows = (architecture.window_of(layer) for layer in range(self.num_layers))
        self._rotary_of = tuple(int(len(self._rotaries) > 1 and window is not None) for window in windows)
        """For each layer, the index of its rotary embedding."""
        self.observe: Callable[[str, Tensor], None] | None = None
        """Called, if given, with the values of each stage in `forward` and `logits`. tools/parity.py has the names of
        stages."""

    @property
    def needs_host(self) -> bool:
        """Whether a step waits for data on the host. Such a step cannot be recorded."""
        experts = (layer.feed_forward for layer in self._layers if isinstance(layer.feed_forward, Experts))
        return any(layer.needs_host for layer in experts)

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses of all parameters. They change when offloaded memory returns."""
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: DecodeAttention, shown: Shown | None = None
    ) -> Tensor:
        """Returns hidden states [tokens, hidden] before the final norm, for `tokens` [tokens].

        They are rotated by `positions`, [tokens], or [3, tokens] for models with images. The tokens `shown` are those
        of images. Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens, shown)
        self._show(EMBEDDING, hidden)
        rotations = self._rotations(positions)
        for index in range(self.num_layers):
            self._add_layer(index, hidden, rotations[index], attention, shown)
        return hidden.settled()

    def fill_cache(
        self, tokens: Tensor, positions: Tensor, attention: PrefillAttention, shown: Shown | None = None
    ) -> None:
        """Caches the keys and values of prompt tokens [tokens]. This is `forward` without the work needed only for its
        result.

        Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens, shown)
        rotations = self._rotations(positions)
        last, rotation = self._layers[-1], rotations[-1]
        for index in range(self.num_layers - 1):
            self._add_layer(index, hidden, rotations[index], attention, shown)
        if last.feed_forward.stores:
            last.attention.add(last.number, hidden, rotation, attention)
            last.feed_forward.store(hidden, attention)
        else:
            last.attention.store(last.number, hidden, rotation, attention)

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        """Returns the rotation of every layer."""
        rotations = [rotary.at(positions) for rotary in self._rotaries]
        return [rotations[base] for base in self._rotary_of]

    def _add_layer(
        self, index: int, hidden: Residual, rotation: Rotation, attention: Attention, shown: Shown | None
    ) -> None:
        """Adds the outputs of one layer's attention and MLP to `hidden`."""
        layer = self._layers[index]
        layer.attention.add(layer.number, hidden, rotation, attention)
        self._show(layer.stages[0], hidden)
        layer.feed_forward.add(hidden, attention)
        if shown is not None:
            shown.add(index, hidden.settled())
        self._show(layer.stages[1], hidden)

    def _show(self, stage: str, hidden: Residual) -> None:
        if self.observe is not None:
            self.observe(stage, hidden.settled())

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits in the dtype of their product, shape [tokens, padded vocab_size], equal on every rank.
        Padded columns are -inf.

        Collective over: the engine's tensor-parallel group.
        """
        final = self._residual(hidden).normed(self._final_norm)
        if self.observe is not None:
            self.observe(FINAL_NORM, final)
        shard = wide_product(final, self._head) if self._wide_head else F.linear(final, self._head)
        shard = shard if self._logits_softcap is None else soft_capped(shard, self._logits_softcap)
        logits = self._tp.all_gather_columns(shard)
        logits[:, self._vocab_size :].fill_(float("-inf"))
        return logits

    def _residual(self, hidden: Tensor) -> Residual:
        return Residual(hidden) if self.kernels is None else FusedResidual(hidden, self.kernels)

    def _embed(self, tokens: Tensor, shown: Shown | None) -> Residual:
        embedded = self._embedded(tokens).to(self._residual_dtype)
        embedded = embedded if self._embedding_scale == 1 else embedded * self._embedding_scale
        if shown is not None:
            shown.insert(embedded)
        return self._residual(embedded)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(tokens, self._embedding)
        num_rows = len(self._embedding)
        local, outside = local_token_ids(tokens, self._tp.rank * num_rows, num_rows)
        return self._tp.all_reduce(F.embedding(local, self._embedding).masked_fill_(outside[:, None], 0))


def _rotaries(architecture: Architecture, max_positions: int, device: torch.device) -> list[RotaryEmbedding]:
    """Returns the rotary embedding of most layers, and that of layers with a window if they have another base."""
    magnitude, axes = architecture.rotation_magnitude, axis_of_frequency(architecture)
    frequencies = [inverse_frequencies(architecture)]
    if architecture.sliding_rope_theta is not None:
        frequencies.append(inverse_frequencies(architecture, sliding=True))
    return [RotaryEmbedding(of_base, magnitude, max_positions, device, axes) for of_base in frequencies]
