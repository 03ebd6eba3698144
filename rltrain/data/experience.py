"""Experience: the only type that roles exchange, with as many fields as are needed.

Samples are packed end to end. Other fields have one row per sample.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

SIBLINGS_APART = 2**40
"""Distance between the sample ids of an episode's trajectories. The first trajectory has the id of its sample."""

LONG_SAMPLE_TOKENS = 256
"""Mean length from which samples are copied whole."""

Extent = Literal["sample", "token"]

# The dtype of each field, and whether it has one entry per sample or per token.
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
    "image_keys": (torch.int64, "token"),
    "rope_positions": (torch.int32, "token"),
}

WIDE = frozenset(
    {
        *("reward_parts", "reference_top_ids", "reference_top_logprobs"),
        *("teacher_top_ids", "teacher_top_logprobs", "routed_experts", "rope_positions"),
    }
)
"""Fields with several numbers per sample or token. Their tensors have a second dimension."""


def _absent() -> Any:
    return None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Experience:
    """A batch of samples in host memory, as tensors of shape [samples] or [tokens]. A token's log-prob is at its index.

    Prompt tokens have response_mask False and log-probs 0. Samples of one prompt share a group id and stay together.
    Reading an absent field raises ValueError with its name.
    """

    group_ids: Tensor
    """Number of the prompt group within its chunk, or within the step once chunks are joined. Shape [samples]."""
    lengths: Tensor
    """Prompt and response tokens, shape [samples]."""
    sample_ids: Tensor = field(default_factory=_absent)
    """Number of the sample, unique in a run, shape [samples]."""
    prompt_ids: Tensor = field(default_factory=_absent)
    """Row of the prompt file, shape [samples]."""
    truncated: Tensor = field(default_factory=_absent)
    """Whether the token limit cut the response, shape [samples]."""
    turns: Tensor = field(default_factory=_absent)
    """Turns of the model, shape [samples]. 1 without an environment."""
    rewards: Tensor = field(default_factory=_absent)
    chosen: Tensor = field(default_factory=_absent)
    """Whether the sample is the preferred one of its pair, shape [samples].

    With this field groups are pairs, and a loss compares their samples. Both are in one mini-batch and one micro-batch.
    """
    margins: Tensor = field(default_factory=_absent)
    """Margin by which a pair's chosen sample should outscore the other, shape [samples]. Equal at both."""
    tokens: Tensor = field(default_factory=_absent)
    response_mask: Tensor = field(default_factory=_absent)
    policy_version: Tensor = field(default_factory=_absent)
    """Version of the weights that generated the token, shape [tokens]. 0 for prompt tokens."""
    rollout_logprobs: Tensor = field(default_factory=_absent)
    turn_rewards: Tensor = field(default_factory=_absent)
    """The environment's reward of a turn at the turn's last token, else 0. Shape [tokens]."""
    actor_logprobs: Tensor = field(default_factory=_absent)
    reference_logprobs: Tensor = field(default_factory=_absent)
    values: Tensor = field(default_factory=_absent)
    """The critic's estimate, before the token, of the reward still to come. Shape [tokens]."""
    advantages: Tensor = field(default_factory=_absent)
    returns: Tensor = field(default_factory=_absent)
    """The targets of the values, shape [tokens]."""
    reward_parts: Tensor = field(default_factory=_absent)
    """The unweighted reward of each function, shape [samples, functions]."""
    model_scores: Tensor = field(default_factory=_absent)
    """A model's score for the reward, shape [samples]. NaN if it has none."""
    reference_top_ids: Tensor = field(default_factory=_absent)
    """The reference's likeliest tokens in the token's place, shape [tokens, k]. k is 0 if they are not needed."""
    reference_top_logprobs: Tensor = field(default_factory=_absent)
    teacher_logprobs: Tensor = field(default_factory=_absent)
    teacher_top_ids: Tensor = field(default_factory=_absent)
    """The teacher's likeliest tokens, like the reference's."""
    teacher_top_logprobs: Tensor = field(default_factory=_absent)
    routed_experts: Tensor = field(default_factory=_absent)
    """The experts of each token in all layers, shape [tokens, bytes], in the format of `models.routing_shape`.

    They are in host memory even if the other fields of a micro-batch are on the device. With this field routers choose
    no other experts.
    """
    weight_means: Tensor = field(default_factory=_absent)
    """Divisor of the sample's weights of loss.correction, shape [samples]."""
    actor_squares: Tensor = field(default_factory=_absent)
    """Sum of the squared probabilities that the actor gives to all tokens in the token's place, shape [tokens]."""
    image_keys: Tensor = field(default_factory=_absent)
    """The key of the token's image in the image store, or 0 for text, shape [tokens]. Only runs with model.vision have
    this field and the next."""
    rope_positions: Tensor = field(default_factory=_absent)
    """Frame, row and column of the token for rotary embeddings, shape [tokens, 3] (models.rope_positions)."""

    def __post_init__(self) -> None:
        for name in FIELDS:
            if vars(self)[name] is None:
                del vars(self)[name]

    if not TYPE_CHECKING:  # type checkers would accept any name

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
        """Returns the start of each sample in the packed tensors, shape [samples + 1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def has(self, name: str) -> bool:
        return name in vars(self)

    def present(self) -> tuple[str, ...]:
        """Returns the names of the present fields, in declaration order."""
        return tuple(name for name in FIELDS if self.has(name))

    def columns(self) -> dict[str, Tensor]:
        """Returns the present fields by name."""
        return {name: getattr(self, name) for name in self.present()}

    def only(self, names: Iterable[str]) -> "Experience":
        """Returns the experience with only these fields. They must include group_ids and lengths."""
        return Experience(**{name: getattr(self, name) for name in names})

    def with_fields(self, **values: Tensor) -> "Experience":
        return Experience(**(self.columns() | values))

    def with_fields_of(self, other: "Experience") -> "Experience":
        """Returns the experience with all fields of `other`. It must have the same samples in the same order."""
        assert torch.equal(other.group_ids, self.group_ids), "both follow the assignment of groups"
        return self.with_fields(**other.columns())

    def select(self, samples: Tensor) -> "Experience":
        """Returns the samples at these indices, in their order. `samples` is int64 of shape [n]."""
        of_tokens = self._token_copier(samples)
        return Experience(
            **{
                name: values[samples] if FIELDS[name][1] == "sample" else of_tokens(values)
                for name, values in self.columns().items()
            }
        )

    def _token_copier(self, samples: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns a function that copies the tokens of these samples from a field.

        Long samples are copied whole, and consecutive ones in one piece. An index for every token takes ten times as
        long.
        """
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
        """Returns the places of these samples' tokens among all tokens, shape [tokens of these samples]."""
        starts, lengths = (self.lengths.cumsum(0) - self.lengths)[samples], self.lengths[samples]
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        return torch.repeat_interleave(starts, lengths) + within


