"""Experts of a layer: each token visits a few of them, and some layers have others that every token visits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.rollout.embedded.attention_layer import Attention
from rltrain.rollout.embedded.expert_matrices import GatedMatrices, InterleavedMatrices, Visits
from rltrain.rollout.embedded.feed_forward import gated
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import LayerParameters
from rltrain.rollout.embedded.residual import Norm
from rltrain.rollout.embedded.routing import Routing, route

_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router")
"""What families call a router; its experts are in the same block."""
_ROUTER_BIASES = ("gate.e_score_correction_bias", "e_score_correction_bias")
"""What they call the bias that only chooses."""
_SHARED = ("shared_experts", "shared_expert")
"""What they call those that every token visits."""


class Experts:
    """Implements `FeedForward`: a router, this rank's share of the experts, and of the shared ones where there are any.

    Of the engine's ranks, runs hold experts whole between them and cut each among themselves (`engine_layout`). Every
    rank has all tokens and adds what its share makes of them, so that one sum over all ranks completes it.
    """

    def __init__(
        self, parameters: LayerParameters, architecture: Architecture, group: TensorParallel, kept_as: int | None = None
    ) -> None:
        """`kept_as` numbers the layer among those with experts, where the tokens' routing is to be kept."""
        moe = architecture.moe
        assert moe is not None
        self._group, self._moe, self._kept_as = group, moe, kept_as
        router = next(name for name in _ROUTERS if parameters.get(f"{name}.weight") is not None)
        block = router.partition(".")[0]
        self._norm = Norm(parameters["post_attention_layernorm.weight"], architecture)
        self._router, self._logit_bias = parameters[f"{router}.weight"], parameters.get(f"{router}.bias")
        biases = (parameters.get(f"{block}.{name}") for name in _ROUTER_BIASES)
        self._router_bias = next((bias for bias in biases if bias is not None), None)
        self._matrices = (InterleavedMatrices if moe.interleaved else GatedMatrices)(parameters, block)
        self.needs_host = not self._matrices.is_grouped_on_device(self._norm.dtype)
        """Whether the host must know how many tokens visit each expert, so that a step cannot be recorded."""
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

    def add(self, hidden: Tensor, attention: Attention) -> None:
        inner = self._norm(hidden)
        share = self._visited(inner, self._routed(inner, attention))
        if self._shared is not None:
            gate_up, down = self._shared
            made = down.product(gated(inner, gate_up))
            share += made if self._shared_gate is None else made * F.linear(inner, self._shared_gate).sigmoid()
        hidden.add_(self._group.all_reduce(share))

    def store(self, hidden: Tensor, attention: Attention) -> None:
        self._routed(self._norm(hidden), attention)

    def _routed(self, inner: Tensor, attention: Attention) -> Routing:
        """Of the normed tokens [tokens, hidden]; equal on all ranks."""
        routing = route(inner, self._router, self._router_bias, self._moe, logit_bias=self._logit_bias)
        if self._kept_as is not None:
            attention.keep_routing(self._kept_as, routing.experts)
        return routing

    def _visited(self, inner: Tensor, routing: Routing) -> Tensor:
        """[tokens, hidden]: what the experts of this rank add to the tokens, in this rank's share of their columns.

        Visits lie by expert, so that each expert has one product; those to experts of other ranks lie last.
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
        # Summed visit by visit of each token: a sum that adds up rows where they come has no order of its own on GPUs.
        return torch.empty_like(made).index_copy_(0, order, made).view(len(inner), self._moe.top_k, -1).sum(1)
