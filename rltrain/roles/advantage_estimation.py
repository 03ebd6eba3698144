"""From scored samples to advantages: what of it concerns a whole step, and what is reported of it."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from rltrain.algorithms.advantages import (
    KlCoefficient,
    mean_kl_sums,
    num_truncated,
    overlong_penalties,
    response_kl,
    without_truncated,
)
from rltrain.algorithms.algorithm import Algorithm
from rltrain.algorithms.kl import with_teacher_advantages
from rltrain.data.experience import Experience
from rltrain.roles.role import Metrics

SUMMED = ("samples", "overlong_samples", "overlong_penalty", "masked_truncated")


class AdvantageEstimation:
    """Of one replica of the actor. `shaped` a chunk's samples, then, of what is left of them to train on,
    `with_advantages`; a step's first chunk begins new counts. `kl` is equal on all replicas."""

    def __init__(self, algorithm: Algorithm, kl_coef: float | None = None) -> None:
        """`kl_coef` is where an adaptive coefficient was in the run that goes on."""
        self.algorithm, config = algorithm, algorithm.config
        self.settings = config.advantages
        self.max_response_tokens = config.rollout.sampling.max_response_tokens
        self.kl = KlCoefficient(config.loss.kl, config.loss.kl.coef if kl_coef is None else kl_coef)
        self.begin_step()

    def begin_step(self) -> None:
        self.counts: dict[str, float] = defaultdict(float)
        self.kl_sums = torch.zeros(2, dtype=torch.float64)

    def shaped(self, experience: Experience) -> Experience:
        """The samples that are to be trained on, with rewards as the config shapes them. Whole as they were drawn."""
        if self.settings.overlong_penalty is not None:
            penalties = overlong_penalties(experience, self.settings.overlong_penalty, self.max_response_tokens)
            rewards = experience.rewards + penalties.to(experience.rewards.dtype)
            experience = experience.with_fields(rewards=rewards)
            self.counts["overlong_samples"] += int((penalties < 0).sum())
            self.counts["overlong_penalty"] += float(penalties.sum())
        self.counts["samples"] += experience.num_samples
        return self.algorithm.compared_with_greedy(experience)

    def with_advantages(self, experience: Experience) -> Experience:
        """Ready for the loss. What is out of the response mask counts nowhere."""
        penalty = None
        if self.algorithm.penalizes_reward():
            token_kl = response_kl(experience, self.kl.settings)
            self.kl_sums += mean_kl_sums(experience, token_kl)
            penalty = -self.kl.coef * token_kl
        experience = self.algorithm.with_advantages(experience, penalty)
        teacher = self.algorithm.config.teacher
        if experience.has("teacher_logprobs") and teacher.where == "advantage":
            experience = with_teacher_advantages(experience, teacher.coef, teacher.max_distance)
        if self.settings.mask_truncated:
            self.counts["masked_truncated"] += num_truncated(experience)
            experience = without_truncated(experience)
        return experience

    def end_step(self, total: Callable[[Tensor], Tensor]) -> Metrics:
        """What is reported of the step, after which the coefficient is the next one's; `total` adds up a tensor over
        all replicas. Collective over: the actor's ranks, unless there is nothing to report."""
        penalizes = self.algorithm.penalizes_reward()
        if not penalizes and self.settings.overlong_penalty is None and not self.settings.mask_truncated:
            return {}
        sums = torch.tensor([self.counts[name] for name in SUMMED], dtype=torch.float64)
        *counts, kl_sum, num_responses = total(torch.cat([sums, self.kl_sums])).tolist()
        return {**self._counted(dict(zip(SUMMED, counts, strict=True))), **self._adapted(kl_sum, num_responses)}

    def _counted(self, sums: dict[str, float]) -> Metrics:
        metrics = {}
        if self.settings.overlong_penalty is not None:
            metrics["overlong_samples"] = sums["overlong_samples"]
            metrics["overlong_penalty"] = sums["overlong_penalty"] / max(sums["samples"], 1)
        if self.settings.mask_truncated:
            metrics["masked_truncated"] = sums["masked_truncated"]
        return metrics

    def _adapted(self, kl_sum: float, num_responses: float) -> Metrics:
        if not self.algorithm.penalizes_reward():
            return {}
        reward_kl, coef = kl_sum / max(num_responses, 1), self.kl.coef
        self.kl.after(reward_kl, num_responses)
        return {"reward_kl": reward_kl, "kl_coef": coef}
