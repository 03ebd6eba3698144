"""Groups that an engine has drawn, as experience."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.rollout.engine import Completion
from rltrain.rollout.stream.groups import FinishedGroup

Sample = tuple[FinishedGroup, int, Completion]
"""A completion with its group and the group's id."""


def pack_groups(groups: Sequence[FinishedGroup], group_ids: Sequence[int]) -> Experience:
    """The samples of `groups`, under these ids. No groups give an experience of no samples."""
    samples = [
        (group, group_id, completion)
        for group, group_id in zip(groups, group_ids, strict=True)
        for completion in group.completions
    ]
    return Experience(
        sample_ids=_per_sample(samples, lambda group, group_id, completion: completion.id),
        group_ids=_per_sample(samples, lambda group, group_id, completion: group_id),
        prompt_ids=_per_sample(samples, lambda group, group_id, completion: group.row),
        lengths=_per_sample(samples, lambda group, group_id, completion: len(group.prompt) + len(completion.tokens)),
        truncated=_per_sample(samples, lambda _, __, completion: completion.finish_reason == "length").bool(),
        tokens=_per_token(samples, torch.int64, lambda group, completion: (group.prompt, completion.tokens)),
        response_mask=_response(samples, torch.bool, lambda completion: [True] * len(completion.tokens)),
        policy_version=_response(samples, torch.int32, lambda completion: completion.policy_versions),
        rollout_logprobs=_response(samples, torch.float32, lambda completion: completion.logprobs),
    )


def _per_sample(samples: Sequence[Sample], value: Callable[[FinishedGroup, int, Completion], int]) -> Tensor:
    return torch.tensor([value(*sample) for sample in samples], dtype=torch.int64)


def _per_token(
    samples: Sequence[Sample],
    dtype: torch.dtype,
    values: Callable[[FinishedGroup, Completion], tuple[Iterable[float], Iterable[float]]],
) -> Tensor:
    """[tokens] of prompt and response of every sample."""
    parts = chain.from_iterable(values(group, completion) for group, _, completion in samples)
    return torch.tensor(list(chain.from_iterable(parts)), dtype=dtype)


def _response(samples: Sequence[Sample], dtype: torch.dtype, values: Callable[[Completion], Iterable[float]]) -> Tensor:
    """[tokens] with zeros for the prompt."""
    return _per_token(samples, dtype, lambda group, completion: ([0] * len(group.prompt), values(completion)))
