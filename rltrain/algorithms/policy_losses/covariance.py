"""How much of the policy's entropy a token's update costs: its part in the covariance of log-probs and advantages."""

from torch import Tensor

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens


def covariances(tokens: ResponseTokens) -> Tensor:
    """[tokens] (log pi - mean log pi) (A - mean A), means over the micro-batch's response tokens; 0 outside.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", section 4. Their
    implementation takes the means over a micro-batch too: another split into micro-batches chooses other tokens.
    """
    logprobs, advantages = tokens.logprobs.detach(), tokens.advantages
    count = tokens.mask.sum().clamp(min=1)
    product = (logprobs - logprobs.sum() / count) * (advantages - advantages.sum() / count)
    return product.masked_fill(~tokens.mask, 0)


def number_chosen(tokens: ResponseTokens, ratio: float) -> int:
    """`ratio` of the micro-batch's response tokens, rounded down, and at least one."""
    return max(int(ratio * int(tokens.mask.sum())), 1)
