"""Routers whose choice of experts is given: the engine's that drew the tokens, or the actor's own of an earlier pass.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv:2510.11370);
Zheng et al. 2025, "Stabilizing Reinforcement Learning with LLMs" (arXiv:2512.01374), has both kinds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rltrain.models.routing_shape import NOT_RECORDED

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Choices:
    """Of a micro-batch on this rank, by layer: [tokens of this rank, top_k] experts that are `given`, NOT_RECORDED for
    tokens that choose themselves; and where they are to be noted those that were `found`."""

    given: Mapping[int, Tensor]
    found: dict[int, Tensor] | None = None


def tell_choices(sequences: PackedSeqParams, choices: Choices) -> None:
    """Have them reach the routers of all layers with the packed sequences, as `routing.tell_routers` has samples."""
    vars(sequences)["choices"] = choices


def choices_told(sequences: PackedSeqParams) -> Choices | None:
    return vars(sequences).get("choices")


class ReplayedChoice:
    """A router's, in the place of Megatron's `RouterReplay`, whose lists are one for all models of a process and say
    nothing of micro-batches that are under way at once.

    Weights of the chosen experts are the router's own scores of them: so gradients flow to the router.
    """

    def __init__(self, device: Any) -> None:
        self.layer = 0
        self.choices: Choices | None = None
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Choices that were given for tokens of passes with gradients, and those among them that the router would not
        have made, since the last step."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores, numbers) [tokens, top_k] of the chosen experts, of `scores` [tokens, experts], as Megatron asks."""
        assert default_compute_topk is not None, "Megatron gives its own way of choosing"
        best, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.choices is None:
            return best, own
        chosen = own
        if (given := self.choices.given.get(self.layer)) is not None:
            given = given.to(own)
            is_given = given != NOT_RECORDED
            chosen = torch.where(is_given, given, own)
            if torch.is_grad_enabled():
                differ = (given[:, :, None] != own[:, None]).all(-1) & is_given
                self.counts += torch.stack([is_given.sum(), differ.sum()])
        if self.choices.found is not None:
            self.choices.found[self.layer] = chosen
        return scores.gather(1, chosen), chosen
