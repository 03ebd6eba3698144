"""The loss of a reward model that learns from pairs."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rltrain.algorithms.losses import LossFunction, LossOutput, SharedLoss
from rltrain.algorithms.pairs import comparison, num_pairs, pair_shares, sides
from rltrain.config import schema
from rltrain.data.experience import Experience


def sample_scores(experience: Experience, scores: Tensor) -> Tensor:
    """[samples] of a sample its score up to and with its last token, of `scores` [tokens]; gradients flow."""
    return scores[experience.offsets()[1:] - 1]


def ranking_loss(settings: schema.Preference) -> LossFunction:
    """(micro-batch of whole pairs, scores [tokens]) -> its mean over pairs of -log sigmoid(chosen - rejected - margin)
    of their samples' scores: Bradley and Terry 1952 as in Ouyang et al. 2022, "Training language models to follow
    instructions", equation 1, with the margin of Touvron et al. 2023, "Llama 2", equation 2, where rows have one.

    With center_coef comes that times (chosen + rejected)^2, which keeps scores around 0: Eisenstein et al. 2023,
    "Helping or Herding?", equation 2.
    """

    def loss_function(experience: Experience, scores: Tensor) -> LossOutput:
        of_samples = sample_scores(experience, scores)
        chosen, rejected = sides(experience, of_samples)
        difference = chosen - rejected
        if experience.has("margins"):
            difference = difference - sides(experience, experience.margins)[0]
        loss = -logsigmoid(difference).sum()
        sums = comparison(experience, of_samples)
        if settings.center_coef:
            center_loss = (chosen + rejected).square().sum()
            loss, sums["center_loss"] = loss + settings.center_coef * center_loss, center_loss.detach()
        return LossOutput(loss=loss, divisor=num_pairs(experience), sums=sums)

    return SharedLoss(loss_function, pair_shares)
