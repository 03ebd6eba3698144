"""REINFORCE: the policy gradient as it stands, with no ratio and no clip."""

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def reinforce(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-A log pi.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". What
    other weights drew, loss.correction weighs: with old_logprobs rollout by the present weights against the engine.
    """
    return Surrogate(-tokens.advantages * tokens.logprobs)
