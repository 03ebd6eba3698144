"""The config section evaluation."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from rltrain.config.data import PromptFile
from rltrain.config.models import Offload, Parallel
from rltrain.config.rewards import Reward
from rltrain.config.rollout import Rollout, Sampling
from rltrain.config.section import Count, NonNegativeInt, Positive, Section, Temperature, TopK, TopP

SHORT_FORM = "eval"
"""The name of the set that data.eval is."""
OF_SOURCES = "reward_mean"
"""Before the name of one of several sources, in metrics; no set can be called so."""
ENGINE_KEYS = ("engine", "dtype", "parallel", "max_running_requests", "max_context_tokens", "kv_cache_gb")
"""Of the section rollout, what engines of role evaluation may have otherwise."""


class EvaluationSampling(Section):
    """Greedy unless it says otherwise. Stop strings are those of rollout.sampling."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    """0 or -1: off."""
    max_response_tokens: Count | None = None
    """null: rollout.sampling.max_response_tokens."""


class EvaluationSet(Section):
    """Held-out prompts, how often and how each is answered, and what the answers are worth."""

    name: str
    """What its metrics are called by: eval/<name>/score."""
    data: PromptFile
    sampling: EvaluationSampling = EvaluationSampling()
    samples_per_prompt: Count = 1
    """pass@k is estimated for k = 1, 2, 4, ... up to this."""
    interval: NonNegativeInt | None = None
    """Steps between its evaluations, as evaluation.interval, which null stands for."""
    reward: Reward | None = None
    """A section as reward, whole; null: the run's."""


class KeepBest(Section):
    """Keep the policy of the best evaluation so far in <output_dir>/hf_best."""

    metric: str
    """What is compared, by its name in metrics.jsonl, such as eval/score or eval/<name>/pass@4."""
    mode: Literal["max", "min"] = "max"


class Evaluation(Section):
    """Held-out prompts, answered and scored by a reward function: data.eval, a set that is decoded greedily, and
    `sets`. Off when there is neither. The rollout's engines answer them, and where role evaluation is placed its own,
    beside training and generation."""

    interval: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    sets: tuple[EvaluationSet, ...] = Field(default=(), strict=False)
    """Beside data.eval, a list of {name, data, sampling, samples_per_prompt, interval, reward}."""
    stop_at: float | None = None
    """End training early once stop_metric reaches this: a loss by falling to it, any other metric by rising to it."""
    stop_metric: str | None = None
    """null: the mean score of data.eval, or of the first of `sets` where that is absent. Of held-out rows that nobody
    answers eval/loss with algorithm sft, and eval/accuracy with dpo and reward_model."""
    pass_threshold: float = 0.5
    """A sample counts as passed, in pass@k, where its reward is above this."""
    keep_best: KeepBest | None = None
    logged_prompts: NonNegativeInt | Literal["all"] = 4
    """Of so many prompts of a set, its first ones, each evaluation writes the samples to
    <output_dir>/evaluation_samples."""
    max_waiting: NonNegativeInt = 4
    """Evaluations, beside the one that is under way, whose weights role evaluation keeps on the host until their turn.
    When more are due training waits."""
    engine: Literal["embedded", "sglang"] | None = None
    """Of role evaluation, as all keys from here on: as of section rollout, which null stands for."""
    dtype: Literal["auto", "fp8"] | None = None
    parallel: Parallel | None = None
    max_running_requests: Count | None = None
    max_context_tokens: Count | None = None
    kv_cache_gb: Literal["auto"] | Positive | None = None

    @property
    def engine_keys(self) -> dict[str, Any]:
        """What is said of engines of its own."""
        values = {key: getattr(self, key) for key in ENGINE_KEYS}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def offload(self) -> Offload:
        """Its engines share their ranks with nobody."""
        return False


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation set with everything that it takes from other sections."""

    name: str
    prefix: str
    """Of its metrics."""
    config_key: str
    """Where the set stands, before the keys of its file."""
    file: PromptFile
    sampling: Sampling
    samples_per_prompt: int
    interval: int
    reward: Reward | None
    """null: the run's."""

    def is_due(self, step: int, last_step: int) -> bool:
        """Before the first step, after the last one, and every `interval` steps between."""
        return step in (0, last_step) or (self.interval > 0 and step % self.interval == 0)

    def own_name(self, metric: str) -> str | None:
        """What `metric` is called among those of this set; None where it is another's."""
        name = metric.removeprefix(f"{self.prefix}/")
        is_own = name != metric and ("/" not in name or name.startswith(f"{OF_SOURCES}/"))
        return name if is_own else None

    def reports(self, metric: str) -> bool:
        """Whether `metric` has the form of one of this set's."""
        return self.own_name(metric) is not None


def has_reached(metric: str, value: float, goal: float) -> bool:
    """Returns whether a metric has come to evaluation.stop_at: a loss from above, any other one from below."""
    return value <= goal if metric.endswith("/loss") else value >= goal


def evaluation_plans(evaluation: Evaluation, short_form: PromptFile | None, of_run: Sampling) -> list[EvaluationPlan]:
    """The run's evaluation sets, that of data.eval, `short_form`, first."""
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
    """The section rollout as engines of role evaluation have it."""
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
