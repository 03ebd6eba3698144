"""How far two models are apart at every stage, and where they part."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.models.table import LOGPROBS
from rltrain.tools.parity.states import Samples, States

THRESHOLDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""By model.dtype: relative differences that nothing but rounding stays below in models of usual depth."""


@dataclass(frozen=True)
class Difference:
    stage: str
    relative: float
    """Norm of the difference over that of the first model's values; not finite where either has values that are not."""
    largest: float
    token: int
    """Where the largest is, counted over all samples end to end."""


@dataclass(frozen=True)
class LogprobDifference:
    """Of tokens given those before them."""

    mean: float
    largest: float
    kl: float
    """Estimated of the second model from the first, as checks.max_kl has it, if the second drew the tokens."""


def differences(first: States, second: States, stages: Sequence[str]) -> list[Difference]:
    """In the order of `stages`, of those that both have."""
    return [_difference(stage, first[stage], second[stage]) for stage in stages if stage in first and stage in second]


def first_beyond(found: Sequence[Difference], threshold: float) -> Difference | None:
    """The first stage that differs by more; a difference that is not finite is more."""
    return next((one for one in found if not one.relative <= threshold), None)


def logprob_difference(first: States, second: States, samples: Samples) -> LogprobDifference:
    follows = torch.cat([torch.arange(len(sample)) < len(sample) - 1 for sample in samples])
    log_ratio = (first[LOGPROBS] - second[LOGPROBS])[follows]
    distance = log_ratio.abs()
    kl = torch.expm1(log_ratio) - log_ratio
    return LogprobDifference(float(distance.mean()), float(distance.max()), float(kl.mean()))


def _difference(stage: str, first: Tensor, second: Tensor) -> Difference:
    by_token = (first - second).abs().view(len(first), -1).amax(1)
    norm = float(first.norm())
    relative = float((first - second).norm()) / (norm or 1.0)
    return Difference(stage, relative, float(by_token.max()), int(by_token.argmax()))
