"""The config sections of learning from samples: batch, advantages and loss."""

from typing import Annotated, Literal

from pydantic import Field

from rltrain.config.section import Count, Fraction, NonNegative, NonNegativeInt, Positive, Section, Share


class DynamicSampling(Section):
    """Chooses the prompt groups of a step by their rewards. Dropped groups are replaced by new ones."""

    filter: str = "rewards_differ"
    """rewards_differ drops groups with equal rewards for all samples. Algorithms that compare samples learn nothing
    from them. Or a function (prompt, responses, rewards, label) as "file.py:function" or "module:function". It returns
    true to keep the group, or false or the reason (a string) to drop it."""
    max_drawn: Annotated[float, Field(ge=1)] = 4.0
    """Most groups to generate for a step, as a multiple of batch.prompts_per_step. Once (max_drawn - 1) *
    prompts_per_step groups are dropped, all further groups count. This way the step always ends."""


class Batch(Section):
    """The size of a training step and its division into mini-batches."""

    prompts_per_step: Count = 32
    """Number of prompts in a training step."""
    samples_per_prompt: Count = 8
    """Number of samples of each prompt: a prompt group."""
    mini_batches: Count = 1
    """Number of parts of a step's samples. There is one optimizer step for each."""
    mini_batches_by: Literal["samples", "prompts"] = "samples"
    """Division of a step into mini-batches. `samples`: some samples of every prompt, or of as many prompts as possible.
    `prompts`: all samples of some prompts, as in verl and SkyRL."""
    dynamic_sampling: DynamicSampling | None = None
    """Filters prompt groups by their rewards. `null`: every group counts. Rewards must be known on the rollout's ranks,
    so role reward has to be placed there."""
    epochs: Count = 1
    """Passes over a step's samples. Every pass goes through all mini-batches in the same order."""


class OnDivergence(Section):
    """An optimizer step with a loss or gradient norm that is not finite is skipped and counted. So is one too far from
    the policy of the samples."""

    max_skipped: NonNegativeInt = 3
    """Skipped optimizer steps in a row, of actor or critic, before one more ends the run. `0`: the first one ends it.
    The count starts from 0 after resuming."""
    max_ratio: Annotated[float, Field(gt=1)] | None = None
    """Largest mean ratio of present to old probability over the response tokens of a mini-batch. The actor's step on a
    mini-batch above it is skipped, without counting for max_skipped. null: no limit."""


class AdaptiveKl(Section):
    """A KL coefficient that adapts to the distance from the reference. It grows while the distance is above `target`
    and shrinks while it is below."""

    target: Positive
    """Target distance in nats per response token, by loss.kl.estimator. The distance is averaged over the tokens of a
    response, then over responses."""
    horizon: Count = 10000
    """Number of responses until a distance 20% or more off the target changes the coefficient by about 20%."""


class Kl(Section):
    """The penalty for moving away from the reference."""

    coef: NonNegative = 0.0
    """Coefficient of the penalty."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """`k1`, `k2`, `k3`: estimates from the sampled tokens. `full`: the KL over the whole vocabulary. The reference then
    sends 12 bytes times the vocabulary for every token."""
    where: Literal["loss", "reward"] = "loss"
    """Place of the penalty. `loss`: a term of the loss. `reward`: subtracted from the reward of each token."""
    adaptive: AdaptiveKl | None = None
    """Adapts the coefficient with where: reward. `coef` is its first value. `null`: the coefficient is constant."""
    unbiased: bool | None = None
    """With where: loss. `true` multiplies the estimate by the token's ratio. Value and gradient are then unbiased if
    the old weights sampled the token. `null`: true for k1 and k3. Without the ratio a single token that has become very
    unlikely can dominate a step: k3 of a log-prob that fell by 12 is 160,000."""

    @property
    def is_weighed(self) -> bool:
        """Returns whether the estimate in the loss is multiplied by the ratio."""
        return self.where == "loss" and self.estimator in ("k1", "k3") if self.unbiased is None else self.unbiased


CorrectionLevel = Literal["token", "sequence", "geometric"]


class RatioMask(Section):
    """Leaves tokens out of the step if their ratio, or the ratio of their sequence, is outside [low, high]."""

    level: Literal["token", "sequence", "geometric", "every_token"]
    """Level of the ratio, as in loss.correction.level. `every_token`: leaves a sequence out if the ratio of any of its
    tokens is outside."""
    low: NonNegative = 0.0
    """Lower limit of the ratio."""
    high: Positive
    """Upper limit of the ratio."""


class Correction(Section):
    """Corrects for tokens from other weights or other arithmetic than the actor's. The ratio of a token is its
    probability under the actor at the start of the step over its probability under the engine."""

    method: Literal["tis", "mis", "icepop", "mask"] = "tis"
    """Use of the ratios as weights of the tokens' losses. `tis`: clips ratios outside [low, high]. `mis`: leaves their
    tokens out of the step. `icepop`: gives their policy loss weight 0. `mask`: as mis, with weight 1 for all other
    tokens."""
    level: CorrectionLevel = "token"
    """Level of the ratios. `token`: one ratio for each token. `sequence`: the product over a sequence. `geometric`: the
    geometric mean over a sequence."""
    low: NonNegative = 0.0
    """Lower limit of the ratios."""
    high: Positive | None = None
    """Upper limit of the ratios. `null`: no weights and no mask."""
    normalize: Literal["mini_batch", "step"] | None = None
    """Divides the weights by their mean over a mini-batch or a step. The mean is over tokens for level token, else over
    sequences. `null`: no division."""
    masks: tuple[RatioMask, ...] = Field(default=(), strict=False)
    """Masks in addition to the method, a list of {level, low, high}. A token is left out if any of them excludes
    it."""
    reject_above: Positive | None = None
    """Leaves out sequences with a larger estimated KL per token between engine and actor."""
    reject_by: Literal["k1", "k2", "k3"] = "k3"
    """Estimator for reject_above. k1 can be negative, so its absolute value counts."""
    rejected: Literal["left_out", "weight_0"] = "left_out"
    """Treatment of tokens excluded by `masks` and `reject_above`. `left_out`: they are not part of the step.
    `weight_0`: their policy loss has weight 0, and they still count in the divisor, as with icepop."""
    opsm_delta: Positive | None = None
    """Off-policy sequence masking. Tokens of negative advantage get weight 0 if their sequence's mean log-prob under
    the engine exceeds the present one by more than this."""


class Sapo(Section):
    """Settings of policy: sapo."""

    tau_pos: Positive = 1.0
    """Steepness of the gate for tokens of positive advantage."""
    tau_neg: Positive = 1.05
    """Steepness of the gate for all other tokens."""


class ClipCov(Section):
    """Settings of policy: clip_cov."""

    ratio: Fraction = 2e-4
    """Share of a micro-batch's response tokens with policy loss 0, at least one token."""
    low: float = 1.0
    """Lower bound of the covariance, see `high`."""
    high: float = 5.0
    """Bounds of the covariance. These tokens are drawn at random from those within the bounds."""


