"""What a model makes of some samples, at every stage."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.models.table import EMBEDDING, FINAL_NORM, LOGITS, LOGPROBS, stages_of_layer

Samples = tuple[tuple[int, ...], ...]
"""Token ids of each; two or more."""
States = dict[str, Tensor]
"""By stage, fp32 on the host, for the tokens of all samples, end to end: [tokens, values]. Log-probs are [tokens], of
each token's follower, 0 at a sample's last."""
Run = Callable[["Checked", Samples], States]


@dataclass(frozen=True)
class Checked:
    """A checkpoint, and how it is computed with: `model` has its folder and types."""

    model: schema.Model
    device: str

    @property
    def path(self) -> Path:
        return Path(self.model.path)


class Notes:
    """What stages put out, call after call."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, stage: str, hidden: Tensor | tuple[Tensor, ...]) -> None:
        """[..., values]; of several tensors the first."""
        values = hidden[0] if isinstance(hidden, tuple) else hidden
        self._values.setdefault(stage, []).append(values.detach().flatten(0, -2).float().cpu().clone())

    def states(self) -> States:
        return {stage: torch.cat(values) for stage, values in self._values.items()}


def stages(num_layers: int) -> list[str]:
    """In the order of a forward pass."""
    of_layers = [stage for index in range(num_layers) for stage in stages_of_layer(index)]
    return [EMBEDDING, *of_layers, FINAL_NORM, LOGITS, LOGPROBS]


def next_token_logprobs(logits: Tensor, samples: Samples) -> Tensor:
    """[tokens] from logits [tokens, vocabulary] of all samples."""
    parts = []
    for of_sample, tokens in zip(logits.split([len(sample) for sample in samples]), samples, strict=True):
        labels = of_sample.new_tensor(tokens[1:]).long()[:, None]
        parts += [of_sample[:-1].log_softmax(-1).gather(1, labels)[:, 0], of_sample.new_zeros(1)]
    return torch.cat(parts)