def join(parts: Iterable[Experience]) -> Experience:
    """Returns the samples of all parts, in order. Every part must have the same fields."""
    columns = [part.columns() for part in parts]
    return Experience(**{name: torch.cat([part[name] for part in columns]) for name in columns[0]})


# The replica of each prompt group and the mini-batch of each sample. Both are pure functions of the whole batch.


def assign_groups(group_tokens: Tensor, num_replicas: int, num_blocks: int = 1) -> Tensor:
    """Returns the data-parallel index of each group, shape [groups].

    In each block the longest group comes first and goes to the least loaded replica. `group_tokens` has the tokens of
    every group of a chunk, shape [groups]. A block is a run of consecutive groups, so every replica gets its share of
    each block. Ties go to the lower id and index.
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
    """Returns the mini-batch of each sample, shape [samples].

    Groups are divided into `num_blocks` equal runs. The samples of a run are divided into equal mini-batches by their
    place in the group. With one block a mini-batch has samples of every group. This makes its gradient less noisy than
    one of all samples of a few groups. With as many blocks as mini-batches a mini-batch has all samples of some groups.

    `groups` are ascending numbers below `num_groups`, shape [samples]. A group with more or fewer samples than
    `samples_per_group` is spread over this number of places.
    """
    first = torch.searchsorted(groups, groups)
    sizes = torch.searchsorted(groups, groups, right=True) - first
    place_in_group = (torch.arange(len(groups)) - first) * samples_per_group // sizes
    part = place_in_group * (num_mini_batches // num_blocks) // samples_per_group
    return part * num_blocks + groups * num_blocks // num_groups
