"""Experience: the only type that crosses roles. Samples are packed end to end, with one row per sample beside them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

Extent = Literal["sample", "token"]
Columns = dict[str, Tensor]

# What each field holds per element, and whether there is one per sample or one per token.
FIELDS: dict[str, tuple[torch.dtype, Extent]] = {
    "sample_ids": (torch.int64, "sample"),
    "group_ids": (torch.int64, "sample"),
    "prompt_ids": (torch.int64, "sample"),
    "lengths": (torch.int64, "sample"),
    "truncated": (torch.bool, "sample"),
    "rewards": (torch.float32, "sample"),
    "tokens": (torch.int64, "token"),
    "response_mask": (torch.bool, "token"),
    "policy_version": (torch.int32, "token"),
    "rollout_logprobs": (torch.float32, "token"),
    "actor_logprobs": (torch.float32, "token"),
    "reference_logprobs": (torch.float32, "token"),
    "values": (torch.float32, "token"),
    "advantages": (torch.float32, "token"),
    "returns": (torch.float32, "token"),
}


@dataclass(frozen=True)
class Experience:
    """Samples in host memory. `[samples]` and `[tokens]` tensors; a token's log-prob stands at that token's index.

    Prompt tokens have response_mask False and log-probs 0. Samples of one prompt share a group id and stay together.
    """

    sample_ids: Tensor
    """[samples] a number of its own for every sample of a run."""
    group_ids: Tensor
    """[samples] the prompt group of this step, 0 .. prompts_per_step - 1."""
    prompt_ids: Tensor
    """[samples] row of the prompt file."""
    lengths: Tensor
    """[samples] prompt and response tokens."""
    truncated: Tensor
    """[samples] the response was cut by the token limit."""
    tokens: Tensor
    response_mask: Tensor
    policy_version: Tensor
    """[tokens] version of the weights that drew the token; 0 for prompt tokens."""
    rollout_logprobs: Tensor
    rewards: Tensor | None = None
    actor_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    """[tokens] the critic's estimate of the reward still to come before the token was drawn."""
    advantages: Tensor | None = None
    returns: Tensor | None = None
    """[tokens] what the values should have been."""

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def offsets(self) -> Tensor:
        """[samples + 1] where each sample starts in the packed tensors."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def present(self) -> tuple[str, ...]:
        """Names of the fields that are set, in declaration order."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def with_fields(self, **values: Tensor) -> "Experience":
        return replace(self, **values)

    def columns(self) -> Columns:
        """The fields that are set, by name."""
        return {name: getattr(self, name) for name in self.present()}

    def select(self, samples: Tensor) -> "Experience":
        """The samples at these indices [n] int64, in their order."""
        return Experience(**take(self.columns(), samples))


def take(columns: Mapping[str, Tensor], samples: Tensor) -> Columns:
    """The samples at these indices [n] int64, in their order. `columns` holds some fields, "lengths" among them."""
    all_lengths = columns["lengths"]
    starts, lengths = (all_lengths.cumsum(0) - all_lengths)[samples], all_lengths[samples]
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    token_index = torch.repeat_interleave(starts, lengths) + within
    return {name: values[samples if FIELDS[name][1] == "sample" else token_index] for name, values in columns.items()}


def join(parts: Iterable[Mapping[str, Tensor]]) -> Columns:
    """The samples of all parts, in order. Every part has the same fields."""
    parts = list(parts)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
