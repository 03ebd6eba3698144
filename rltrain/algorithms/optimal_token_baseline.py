"""The optimal token baseline: every token is compared with what comes of the other responses at its place."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rltrain.algorithms.group_relative import GroupRelative

if TYPE_CHECKING:
    from torch import Tensor

    from rltrain.data.experience import Experience

EPS = 1e-8
"""Of the weights' sum, as in verl."""


class OptimalTokenBaseline(GroupRelative):
    """Li et al. 2026, "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", as verl has it:

        A_(i, t) = G_(i, t) - sum over j of W_(j, t) G_(j, t) / sum over j of W_(j, t)
        W_(j, t) = sum over s <= t of rho_(j, s)^2 (1 - 2 p_(j, s) + sum over tokens v of p_(j, s)(v)^2)

    over the responses j to the prompt that have a token in the t-th place. G is what is still to come of the reward, p
    the actor's probability, so that the bracket is the squared norm of the log-prob's gradient by the logits, and rho
    the weight of loss.correction, or 1. Of a token beyond all other responses A is G. A response that is alone has A 0.

    The distance from the reference, where loss.kl is in the reward, is taken off token by token.
    """

    name = "optimal_token_baseline"
    per_token = True
    needs_actor_squares = True

    def usable_roles(self) -> frozenset[str]:
        return super().usable_roles() - {"inference"}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        reason = f"algorithm {self.name} weighs by the actor's probabilities of all tokens at the step's start"
        if not self.needs_actor_logprobs():
            yield f"loss.old_logprobs: got {self.config.loss.old_logprobs}; expected actor: {reason}"
        if self.config.model.router_replay == "recompute":
            yield f"model.router_replay: got recompute; expected null or rollout: {reason}, which it evaluates without"

    def with_advantages(self, experience: "Experience", token_rewards: "Tensor | None" = None) -> "Experience":
        """Needs actor_logprobs and actor_squares, with loss.correction rollout_logprobs."""
        import torch

        from rltrain.algorithms.gae import with_returns_to_go
        from rltrain.algorithms.rectangles import Rectangle

        returns = with_returns_to_go(experience, token_rewards, gamma=1.0)
        rows = Rectangle.of(experience)
        mask = rows.padded(experience.response_mask.double())
        to_go = rows.padded(returns.advantages.double()) * mask
        weights = (rows.padded(self._energies(experience)) * mask).cumsum(1) * mask
        groups = experience.group_ids
        zeros = torch.zeros(3, int(groups.max()) + 1 if len(groups) else 0, rows.shape[1], dtype=torch.float64)
        sums = zeros.index_add(1, groups, torch.stack([to_go * weights, weights, mask]))[:, groups]
        baselines = (sums[0] / (sums[1] + EPS)).masked_fill(sums[2] == 1, 0)
        members = (mask.sum(1) > 0).long()
        is_alone = torch.zeros(zeros.shape[1], dtype=torch.int64).index_add(0, groups, members)[groups] == 1
        advantages = ((to_go - baselines) * mask).masked_fill(is_alone[:, None], 0)
        return experience.with_fields(
            advantages=rows.packed(advantages, experience.num_tokens).to(experience.rewards.dtype)
        )

    def _energies(self, experience: "Experience") -> "Tensor":
        """[tokens] fp64 squared norms of the gradients, by the weights of the correction."""
        from rltrain.algorithms.correction import weights_of
        from rltrain.algorithms.losses import of_response

        actor, settings = of_response(experience, "actor_logprobs").double(), self.config.loss.correction
        energy = 1 - 2 * actor.exp() + experience.actor_squares.double()
        if settings.high is None:
            return energy
        log_ratio = actor - of_response(experience, "rollout_logprobs").double()
        return energy * weights_of(experience, log_ratio, settings)[0].square()
