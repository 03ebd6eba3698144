"""The config sections of what is learned from samples, and how: batch, advantages and loss."""

from typing import Literal

from rltrain.config.section import Count, Fraction, NonNegative, Positive, Section, Share


class Batch(Section):
    prompts_per_step: Count = 32
    samples_per_prompt: Count = 8
    mini_batches: Count = 1
    """Optimizer steps per rollout batch: each takes some samples of every prompt, or all samples of some prompts."""


class AdaptiveKl(Section):
    """A coefficient that follows the distance from the reference: it grows while that is above `target`, and shrinks
    while it is below."""

    target: Positive
    """Nats per response token, by loss.kl.estimator: mean over responses of the mean over their tokens."""
    horizon: Count = 10000
    """Responses in which a distance 20% or more off the target changes the coefficient by about 20%."""


class Kl(Section):
    """Penalty that keeps the actor near the reference."""

    coef: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    adaptive: AdaptiveKl | None = None
    """With where: reward, `coef` is where the coefficient starts from; null: it stays."""


class Loss(Section):
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    normalization: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    entropy_coef: NonNegative = 0.0
    old_logprobs: Literal["rollout", "actor"] = "actor"
    """The ratio's denominator: the engine's own log-probs, or the actor's recomputed before the first update."""
    tis_clip: Positive | None = None
    """Truncated importance sampling with old_logprobs: actor: every token's loss is weighed by its probability under
    the actor over that under the engine that drew it, cut at this; null: no weights."""
    kl: Kl = Kl()


class OverlongPenalty(Section):
    """Taken off the reward of responses that come near rollout.sampling.max_response_tokens (DAPO)."""

    buffer_tokens: Count
    """Before that limit, in which the penalty grows from 0 to `factor`."""
    factor: Positive = 1.0


class Advantages(Section):
    """Which of the keys an algorithm looks at, docs/algorithms.md says."""

    normalize_std: bool = True
    """Divide what is compared within a prompt by the standard deviation of its rewards."""
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """ppo: 0 trusts the critic's next value, 1 the rewards alone."""
    whiten: bool = True
    """Advantages of a step's response tokens get mean 0 and standard deviation 1."""
    k: Count = 4
    """pass_at_k: samples of which the best one counts."""
    overlong_penalty: OverlongPenalty | None = None
    mask_truncated: bool = False
    """Leave responses that were cut at a limit out of the loss; others are compared with them all the same."""
