"""What is reported of the rewards of a step or of an evaluation."""

from collections.abc import Sequence

import torch

from rltrain.algorithms.losses import response_lengths
from rltrain.data.experience import Experience
from rltrain.rewards.scorer import Scores


class RewardStatistics:
    """Sums over the samples that this rank has scored, and the first failure among them, in words."""

    def __init__(self) -> None:
        self.sums = torch.zeros(7, dtype=torch.float64)
        self.longest = torch.zeros((), dtype=torch.float64)
        self.first_failure: str | None = None

    def add(self, experience: Experience, scores: Scores) -> None:
        """`experience` has the rewards of `scores`."""
        rewards, lengths = experience.rewards.double(), response_lengths(experience).double()
        self.sums += torch.tensor(
            [
                len(rewards),
                rewards.sum(),
                rewards.square().sum(),
                lengths.sum(),
                experience.truncated.sum(),
                scores.num_errors,
                scores.num_timeouts,
            ],
            dtype=torch.float64,
        )
        self.first_failure = self.first_failure or scores.first_failure
        if len(lengths):
            self.longest = torch.maximum(self.longest, lengths.max())

    def record(self) -> list[float]:
        """For `metrics`."""
        return [*self.sums.tolist(), float(self.longest)]

    @staticmethod
    def num_samples(records: Sequence[Sequence[float]]) -> int:
        return int(sum(record[0] for record in records))

    @staticmethod
    def metrics(records: Sequence[Sequence[float]]) -> dict[str, float]:
        """From the records of all ranks of the role, each of which has samples of its own."""
        *sums, longest = zip(*records, strict=True)
        count, total, squares, length_total, truncated, errors, timeouts = map(sum, sums)
        mean = total / count
        return {
            "reward_mean": mean,
            "reward_std": max(squares / count - mean * mean, 0.0) ** 0.5,
            "response_length_mean": length_total / count,
            "response_length_max": max(longest),
            "truncated_ratio": truncated / count,
            "reward_errors": errors,
            "reward_timeouts": timeouts,
        }