class KlCov(Section):
    """Settings of policy: kl_cov."""

    ratio: Fraction = 2e-4
    """Share of a micro-batch's response tokens to hold near the old policy. These are the tokens with the largest
    covariance."""
    coef: NonNegative = 1.0
    """Coefficient of abs(log ratio) in the loss of these tokens."""


class Dppo(Section):
    """Settings of policy: dppo."""

    divergence: Literal["tv", "kl"] = "tv"
    """Distance between actor and old policy for two outcomes: the sampled token, and all others. `tv`: total variation.
    `kl`: KL divergence. Its bounds are loss.clip_low and loss.clip_high."""
    ratio_max: Positive | None = None
    """Upper limit of a ratio. `null`: no limit."""


PolicyLoss = Literal[
    "clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "geometric_mean", "dppo", "reinforce", "own"
]


class Loss(Section):
    """The policy loss with its correction and its KL penalty."""

    policy: PolicyLoss = "clip"
    """The policy loss. docs/policy_losses.md has the equations. `own`: the function of loss.function."""
    function: str | None = None
    """The loss function for policy: own, as "file.py:function" or "module:function". docs/policy_losses.md describes
    its arguments."""
    clip_low: Positive = 0.2
    """The ratio is clipped below 1 - clip_low. Some losses use it differently: docs/policy_losses.md."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """policy: clip. Upper limit of the ratio for tokens of negative advantage."""
    sapo: Sapo = Sapo()
    """Settings of policy: sapo."""
    clip_cov: ClipCov = ClipCov()
    """Settings of policy: clip_cov."""
    kl_cov: KlCov = KlCov()
    """Settings of policy: kl_cov."""
    dppo: Dppo = Dppo()
    """Settings of policy: dppo."""
    normalization: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """Weight of a token in the loss. `token_mean`: equal for all response tokens of a mini-batch. `sequence_mean`:
    equal for all sequences, and for all tokens within one. `dr_grpo`: 1 / (sequences *
    rollout.sampling.max_response_tokens)."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""
    old_logprobs: Literal["rollout", "actor"] = "actor"
    """Denominator of the ratio. `rollout`: the log-probs of the engine. `actor`: log-probs recomputed by the actor
    before its first update."""
    correction: Correction = Correction()
    kl: Kl = Kl()


class OverlongPenalty(Section):
    """Lowers the reward of responses close to rollout.sampling.max_response_tokens (DAPO)."""

    buffer_tokens: Count
    """Number of tokens before the limit. Within them the penalty grows from 0 to `factor`."""
    factor: Positive = 1.0
    """Penalty of a response at the limit."""


class Advantages(Section):
    """Settings of advantages. docs/algorithms.md lists the keys of each algorithm."""

    function: str | None = None
    """The advantage function for algorithm: own, as "file.py:function" or "module:function". docs/algorithms.md
    describes its arguments."""
    normalize_std: bool = True
    """Divides advantages within a prompt by the standard deviation of the prompt's rewards."""
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """ppo: lambda of generalized advantage estimation. 0 relies on the critic's next value, 1 on rewards alone."""
    whiten: bool | None = None
    """Normalizes the advantages of a step's response tokens to mean 0 and standard deviation 1. null: true for ppo,
    gdpo, reinforce_plus_plus and reinforce_plus_plus_baseline, else false."""
    k: Count = 4
    """pass_at_k: the k of pass@k. The best of every k samples counts."""
    scale_by: Literal["informative", "rewarded"] = "informative"
    """gpg: scales advantages by the step's samples over a smaller number of samples. `informative`: samples of prompts
    with different rewards. `rewarded`: samples with a reward other than 0, as in verl."""
    overlong_penalty: OverlongPenalty | None = None
    mask_truncated: bool = False
    """Leaves responses cut at a limit out of the loss. Other samples are still compared with them."""
