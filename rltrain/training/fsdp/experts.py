"""transformers' experts, whose matrices are stacked in parameters of a layer, with low-rank adapters beside them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.training.adapter_mode import AdapterMode


def compute_beside_adapters(experts: Any, matrix: str, adapter: torch.nn.Module, mode: AdapterMode) -> None:
    """Give the module `experts` an adapter of its parameter `matrix`, gate_up_proj or down_proj. Its forward is then
    the one below: what transformers computes takes the stacked matrices alone."""
    if not hasattr(experts, "lora"):
        experts.lora = torch.nn.ModuleDict()
        experts.forward = _forward_of(experts, experts.forward, mode)
    experts.lora[matrix] = adapter


def _forward_of(experts: Any, plain: Callable[..., Tensor], mode: AdapterMode) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, hidden]; of each token the experts that it visits, and their weights, [tokens, visits]."""
        if not mode.is_on:
            return plain(hidden, chosen, weights)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts.num_experts).tolist()
        token = order // chosen.shape[1]
        inputs = [*hidden.index_select(0, token).split(counts)]
        inner = []
        for of_expert in _products(experts, "gate_up_proj", inputs):
            gate, up = of_expert.chunk(2, -1)
            inner.append(experts.act_fn(gate) * up)
        made = torch.cat(_products(experts, "down_proj", inner))
        weighted = made * weights.flatten().index_select(0, order)[:, None]
        # Summed visit by visit of each token: a sum that adds up rows where they come has no order of its own on GPUs.
        visits = torch.zeros_like(weighted).index_copy(0, order, weighted)
        return visits.view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    return forward


def _products(experts: Any, matrix: str, inputs: list[Tensor]) -> list[Tensor]:
    """Of each expert's tokens with its matrix, and with its adapter where there is one."""
    weights = getattr(experts, matrix)
    found = [F.linear(own, weights[number]) for number, own in enumerate(inputs)]
    if matrix not in experts.lora:
        return found
    return [one + other for one, other in zip(found, experts.lora[matrix].of_experts(inputs), strict=True)]
