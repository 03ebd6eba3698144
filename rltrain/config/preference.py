"""The config section preference: what algorithms that learn from pairs make of them."""

from typing import Literal

from pydantic import Field

from rltrain.config.section import NonNegative, Positive, Section


class Preference(Section):
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """dpo: sigmoid is its own, ipo the squared distance from 1 / (2 beta)."""
    beta: Positive = 0.1
    """dpo: how near the actor stays to the reference; the larger, the nearer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """dpo with loss sigmoid: the share of pairs that are taken to be the wrong way round."""
    sft_coef: NonNegative = 0.0
    """dpo: weight of the chosen responses' negative log-prob per token beside the loss."""
    center_coef: NonNegative = 0.0
    """reward_model: weight of the square of the sum of a pair's scores, which keeps scores around 0."""
