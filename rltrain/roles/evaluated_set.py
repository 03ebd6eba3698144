"""An evaluation set as a rank of the reward has it: by what its samples are scored, and what is reported of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rltrain.config.evaluation import EvaluationPlan
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.data.tokenizer import TextDecoder
from rltrain.evaluation.outcomes import metrics_of
from rltrain.rewards.scorer import CombinedScorer
from rltrain.roles.failure_limit import FailureLimit
from rltrain.roles.reward_statistics import is_of_one_function
from rltrain.roles.scorables import Scorables

OF_ALL_SAMPLES = {
    "reward_mean": "score",
    "response_length_mean": "response_length_mean",
    "truncated_ratio": "truncated_ratio",
}
"""What RewardStatistics calls it -> the metric, behind the set's prefix."""


@dataclass(frozen=True)
class Judges:
    """The reward functions of a section of the config."""

    scorer: CombinedScorer
    limit: FailureLimit


class EvaluatedSet:
    """One of the run's evaluation sets; without a reward of its own it is scored by `of_run`."""

    def __init__(
        self,
        plan: EvaluationPlan,
        dataset: PromptDataset,
        decoder: TextDecoder,
        of_run: Judges,
        advance: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.judges = of_run
        if plan.reward is not None:
            scorer = CombinedScorer(plan.reward, advance, plan.config_key.removesuffix("data") + "reward")
            self.judges = Judges(scorer, FailureLimit(scorer.parts, plan.reward))
        self.scorables = Scorables(self.judges.scorer.functions, dataset, decoder, plan.file, plan.config_key)

    def shown(self, experience: Experience, num_prompts: int | Literal["all"]) -> Experience:
        """The samples of the set's first `num_prompts` prompts that are in `experience`."""
        if num_prompts == "all":
            return experience
        return experience.select(torch.nonzero(experience.prompt_ids < num_prompts).flatten())

    def metrics(
        self, of_samples: Mapping[str, float], outcomes: Sequence[Mapping[str, Any]], threshold: float
    ) -> dict[str, float]:
        """From the statistics of all samples, as RewardStatistics has them, and the outcomes of all ranks."""
        shown = {metric: of_samples[name] for name, metric in OF_ALL_SAMPLES.items()}
        shown |= {name: value for name, value in of_samples.items() if is_of_one_function(name)}
        shown |= metrics_of(outcomes, num_samples=self.plan.samples_per_prompt, threshold=threshold)
        return {f"{self.plan.prefix}/{name}": value for name, value in shown.items()}
