"""What an optimizer step knows of its mini-batch beside the gradients, and when a step is left out."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.losses import LossOutput
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError, DivergenceError

# Beside the metrics of a mini-batch while they are reduced.
NUM_SAMPLES, DIVISOR = "num_samples", "divisor"


class Pending:
    """What was accumulated since the last optimizer step."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.response_tokens = 0
        self.num_parts = 0
        self.outputs: list[LossOutput] = []

    def count(self, experience: Experience) -> None:
        """A part with these samples begins."""
        self.num_samples += experience.num_samples
        self.response_tokens += int(experience.response_mask.sum())

    def reduced(self, replicas: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
        """The mini-batch's metrics with NUM_SAMPLES and DIVISOR. Collective over: the data-parallel group."""
        first = self.outputs[0]
        counts = torch.tensor([self.num_samples, self.response_tokens], dtype=torch.float64, device=device)
        rows = [(o.divisor, o.loss, *o.sums.values(), *o.token_sums.values()) for o in self.outputs]
        totals = torch.cat([counts, _scalars(rows, device).sum(0)])
        dist.all_reduce(totals, group=replicas)
        num_samples, response_tokens, divisor, *sums = totals.tolist()
        divisors = [divisor] * (1 + len(first.sums)) + [response_tokens] * len(first.token_sums)
        means = [total / (by or 1) for total, by in zip(sums, divisors, strict=True)]
        metrics = dict(zip(["loss", *first.sums, *first.token_sums], means, strict=True))
        if first.maxima:
            maxima = _scalars([tuple(o.maxima.values()) for o in self.outputs], device).amax(0)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=replicas)
            metrics |= dict(zip(first.maxima, maxima.tolist(), strict=True))
        return metrics | {NUM_SAMPLES: num_samples, DIVISOR: divisor}


class SkippedSteps:
    """Counts optimizer steps in a row that were left out. `role` is for messages."""

    def __init__(self, role: str, max_skipped: int) -> None:
        self.role, self.max_skipped, self.num_skipped = role, max_skipped, 0

    def require_samples(self, num_samples: float, update: int, num_replicas: int) -> None:
        """ConfigError where optimizer step `update` has no sample on any replica."""
        if not num_samples:
            raise ConfigError(
                f"optimizer step {update} of the {self.role} has no sample on any of its {num_replicas} data-parallel "
                "ranks; raise batch.prompts_per_step or lower batch.mini_batches"
            )

    def is_to_skip(self, what: str, value: float, update: int) -> bool:
        """Whether the optimizer step is to be left out because of this. DivergenceError where too many were."""
        if math.isfinite(value):
            return False
        if self.num_skipped < self.max_skipped:
            return True
        before = ""
        if self.num_skipped:
            before = f", after {self.num_skipped} in a row that were skipped (on_divergence.max_skipped)"
        raise DivergenceError(
            f"the {self.role}'s {what} is {value} at optimizer step {update}{before}; its weights were left "
            f"as they were. Lower {self.role}.optimizer.lr, or look at this step's rewards and log-probs."
        )

    def count(self, *, is_skipped: bool) -> None:
        self.num_skipped = self.num_skipped + 1 if is_skipped else 0


def _scalars(rows: list[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """[rows, columns] fp64."""
    values = [value.detach().to(device, torch.float64) for row in rows for value in row]
    return torch.stack(values).view(len(rows), -1)
