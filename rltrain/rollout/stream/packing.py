"""Groups that an engine has drawn, as experience."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.models.routing_shape import RoutingShape
from rltrain.rollout.sample import Sample, SampleGroup, Status


def pack_groups(
    groups: Sequence[SampleGroup], of_chunk: Sequence[int], routing: RoutingShape | None = None
) -> Experience:
    """The samples of `groups`, which are some of those at the positions `of_chunk`, where their group ids are their
    places; with `routing` the experts that an engine has recorded, too. No groups give an experience of no samples."""
    place = {position: index for index, position in enumerate(of_chunk)}
    samples = [sample for group in groups for sample in group.samples]
    routed = {} if routing is None else {"routed_experts": routing.packed(_routed_experts(samples, routing))}
    return Experience(
        **routed,
        sample_ids=_integers(sample.id for sample in samples),
        group_ids=_integers(place[group.position] for group in groups for _ in group.samples),
        prompt_ids=_integers(group.row for group in groups for _ in group.samples),
        lengths=_integers(len(sample.context) for sample in samples),
        truncated=_integers(sample.status == Status.TRUNCATED for sample in samples).bool(),
        tokens=_integers(chain.from_iterable(sample.context for sample in samples)),
        turns=_integers(max(len(sample.turns), 1) for sample in samples).int(),
        response_mask=_of_response(samples, torch.bool, _trained_on),
        policy_version=_of_response(samples, torch.int32, lambda sample: sample.policy_versions),
        rollout_logprobs=_of_response(samples, torch.float32, lambda sample: sample.logprobs),
        turn_rewards=_of_response(samples, torch.float32, _turn_rewards),
    )


def _trained_on(sample: Sample) -> Sequence[bool]:
    """Nothing of a sample whose episode has failed: what it was worth is not known."""
    return [False] * len(sample.tokens) if sample.status == Status.FAILED else sample.loss_mask


def _turn_rewards(sample: Sample) -> Sequence[float]:
    """Each turn's at its last token."""
    rewards = [0.0] * len(sample.tokens)
    for end, reward in zip(sample.turns, sample.turn_rewards, strict=False):
        rewards[end - 1] += reward
    return rewards


def _routed_experts(samples: Sequence[Sample], shape: RoutingShape) -> Tensor:
    """[tokens, layers, top_k]; nothing was recorded of tokens that the engine has not fed, as the last one."""
    experts = shape.unknown(sum(len(sample.context) for sample in samples))
    first = 0
    for sample in samples:
        if sample.routing is not None:
            found = torch.from_numpy(sample.routing.experts)
            experts[first : first + len(found)] = found
        first += len(sample.context)
    return experts


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64)


def _of_response(samples: Sequence[Sample], dtype: torch.dtype, values: Callable[[Sample], Iterable[float]]) -> Tensor:
    """[tokens] with zeros for the prompt."""
    parts = chain.from_iterable(([0] * len(sample.prompt), values(sample)) for sample in samples)
    return torch.tensor([*chain.from_iterable(parts)], dtype=dtype)
