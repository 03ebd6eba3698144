"""CISPO: the ratio weighs the log-prob's gradient and is clipped itself, so that every token goes on teaching."""

from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema


def cispo(tokens: ResponseTokens, settings: schema.Loss) -> Surrogate:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi; sg stops gradients.

    MiniMax 2025, "MiniMax-M1", section 3.1, where there is no lower bound: clip_low 1 or more.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return Surrogate(-weight * tokens.advantages * tokens.logprobs, {"pg_clipfrac": weight != ratio})
