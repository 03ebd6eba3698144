"""Metrics of the rewards of a step or an evaluation."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.algorithms.losses import response_lengths
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.rewards.scorer import Scores, add_mean
from rltrain.tasks.metrics import OF_ALL_REWARDS

FILTER = "dynamic_filter/"
DROPPED, ALL_DROPPED, SPARED = f"{FILTER}drop_", f"{FILTER}dropped", f"{FILTER}kept_at_limit"

FLAT_GROUPS = "flat_groups"
OF_SOURCE = "reward_mean/"
"""Prefix of the mean reward of a source. The source's name follows."""

Record = Mapping[str, Any]
"""A rank's statistics as JSON values."""


class RewardStatistics:
    """The sums over the samples scored by this rank, and the first failure of each function in words.

    Metrics of all samples leave out greedy samples, because these only serve as a baseline. `is_greedy` returns a bool
    tensor of shape [samples]. `counts_flat_groups` adds the share of groups with equal rewards. It needs whole groups.
    """

    def __init__(
        self, is_greedy: Callable[[Experience], Tensor] | None = None, *, counts_flat_groups: bool = False
    ) -> None:
        self.is_greedy, self.counts_flat_groups = is_greedy, counts_flat_groups
        self.sums: Counter[str] = Counter()
        self.means: dict[str, tuple[float, int]] = {}
        """Sum and number of samples, by name of the mean."""
        self.longest = 0.0
        self.first_failures: dict[str, str] = {}
        """First failures, by title of the function."""

    def add(self, experience: Experience, scores: Scores) -> None:
        """Adds samples. `experience` has the rewards of `scores`."""
        greedy = self._greedy(experience)
        if greedy.any():
            of_greedy = experience.rewards[greedy].double()
            add_mean(self.means, "greedy_reward_mean", float(of_greedy.sum()), len(of_greedy))
        experience = self.reported(experience)
        rewards, lengths = experience.rewards.double(), response_lengths(experience).double()
        self.sums.update(
            {
                "samples": len(scores.rewards),
                "reported": len(rewards),
                "rewards": float(rewards.sum()),
                "squares": float(rewards.square().sum()),
                "lengths": float(lengths.sum()),
                "truncated": int(experience.truncated.sum()),
                "reward_unscored": len(scores.skipped),
            }
        )
        if self.counts_flat_groups:
            self.sums.update(_flat_groups(experience))
        if len(lengths):
            self.longest = max(self.longest, float(lengths.max()))
        for title, of_function in scores.by_function.items():
            self.sums.update({"reward_errors": of_function.num_errors, "reward_timeouts": of_function.num_timeouts})
            if title:
                for failures, number in (("errors", of_function.num_errors), ("timeouts", of_function.num_timeouts)):
                    self.sums[f"{prefix(title)}_{failures}"] += number
                num_scored = len(of_function.rewards) - len(of_function.skipped)
                add_mean(self.means, prefix(title), sum(of_function.rewards), num_scored)
            for key, (total, count) in of_function.metrics.items():
                add_mean(self.means, f"{prefix(title)}_{_name_of(key)}", total, count)
            if of_function.first_failure is not None:
                self.first_failures.setdefault(title, of_function.first_failure)

    def add_of(self, dataset: PromptDataset, experience: Experience, scores: Scores) -> None:
        """Adds samples for prompts of a dataset. If the dataset has several sources, adds the rewards of each too."""
        self.add(experience, scores)
        if len(dataset.sources) > 1:
            reported = self.reported(experience)
            sources = [dataset.source_of(row) for row in reported.prompt_ids.tolist()]
            self.add_sources(sources, reported.rewards.tolist())

    def add_dropped(self, groups: Mapping[str, int], num_spared: int) -> None:
        """Adds the numbers of dropped groups by reason, and the number of groups kept because no more
        could be dropped."""
        self.sums.update({f"{DROPPED}{reason}": number for reason, number in groups.items()})
        self.sums.update({ALL_DROPPED: sum(groups.values()), SPARED: num_spared})

    def reported(self, experience: Experience) -> Experience:
        """Returns the samples without greedy ones."""
        greedy = self._greedy(experience)
        return experience.select(torch.nonzero(~greedy).flatten()) if greedy.any() else experience

    def _greedy(self, experience: Experience) -> Tensor:
        if self.is_greedy is None:
            return torch.zeros(experience.num_samples, dtype=torch.bool)
        return self.is_greedy(experience)

    def add_sources(self, sources: Sequence[str], rewards: Sequence[float]) -> None:
        """Adds the rewards of reported samples to the sources of their prompts."""
        for source, reward in zip(sources, rewards, strict=True):
            add_mean(self.means, f"{OF_SOURCE}{source}", reward, 1)

    def record(self) -> Record:
        """Returns the statistics in the form taken by `metrics`."""
        return {"sums": dict(self.sums), "means": self.means, "longest": self.longest}

    @staticmethod
    def sums_of(records: Sequence[Record]) -> Counter[str]:
        total: Counter[str] = Counter()
        for record in records:
            total.update(record["sums"])
        return total

    @classmethod
    def metrics(cls, records: Sequence[Record]) -> dict[str, float]:
        """Returns the metrics for the records of all ranks of the role. Every rank has other samples."""
        sums, totals = cls.sums_of(records), dict[str, tuple[float, int]]()
        for record in records:
            for name, of_rank in record["means"].items():
                add_mean(totals, name, *of_rank)
        count = sums["reported"]
        mean = sums["rewards"] / count
        of_sources = {name: n for name, (_, n) in totals.items() if name.startswith(OF_SOURCE)}
        shares = {f"share/{name.removeprefix(OF_SOURCE)}": number / count for name, number in of_sources.items()}
        counted = {name: number for name, number in sums.items() if name.startswith(("reward_", FILTER))}
        return {
            "reward_mean": mean,
            "reward_std": max(sums["squares"] / count - mean * mean, 0.0) ** 0.5,
            "response_length_mean": sums["lengths"] / count,
            "response_length_max": max(record["longest"] for record in records),
            "truncated_ratio": sums["truncated"] / count,
            **({FLAT_GROUPS: sums[FLAT_GROUPS] / sums["groups"]} if sums["groups"] else {}),
            **shares,
            **counted,
            **{name: total / number for name, (total, number) in totals.items() if number},
        }


def prefix(title: str) -> str:
    """Returns the prefix of the metrics of the function with this title."""
    return f"reward_{title}" if title else "reward"


def is_of_one_function(metric: str) -> bool:
    """Returns whether a metric of `metrics` is of one function, not of the samples or their total rewards."""
    return metric.startswith("reward_") and metric.removeprefix("reward_") not in OF_ALL_REWARDS


def _flat_groups(experience: Experience) -> dict[str, int]:
    """Returns the number of groups with several samples, and the number of these with equal rewards."""
    _, groups, sizes = torch.unique(experience.group_ids, return_inverse=True, return_counts=True)
    rewards = experience.rewards.double()
    least, most = (
        rewards.new_zeros(len(sizes)).scatter_reduce(0, groups, rewards, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    return {"groups": int((sizes > 1).sum()), FLAT_GROUPS: int(((sizes > 1) & (least == most)).sum())}


def _name_of(key: str) -> str:
    """Returns the metric's name for a number reported by a function."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", key)
    return f"{name}_" if name in OF_ALL_REWARDS else name
