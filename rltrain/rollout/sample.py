"""A sample: one response on its way from a prompt to training, in every state of it; and the samples of one prompt.

Engines draw samples, the stream groups them, checkpoints of the rollout hold them, packing makes experience of them.

What is numbered, and by which name:

- `position`: a group's place in the stream of all prompts of a run;
- `row`: the prompt's place in the prompt file, which comes up again in every epoch (`prompt_ids` of an Experience);
- `id`: a sample's own number in the stream, position * samples_per_prompt + 0, 1, ... (`sample_ids`); further
  trajectories of its episode, where it has several, are SIBLINGS_APART;
- `group_ids`, of an Experience alone: a group's place among those of its chunk, by position; `pack_groups` makes them.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.models.routing_shape import RoutingShape

# Seeds of samples: pure functions of what is drawn, never of where.

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """The splitmix64 finaliser: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_seed(seed: int, step: int, row: int, sample: int) -> int:
    """Seed of one response, in [0, 2**63): the same on every rank and in every engine."""
    state = 0
    for part in (seed, step, row, sample):
        state = mix64((state + _GOLDEN + part) & _MASK)
    return state >> 1


# Which experts an engine routed the tokens of a sample to.


def _written(experts: np.ndarray) -> tuple[tuple[int, ...], str, str]:
    """For JSON; the inverse is `_read`."""
    return experts.shape, experts.dtype.str, base64.b64encode(experts.tobytes()).decode()


def _read(written: Any) -> np.ndarray:
    shape, kind, values = written
    experts: np.ndarray = np.frombuffer(base64.b64decode(values), dtype=kind).reshape(shape)
    return experts


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """Of the first tokens of a sample's context, in each layer that has experts: `experts` [tokens, layers, top_k] int8
    or int16.

    Each token's is of the forward pass that fed it for the first time: what follows it was drawn by that. Where keys
    and values are given up and computed anew, under other weights perhaps, what was recorded stays.
    """

    experts: Annotated[np.ndarray, PlainValidator(_read), PlainSerializer(_written, when_used="json")]

    def __len__(self) -> int:
        """Tokens."""
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedRouting) and np.array_equal(self.experts, other.experts)

    def __hash__(self) -> int:
        return hash(self.experts.shape)

    def followed_by(self, other: "RecordedRouting") -> "RecordedRouting":
        """Of the tokens of both."""
        return RecordedRouting(np.concatenate([self.experts, other.experts]))

    def first(self, num_tokens: int) -> "RecordedRouting":
        """Of no more than so many tokens."""
        return RecordedRouting(self.experts[:num_tokens])


class Status(IntEnum):
    """How far a sample has come; the numbers stand in files."""

    PENDING = 0
    """There is more to draw."""
    STOPPED = 1
    """A stop token or a stop string ended it."""
    TRUNCATED = 2
    """It was cut by the limit on tokens."""
    ABORTED = 3
    """It was given up before its end, by a limit of time or turns say."""
    FAILED = 4
    """What it was drawn for failed: its environment, say."""


