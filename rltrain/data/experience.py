"""Experience: the only type that crosses roles, in as many of its fields as are needed.

Samples are packed end to end, with one row per sample beside them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

SIBLINGS_APART = 2**40
"""Between the sample ids of the trajectories of one episode, of which the first has that of its sample."""

LONG_SAMPLE_TOKENS = 256
"""In the mean, from which samples are copied whole."""

Extent = Literal["sample", "token"]

# What each field holds per element, and whether there is one per sample or one per token.
FIELDS: dict[str, tuple[torch.dtype, Extent]] = {
    "sample_ids": (torch.int64, "sample"),
    "group_ids": (torch.int64, "sample"),
    "prompt_ids": (torch.int64, "sample"),
    "lengths": (torch.int64, "sample"),
    "truncated": (torch.bool, "sample"),
    "turns": (torch.int32, "sample"),
    "rewards": (torch.float32, "sample"),
    "chosen": (torch.bool, "sample"),
    "margins": (torch.float32, "sample"),
    "tokens": (torch.int64, "token"),
    "response_mask": (torch.bool, "token"),
    "policy_version": (torch.int32, "token"),
    "rollout_logprobs": (torch.float32, "token"),
    "turn_rewards": (torch.float32, "token"),
    "actor_logprobs": (torch.float32, "token"),
    "reference_logprobs": (torch.float32, "token"),
    "values": (torch.float32, "token"),
    "advantages": (torch.float32, "token"),
    "returns": (torch.float32, "token"),
    "reward_parts": (torch.float32, "sample"),
    "model_scores": (torch.float32, "sample"),
    "reference_top_ids": (torch.int64, "token"),
    "reference_top_logprobs": (torch.float32, "token"),
    "teacher_logprobs": (torch.float32, "token"),
    "teacher_top_ids": (torch.int64, "token"),
    "teacher_top_logprobs": (torch.float32, "token"),
    "routed_experts": (torch.int8, "token"),
    "weight_means": (torch.float32, "sample"),
    "actor_squares": (torch.float32, "token"),
}

WIDE = frozenset(
    {
        *("reward_parts", "reference_top_ids", "reference_top_logprobs"),
        *("teacher_top_ids", "teacher_top_logprobs", "routed_experts"),
    }
)
"""Fields of several numbers for each sample or token: their tensors have a second dimension."""


def _absent() -> Any:
    return None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Experience:
    """Samples in host memory. `[samples]` and `[tokens]` tensors; a token's log-prob stands at that token's index.

    Prompt tokens have response_mask False and log-probs 0. Samples of one prompt share a group id and stay together.
    Whoever needs a field that is not there yet, or has not travelled along, gets a ValueError that names it.
    """

    group_ids: Tensor
    """[samples] the prompt group's place among those of its chunk of a step; of the step once its chunks are joined."""
    lengths: Tensor
    """[samples] prompt and response tokens."""
    sample_ids: Tensor = field(default_factory=_absent)
    """[samples] a number of its own for every sample of a run."""
    prompt_ids: Tensor = field(default_factory=_absent)
    """[samples] row of the prompt file."""
    truncated: Tensor = field(default_factory=_absent)
    """[samples] the response was cut by the token limit."""
    turns: Tensor = field(default_factory=_absent)
    """[samples] turns of the model; 1 where nothing answers."""
    rewards: Tensor = field(default_factory=_absent)
    chosen: Tensor = field(default_factory=_absent)
    """[samples] of the two samples of a group, the one that was preferred. Where this is there, groups are pairs, whose
    samples a loss compares: they are in one mini-batch and one micro-batch."""
    margins: Tensor = field(default_factory=_absent)
    """[samples] by how much a pair's chosen sample should at least score above the other; the same at both."""
    tokens: Tensor = field(default_factory=_absent)
    response_mask: Tensor = field(default_factory=_absent)
    policy_version: Tensor = field(default_factory=_absent)
    """[tokens] version of the weights that drew the token; 0 for prompt tokens."""
    rollout_logprobs: Tensor = field(default_factory=_absent)
    turn_rewards: Tensor = field(default_factory=_absent)
    """[tokens] at the last token of a turn what its environment gave for it, else 0."""
    actor_logprobs: Tensor = field(default_factory=_absent)
    reference_logprobs: Tensor = field(default_factory=_absent)
    values: Tensor = field(default_factory=_absent)
    """[tokens] the critic's estimate of the reward still to come before the token was drawn."""
    advantages: Tensor = field(default_factory=_absent)
    returns: Tensor = field(default_factory=_absent)
    """[tokens] what the values should have been."""
    reward_parts: Tensor = field(default_factory=_absent)
    """[samples, functions] what each reward function gave, unweighted."""
    model_scores: Tensor = field(default_factory=_absent)
    """[samples] what a model told the reward; NaN where it could not tell."""
    reference_top_ids: Tensor = field(default_factory=_absent)
    """[tokens, k] the tokens that the reference finds likeliest in the token's place; k is 0 where nobody asks."""
    reference_top_logprobs: Tensor = field(default_factory=_absent)
    teacher_logprobs: Tensor = field(default_factory=_absent)
    teacher_top_ids: Tensor = field(default_factory=_absent)
    """As the reference's."""
    teacher_top_logprobs: Tensor = field(default_factory=_absent)
    routed_experts: Tensor = field(default_factory=_absent)
    """[tokens, bytes] the experts that each token visits in all layers, as `models.routing_shape` writes them: in host
    memory wherever the other fields of a micro-batch are. Where this is there routers choose no others."""
    weight_means: Tensor = field(default_factory=_absent)
    """[samples] what loss.correction divides the sample's weights by."""
    actor_squares: Tensor = field(default_factory=_absent)
    """[tokens] sum of the squares of the actor's probabilities of all tokens in the token's place."""

    def __post_init__(self) -> None:
        for name in FIELDS:
            if vars(self)[name] is None:
                del vars(self)[name]

    if not TYPE_CHECKING:  # where it would let any name pass

        def __getattr__(self, name: str) -> NoReturn:
            if name not in FIELDS:
                raise AttributeError(name)
            raise ValueError(f"no {name} in this experience; present: {', '.join(self.present())}")

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def offsets(self) -> Tensor:
        """[samples + 1] where each sample starts in the packed tensors."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def has(self, name: str) -> bool:
        return name in vars(self)

    def present(self) -> tuple[str, ...]:
        """Names of the fields that are there, in declaration order."""
        return tuple(name for name in FIELDS if self.has(name))

    def columns(self) -> dict[str, Tensor]:
        """The fields that are there, by name."""
        return {name: getattr(self, name) for name in self.present()}

    def only(self, names: Iterable[str]) -> "Experience":
        """Of these fields alone, group_ids and lengths among them."""
        return Experience(**{name: getattr(self, name) for name in names})

    def with_fields(self, **values: Tensor) -> "Experience":
        return Experience(**(self.columns() | values))

    def with_fields_of(self, other: "Experience") -> "Experience":
        """With all fields of `other`, which has the same samples in the same order."""
        assert torch.equal(other.group_ids, self.group_ids), "both follow the assignment of groups"
        return self.with_fields(**other.columns())

    def select(self, samples: Tensor) -> "Experience":
        """The samples at these indices [n] int64, in their order."""
        of_tokens = self._token_copier(samples)
        return Experience(
            **{
                name: values[samples] if FIELDS[name][1] == "sample" else of_tokens(values)
                for name, values in self.columns().items()
            }
        )

    def _token_copier(self, samples: Tensor) -> Callable[[Tensor], Tensor]:
        """What copies the tokens of these samples from a field. Long samples are copied whole, those that follow each
        other here as well at once: an index for every token takes ten times as long."""
        if int(self.lengths[samples].sum()) <= LONG_SAMPLE_TOKENS * len(samples):
            index = self.token_index(samples)
            return lambda values: values[index]
        begins = torch.ones(len(samples) + 1, dtype=torch.bool)
        begins[1:-1] = samples.diff() != 1
        ends = self.lengths.cumsum(0)
        first, last = samples[begins[:-1]], samples[begins[1:]]
        runs = [*zip((ends - self.lengths)[first].tolist(), ends[last].tolist(), strict=True)]
        return lambda values: torch.cat([values[start:end] for start, end in runs])

    def token_index(self, samples: Tensor) -> Tensor:
        """[tokens of these samples] where they stand among all tokens, the samples in the order of their indices."""
        starts, lengths = (self.lengths.cumsum(0) - self.lengths)[samples], self.lengths[samples]
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return torch.repeat_interleave(starts, lengths) + within


def join(parts: Iterable[Experience]) -> Experience:
    """The samples of all parts, in order. Every part has the same fields."""
    columns = [part.columns() for part in parts]
    return Experience(**{name: torch.cat([part[name] for part in columns]) for name in columns[0]})


# Which replica gets which prompt group, and which mini-batch which sample: pure functions of all there is.


def assign_groups(group_tokens: Tensor, num_replicas: int, num_blocks: int = 1) -> Tensor:
    """[groups] the data-parallel index of each group: per block, longest first to the least loaded replica.

    `group_tokens` [groups] tokens of every group of a chunk; a block is a run of consecutive groups, so that every
    replica gets its share of each. Ties go to the lower id and index.
    """
    num_groups, tokens = len(group_tokens), group_tokens.tolist()
    replicas = [0] * num_groups
    for block in torch.arange(num_groups).tensor_split(num_blocks):
        loads = [(0, replica) for replica in range(num_replicas)]  # a heap: the lightest first
        for group in sorted(block.tolist(), key=lambda g: (-tokens[g], g)):
            load, lightest = loads[0]
            replicas[group] = lightest
            heapreplace(loads, (load + tokens[group], lightest))
    return torch.tensor(replicas, dtype=torch.int64)


def mini_batch_of(
    groups: Tensor, num_groups: int, samples_per_group: int, num_mini_batches: int, num_blocks: int
) -> Tensor:
    """[samples] the mini-batch of each sample: one of the equal parts, by their place in the group, of the samples of
    one of `num_blocks` equal runs of groups.

    With one block a mini-batch has samples of every group, which makes its gradient less noisy than all samples of a
    few groups would; with as many blocks as mini-batches it has all samples of some. `groups` [samples] are ascending
    numbers below `num_groups`. A group of more or fewer samples than `samples_per_group` is spread over the places of
    as many.
    """
    first = torch.searchsorted(groups, groups)
    sizes = torch.searchsorted(groups, groups, right=True) - first
    place_in_group = (torch.arange(len(groups)) - first) * samples_per_group // sizes
    part = place_in_group * (num_mini_batches // num_blocks) // samples_per_group
    return part * num_blocks + groups * num_blocks // num_groups
