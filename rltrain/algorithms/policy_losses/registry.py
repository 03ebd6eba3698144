"""Policy losses by the names that a config gives them."""

from collections.abc import Callable

from rltrain.algorithms.policy_losses.cispo import cispo
from rltrain.algorithms.policy_losses.clip import clip
from rltrain.algorithms.policy_losses.clip_cov import clip_cov
from rltrain.algorithms.policy_losses.dppo import dppo
from rltrain.algorithms.policy_losses.geometric_mean import geometric_mean
from rltrain.algorithms.policy_losses.gspo import gspo
from rltrain.algorithms.policy_losses.kl_cov import kl_cov
from rltrain.algorithms.policy_losses.own import own_policy_loss
from rltrain.algorithms.policy_losses.reinforce import reinforce
from rltrain.algorithms.policy_losses.sapo import sapo
from rltrain.algorithms.policy_losses.surrogate import ResponseTokens, Surrogate
from rltrain.config import schema

PolicyLoss = Callable[[ResponseTokens, schema.Loss], Surrogate]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.__name__: loss for loss in (clip, gspo, cispo, sapo, clip_cov, kl_cov, geometric_mean, dppo, reinforce)
}


def policy_loss_of(settings: schema.Loss) -> PolicyLoss:
    """That of settings.policy. ConfigError where it is the user's and cannot be called."""
    return own_policy_loss(settings) if settings.policy == "own" else POLICY_LOSSES[settings.policy]