@dataclass(frozen=True)
class Sample:
    """A prompt and as much of its response as exists. `seed` fixes its random numbers, whichever engine or batch it is
    in. `tokens`, `logprobs`, `policy_versions` and `loss_mask` have one entry per token of the response.

    A pending sample goes on after its tokens as if it had never stopped: prompt and tokens are its context, the next
    token takes the next random number, and limits on the response count the tokens that exist.

    A conversation is a sample whose model draws several turns: whoever answers one adds the answer by `observed`, and
    the next turn follows.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of the tempered but untruncated distribution (temperature 1 when greedy): what training recomputes."""
    policy_versions: tuple[int, ...] = ()
    """The engine's at the decode step that drew the token, 0 for one that was observed: weights may change within a
    response."""
    loss_mask: tuple[bool, ...] = ()
    """Whether the model drew the token: only those are trained on."""
    status: Status = Status.PENDING
    turns: tuple[int, ...] = ()
    """Of each turn that has ended how many tokens there were then: its last token stands before that index."""
    turn_rewards: tuple[float, ...] = ()
    """Of the first turns; what has none yet stands behind."""
    turn_limit: int | None = None
    """The response may have so many tokens at the end of the present turn; None: no limit of the turn's own."""
    goes_on: bool = False
    """Whether it may come back to an engine after the present turn, which keeps its keys and values if it can."""
    parent: int | None = None
    """The trajectory of the same episode from which this one branched, by id."""
    routing: RecordedRouting | None = None
    """Of the tokens that an engine which records it has fed: the last one drawn is not among them."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions) == len(self.loss_mask):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.logprobs)} logprobs, {len(self.policy_versions)} "
                f"policy_versions and {len(self.loss_mask)} entries of loss_mask; expected one of each per token"
            )
        if len(self.turn_rewards) > len(self.turns):
            raise ValueError(f"{len(self.turn_rewards)} turn_rewards for {len(self.turns)} turns that have ended")

    @property
    def is_finished(self) -> bool:
        return self.status != Status.PENDING

    @property
    def episode(self) -> int:
        """The id of its episode's first trajectory."""
        return self.id % SIBLINGS_APART

    @property
    def waits(self) -> bool:
        """Whether its last turn has yet to be answered, of a conversation that is pending."""
        return not self.is_finished and len(self.turn_rewards) < len(self.turns)

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response tokens."""
        return self.prompt + self.tokens

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """What the model has drawn of the present turn: the tokens after the last turn and what was observed then."""
        return self._turn_within(self.turns[-1] if self.turns else 0, len(self.tokens))

    @property
    def last_turn(self) -> tuple[int, ...]:
        """What the model drew in the turn that ended last."""
        previous, end = (0, *self.turns)[-2:] if self.turns else (0, 0)
        return self._turn_within(previous, end)

    def _turn_within(self, begin: int, end: int) -> tuple[int, ...]:
        """Of the tokens from `begin` to `end` those behind what was observed."""
        observed = next((i for i in range(end, begin, -1) if not self.loss_mask[i - 1]), begin)
        return self.tokens[observed:end]

    def drawn(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
        status: Status = Status.PENDING,
    ) -> "Sample":
        """With these tokens after those that it has, all drawn by the model. Any status but pending ends a turn."""
        num_tokens = len(self.tokens) + len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            logprobs=(*self.logprobs, *logprobs),
            policy_versions=(*self.policy_versions, *policy_versions),
            loss_mask=(*self.loss_mask, *[True] * len(tokens)),
            status=status,
            turns=self.turns if status == Status.PENDING else (*self.turns, num_tokens),
        )

    def routed(self, experts: np.ndarray) -> "Sample":
        """With the routing of tokens that follow those whose routing it has."""
        new = RecordedRouting(experts)
        return replace(self, routing=self.routing.followed_by(new) if self.routing else new)

    def observed(self, tokens: Sequence[int], *, turn_limit: int | None = None) -> "Sample":
        """Pending, with these tokens after those that it has, none drawn by the model: what an environment answered.
        `turn_limit` is the next turn's."""
        count = len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            logprobs=(*self.logprobs, *[0.0] * count),
            policy_versions=(*self.policy_versions, *[0] * count),
            loss_mask=(*self.loss_mask, *[False] * count),
            status=Status.PENDING,
            turn_limit=turn_limit,
        )

    def first(self, num_tokens: int) -> "Sample":
        """Pending, with so many tokens of the response, and the turns that ended before."""
        turns = tuple(end for end in self.turns if end < num_tokens)
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            policy_versions=self.policy_versions[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            status=Status.PENDING,
            turns=turns,
            turn_rewards=self.turn_rewards[: len(turns)],
            routing=self.routing and self.routing.first(len(self.prompt) + num_tokens),
        )


@dataclass(frozen=True)
class SampleGroup:
    """The samples of one prompt."""

    position: int
    row: int
    samples: tuple[Sample, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.samples[0].prompt

    @property
    def pending(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.is_finished]

    @property
    def is_finished(self) -> bool:
        return not self.pending

    @property
    def num_tokens(self) -> int:
        """Of prompts and responses."""
        return sum(len(sample.context) for sample in self.samples)

    @property
    def num_response_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def updated(self, samples: Iterable[Sample]) -> "SampleGroup":
        """With `samples` in the place of those of the same ids, and behind them those of new ids."""
        new = {sample.id: sample for sample in samples}
        kept = [new.pop(sample.id, sample) for sample in self.samples]
        return replace(self, samples=(*kept, *new.values()))

    def trajectories(self, episode: int) -> tuple[Sample, ...]:
        """Those of the episode."""
        return tuple(sample for sample in self.samples if sample.episode == episode)

    def without_siblings(self, episode: int) -> "SampleGroup":
        """The first trajectory of the episode alone, and all other episodes."""
        return replace(self, samples=tuple(s for s in self.samples if s.episode != episode or s.id == episode))


# Groups that an engine has drawn, as experience.


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
