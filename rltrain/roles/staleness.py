"""How old the samples of a step were: counts from its chunks, summed over replicas into metrics."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

SUMMED = ("stale_samples", "stale_tokens", "tokens", "staleness_sum")


class StalenessCounts:
    """Of one replica and step; what is counted, rltrain.algorithms.correction says."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest = 0

    def add(self, counts: Mapping[str, int]) -> None:
        """Those of a chunk."""
        self.counts.update({name: counts[name] for name in SUMMED})
        self.longest = max(self.longest, counts["staleness_max"])

    def sums(self) -> Tensor:
        """[4] fp64 to be added up over replicas."""
        return torch.tensor([self.counts[name] for name in SUMMED], dtype=torch.float64)

    @staticmethod
    def metrics(sums: Tensor, longest: int) -> dict[str, float]:
        """From the sums and the maximum over all replicas."""
        stale_samples, stale_tokens, tokens, total = sums.tolist()
        return {
            "stale_samples": stale_samples,
            "stale_tokens": stale_tokens,
            "staleness_mean": total / max(tokens, 1),
            "staleness_max": longest,
        }
