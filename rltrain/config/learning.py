"""The config sections of what is learned from samples, and how: batch, advantages and loss."""

from typing import Annotated, Literal

from pydantic import Field

from rltrain.config.section import Count, Fraction, NonNegative, NonNegativeInt, Positive, Section, Share


class DynamicSampling(Section):
    """Which prompt groups a step is made of, once their rewards are known: others are drawn in the place of those that
    are dropped."""

    filter: str = "rewards_differ"
    """rewards_differ drops groups whose samples all have one reward, from which algorithms that compare them learn
    nothing. Or a function (prompt, responses, rewards, label) as "file.py:function" or "module:function", which returns
    true for a group that counts, and false or the reason, a string, for one that does not."""
    max_drawn: Annotated[float, Field(ge=1)] = 4.0
    """Groups for a step, as a multiple of batch.prompts_per_step: when as many are finished as this leaves to be
    dropped, all others count, so that the step ends."""


class Batch(Section):
    prompts_per_step: Count = 32
    samples_per_prompt: Count = 8
    mini_batches: Count = 1
    """Parts of a step's samples, for each of which there is an optimizer step."""
    mini_batches_by: Literal["samples", "prompts"] = "samples"
    """What a mini-batch takes. samples: some samples of every prompt, or of as many prompts as can be. prompts: all
    samples of some prompts, as verl and SkyRL have it."""
    dynamic_sampling: DynamicSampling | None = None
    """null: every group counts. Rewards have to be known where groups are drawn: role reward on the rollout's ranks."""
    epochs: Count = 1
    """Passes over a step's samples, each through all mini-batches in the same order."""


class OnDivergence(Section):
    """An optimizer step whose loss or gradient norm is not finite changes nothing, and is counted."""

    max_skipped: NonNegativeInt = 3
    """So many in a row, of actor or critic, are left out; one more ends the run, and 0 lets the first end it. A run
    that goes on from a checkpoint begins to count anew."""


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
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """k1 to k3 estimate it from the drawn tokens. full: over the whole vocabulary; the reference then sends its
    distribution of every token, vocabulary times 12 bytes."""
    where: Literal["loss", "reward"] = "loss"
    adaptive: AdaptiveKl | None = None
    """With where: reward, `coef` is where the coefficient starts from; null: it stays."""
    unbiased: bool | None = None
    """In the loss: times the token's ratio, which makes value and gradient unbiased where the old weights drew it.
    null: true with estimators k1 and k3. Without the ratio one token that has become very unlikely can outweigh a
    step: k3 of a log-prob that fell by 12 is 160,000."""

    @property
    def is_weighed(self) -> bool:
        """Returns whether the estimate in the loss is multiplied by the ratio."""
        return self.where == "loss" and self.estimator in ("k1", "k3") if self.unbiased is None else self.unbiased


CorrectionLevel = Literal["token", "sequence", "geometric"]


class RatioMask(Section):
    """Tokens whose ratio, or that of their sequence, is outside [low, high] are left out of the step."""

    level: Literal["token", "sequence", "geometric", "every_token"]
    """As of the correction; every_token: a sequence is left out where a single token's own ratio is outside."""
    low: NonNegative = 0.0
    high: Positive


class Correction(Section):
    """For tokens drawn by other weights, or by other arithmetic, than the actor's. Ratios are those of a token's
    probability under the actor at the step's start over that under the engine that drew it."""

    method: Literal["tis", "mis", "icepop", "mask"] = "tis"
    """Ratios weigh the tokens' losses. Outside [low, high]: tis cuts the ratio, mis leaves the token out of the step,
    icepop gives its policy loss weight 0. mask is mis with weight 1 within."""
    level: CorrectionLevel = "token"
    """What a ratio is of: a token, or for all tokens of a sequence the product of theirs, or the geometric mean."""
    low: NonNegative = 0.0
    high: Positive | None = None
    """null: no weights and no mask."""
    normalize: Literal["mini_batch", "step"] | None = None
    """Weights are divided by their mean, of a mini-batch or of a step: over tokens, or with another level over
    sequences. null: they are not."""
    masks: tuple[RatioMask, ...] = Field(default=(), strict=False)
    """Beside the method, a list of {level, low, high}: what any of them leaves out is out."""
    reject_above: Positive | None = None
    """Sequences whose estimated KL per token, of the engine from the actor, is more than this are left out."""
    reject_by: Literal["k1", "k2", "k3"] = "k3"
    """The estimator of it; of k1, which may be negative, the absolute value counts."""
    rejected: Literal["left_out", "weight_0"] = "left_out"
    """What becomes of what `masks` and `reject_above` find. left_out: it is out of the step. weight_0: its policy loss
    has weight 0, and it goes on counting in the divisor, as icepop has it."""
    opsm_delta: Positive | None = None
    """Off-policy sequence masking: tokens of negative advantage have weight 0 where their sequence's mean log-prob
    under the engine exceeds the present one by more than this."""


class Sapo(Section):
    tau_pos: Positive = 1.0
    """How steep the gate is for tokens of positive advantage."""
    tau_neg: Positive = 1.05
    """For the others."""


class ClipCov(Section):
    ratio: Fraction = 2e-4
    """Share of a micro-batch's response tokens that is left out, and at least one."""
    low: float = 1.0
    high: float = 5.0
    """They are drawn from those whose covariance is between the two."""


class KlCov(Section):
    ratio: Fraction = 2e-4
    """Share of a micro-batch's response tokens, those of the largest covariance, that is held near the old policy."""
    coef: NonNegative = 1.0


class Dppo(Section):
    divergence: Literal["tv", "kl"] = "tv"
    """Distance of two outcomes, the token and all others, whose bounds are loss.clip_low and loss.clip_high: total
    variation, or KL."""
    ratio_max: Positive | None = None
    """What a ratio counts for at most. null: no bound."""


PolicyLoss = Literal[
    "clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "geometric_mean", "dppo", "reinforce", "own"
]


class Loss(Section):
    policy: PolicyLoss = "clip"
    """docs/policy_losses.md has the equations. own: that of `function`."""
    function: str | None = None
    """Of policy own, "file.py:function" or "module:function": docs/policy_losses.md says how it is called."""
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """clip: with a negative advantage the ratio counts as at most this."""
    sapo: Sapo = Sapo()
    clip_cov: ClipCov = ClipCov()
    kl_cov: KlCov = KlCov()
    dppo: Dppo = Dppo()
    normalization: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    entropy_coef: NonNegative = 0.0
    old_logprobs: Literal["rollout", "actor"] = "actor"
    """The ratio's denominator: the engine's own log-probs, or the actor's recomputed before the first update."""
    correction: Correction = Correction()
    kl: Kl = Kl()


class OverlongPenalty(Section):
    """Taken off the reward of responses that come near rollout.sampling.max_response_tokens (DAPO)."""

    buffer_tokens: Count
    """Before that limit, in which the penalty grows from 0 to `factor`."""
    factor: Positive = 1.0


class Advantages(Section):
    """Which of the keys an algorithm looks at, docs/algorithms.md says."""

    function: str | None = None
    """Of algorithm own, "file.py:function" or "module:function": docs/algorithms.md says how it is called."""
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
    scale_by: Literal["informative", "rewarded"] = "informative"
    """gpg: advantages are scaled by the step's samples over those of prompts whose rewards differ; rewarded: over those
    with a reward other than 0, as verl has it."""
    overlong_penalty: OverlongPenalty | None = None
    mask_truncated: bool = False
    """Leave responses that were cut at a limit out of the loss; others are compared with them all the same."""
