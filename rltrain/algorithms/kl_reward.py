"""The distance from the reference as a reward: what it takes off each token, and a coefficient that adapts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.kl import kl_estimate
from rltrain.algorithms.losses import response_lengths, sample_index
from rltrain.config import schema
from rltrain.data.experience import Experience

MAX_ERROR = 0.2
"""By which a KL counts at most as too large or too small, relative to the target."""


def response_kl(experience: Experience, kl: schema.Kl) -> Tensor:
    """[tokens] the KL estimate of response tokens, 0 elsewhere.

    Needs reference_logprobs; the actor's own log-probs are actor_logprobs where present, else rollout_logprobs.
    """
    assert kl.estimator != "full", "it is no estimate of a drawn token"
    drawn = experience.actor_logprobs if experience.has("actor_logprobs") else experience.rollout_logprobs
    return kl_estimate(drawn, experience.reference_logprobs, kl.estimator).masked_fill(~experience.response_mask, 0)


def mean_kl_sums(experience: Experience, token_kl: Tensor) -> Tensor:
    """[2] fp64 sum over responses of the mean of `token_kl` over their tokens, and their number; to be added up over
    ranks and parts of a step. Samples without a response count nowhere."""
    lengths = response_lengths(experience).double()
    of_samples = torch.zeros_like(lengths).index_add(0, sample_index(experience), token_kl.double())
    num_responses = (lengths > 0).sum()
    return torch.stack([(of_samples / lengths.clamp(min=1)).sum(), num_responses.double()])


@dataclass
class KlCoefficient:
    """That of the penalty, from step to step. With loss.kl.adaptive it follows the distance that was measured
    (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2):

        e = clip(KL / target - 1, -0.2, 0.2)
        coef becomes coef (1 + e n / horizon)        after a step of n responses

    KL is the mean over responses of the mean over their tokens; in the paper it is the sum over the tokens.
    """

    settings: schema.Kl
    coef: float

    def after(self, measured_kl: float, num_responses: float) -> None:
        """A step with these; nothing changes without responses."""
        adaptive = self.settings.adaptive
        if adaptive is not None and num_responses:
            error = min(max(measured_kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= max(1 + error * num_responses / adaptive.horizon, 0.0)
