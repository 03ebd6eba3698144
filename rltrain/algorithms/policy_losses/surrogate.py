"""What policy losses are made of, and what they give."""

from dataclasses import dataclass, field

from torch import Tensor

from rltrain.algorithms.losses import of_response
from rltrain.data.experience import Experience


@dataclass(frozen=True)
class ResponseTokens:
    """A micro-batch's tokens as a policy loss sees them: [tokens], 0 outside the response mask, the ratio 1 there.

    Only `logprobs` and `ratio` carry a gradient.
    """

    experience: Experience
    logprobs: Tensor
    """Of the weights that are trained."""
    old_logprobs: Tensor
    ratio: Tensor
    """exp(logprobs - old_logprobs)."""
    advantages: Tensor

    @classmethod
    def of(cls, experience: Experience, logprobs: Tensor, old: str) -> "ResponseTokens":
        """`old` is the field that the ratio's denominator comes from."""
        # Values outside the response must not reach exp: an infinity there turns a zero gradient into NaN.
        logprobs = logprobs.masked_fill(~experience.response_mask, 0)
        old_logprobs = of_response(experience, old)
        ratio = (logprobs - old_logprobs).exp()
        return cls(experience, logprobs, old_logprobs, ratio, of_response(experience, "advantages"))

    @property
    def mask(self) -> Tensor:
        return self.experience.response_mask


@dataclass(frozen=True)
class Surrogate:
    """What is minimized in the place of the expected reward's negative."""

    per_token: Tensor
    """[tokens] of which the policy loss is a weighted sum; without meaning outside the response."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """[tokens] bool, no gradient: metrics that are shares of the response tokens, of the same names in every call."""
    total: Tensor | None = None
    """Scalar: the weighted sum itself, where it is not known of tokens."""
