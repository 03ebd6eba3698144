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


class Kl(Section):
    """Penalty that keeps the actor near the reference."""

    coef: NonNegative = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"


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


class Advantages(Section):
    normalize_std: bool = True
    """grpo: divide group-centred rewards by the group's standard deviation."""
    gamma: Fraction = 1.0
    """ppo: discount per token."""
    gae_lambda: Share = 0.95
    """ppo: 0 trusts the critic's next value, 1 the rewards alone."""
    whiten: bool = True
    """ppo: advantages of a step's response tokens get mean 0 and standard deviation 1."""
