"""The config section `evaluation`."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rltrain.config.data import PromptFile
from rltrain.config.models import Offload, Parallel
from rltrain.config.rewards import Reward
from rltrain.config.rollout import Rollout, Sampling
from rltrain.config.section import Count, NonNegativeInt, Positive, Section, Temperature, TopK, TopP

SHORT_FORM = "eval"
"""Name of the evaluation set from data.eval."""
OF_SOURCES = "reward_mean"
"""Prefix of a source's name in metrics. An evaluation set cannot have this name."""
ENGINE_KEYS = ("engine", "dtype", "parallel", "max_running_requests", "max_context_tokens", "kv_cache_gb")
"""Keys of section rollout with a separate value for the engines of role evaluation."""


class EvaluationSampling(Section):
    """Sampling of an evaluation set, greedy by default. Stop strings are always those of rollout.sampling."""

    temperature: Temperature = 0.0
    """Sampling temperature. `0`: greedy."""
    top_p: TopP = 1.0
    """Smallest total probability of the likeliest tokens to sample from. `1`: off."""
    top_k: TopK = 0
    """Number of likeliest tokens to sample from. `0` or `-1`: off."""
    max_response_tokens: Count | None = None
    """Most tokens of a response. `null`: rollout.sampling.max_response_tokens."""


class EvaluationSet(Section):
    """A set of held-out prompts with its sampling and its reward."""

    name: str
    """Name of the set in metrics: eval/<name>/score."""
    data: PromptFile
    sampling: EvaluationSampling = EvaluationSampling()
    samples_per_prompt: Count = 1
    """Samples of each prompt. pass@k is estimated for k = 1, 2, 4, ... up to this number."""
    interval: NonNegativeInt | None = None
    """Steps between evaluations of this set. `null`: evaluation.interval."""
    reward: Reward | None = None
    """A complete reward section for this set. `null`: the reward of the run."""


class KeepBest(Section):
    """Keeps the policy of the best evaluation so far in <output_dir>/hf_best."""

    metric: str
    """Metric to compare, by its name in metrics.jsonl, such as eval/score or eval/<name>/pass@4."""
    mode: Literal["max", "min"] = "max"
    """`max`: larger values are better. `min`: smaller values are better."""


class Evaluation(Section):
    """Evaluates the policy on held-out prompts with a reward function. The prompts are data.eval (decoded greedily) and
    `sets`. Without either no evaluation takes place. The rollout's engines generate the responses. If role evaluation
    is placed, its own engines do so in parallel with training and generation."""

    interval: NonNegativeInt = 0
    """Steps between evaluations. `0`: only before the first and after the last step."""
    sets: tuple[EvaluationSet, ...] = Field(default=(), strict=False)
    """Evaluation sets in addition to data.eval, a list of {name, data, sampling, samples_per_prompt, interval,
    reward}."""
    stop_at: float | None = None
    """Ends training early once stop_metric reaches this value. A loss has to fall to it. Any other metric has to rise
    to it."""
    stop_metric: str | None = None
    """Metric compared with stop_at. `null`: the mean score of data.eval, or of the first of `sets` without data.eval.
    For held-out rows without generated responses it is eval/loss (sft) or eval/accuracy (dpo, reward_model)."""
    pass_threshold: float = 0.5
    """A sample passes, in pass@k, if its reward is above this."""
    keep_best: KeepBest | None = None
    logged_prompts: NonNegativeInt | Literal["all"] = 4
    """Number of prompts of each set, from its beginning, with samples in <output_dir>/evaluation_samples."""
    max_waiting: NonNegativeInt = 4
    """Most evaluations waiting for role evaluation, without the running one. Their weights are kept on the host.
    Training waits if more are due."""
    engine: Literal["embedded", "sglang"] | None = None
    """Engine of role evaluation. For this key and all following ones null means the value of section rollout."""
    dtype: Literal["auto", "fp8"] | None = None
    """Same as rollout.dtype."""
    parallel: Parallel | None = None
    """Same as rollout.parallel."""
    max_running_requests: Count | None = None
    """Same as rollout.max_running_requests."""
    max_context_tokens: Count | None = None
    """Same as rollout.max_context_tokens."""
    kv_cache_gb: Literal["auto"] | Positive | None = None
    """Same as rollout.kv_cache_gb."""

    @property
    def engine_keys(self) -> dict[str, Any]:
        """Returns the keys set for the engines of role evaluation."""
        values = {key: getattr(self, key) for key in ENGINE_KEYS}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def offload(self) -> Offload:
        """False: engines of role evaluation share their ranks with no other role."""
        return False


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation set with all settings taken from other sections."""

    name: str
    prefix: str
    """Prefix of the set's metrics."""
    config_key: str
    """Config key of the set, for messages about its file."""
    file: PromptFile
    sampling: Sampling
    samples_per_prompt: int
    interval: int
    reward: Reward | None
    """The reward of the set. None: the reward of the run."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Returns whether the set is evaluated at `step`: before the first step, after the last one, and every
        `interval` steps between."""
        return step in (0, last_step) or (self.interval > 0 and step % self.interval == 0)

    def own_name(self, metric: str) -> str | None:
        """Returns the name of `metric` without the set's prefix, or None if it belongs to another set."""
        name = metric.removeprefix(f"{self.prefix}/")
        is_own = name != metric and ("/" not in name or name.startswith(f"{OF_SOURCES}/"))
        return name if is_own else None

    def reports(self, metric: str) -> bool:
        """Returns whether `metric` has the form of a metric of this set."""
        return self.own_name(metric) is not None


def has_reached(metric: str, value: float, goal: float) -> bool:
    """Returns whether a metric has reached evaluation.stop_at. A loss reaches it from above, any other metric from
    below."""
    return value <= goal if metric.endswith("/loss") else value >= goal


def evaluation_plans(evaluation: Evaluation, short_form: PromptFile | None, of_run: Sampling) -> list[EvaluationPlan]:
    """Returns the plans of the run's evaluation sets. The set of data.eval (`short_form`) comes first."""
    plans = []
    if short_form is not None:
        greedy = _sampling(EvaluationSampling(), of_run)
        plans.append(EvaluationPlan(SHORT_FORM, "eval", "data.eval", short_form, greedy, 1, evaluation.interval, None))
    for number, own in enumerate(evaluation.sets):
        plans.append(
            EvaluationPlan(
                name=own.name,
                prefix=f"eval/{own.name}",
                config_key=f"evaluation.sets.{number}.data",
                file=own.data,
                sampling=_sampling(own.sampling, of_run),
                samples_per_prompt=own.samples_per_prompt,
                interval=evaluation.interval if own.interval is None else own.interval,
                reward=own.reward,
            )
        )
    return plans


def of_own_engines(rollout: Rollout, evaluation: Evaluation) -> Rollout:
    """Returns section rollout with the values of role evaluation's engines."""
    return rollout.model_copy(update={**evaluation.engine_keys, "offload": evaluation.offload})


def _sampling(own: EvaluationSampling, of_run: Sampling) -> Sampling:
    return Sampling(
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        stop=of_run.stop,
        stop_token_ids=of_run.stop_token_ids,
        max_response_tokens=own.max_response_tokens or of_run.max_response_tokens,
    )
