"""Samples and prompt groups of the rollout. A sample is one prompt with its response, from the first token to training.

Engines generate samples, the generation loop groups them, checkpoints store them, and `pack_groups` makes experience of
them. Their numbers have these names:

- `position`: a group's place in the stream of all prompts of a run.
- `row`: the prompt's line in the prompt file, repeated in every epoch (`prompt_ids` in an Experience).
- `id`: the sample's number in the stream, position * samples_per_prompt + 0, 1, ... (`sample_ids`). Further
  trajectories of an episode add multiples of SIBLINGS_APART.
- `group_ids`, only in an Experience: a group's place among the groups of its chunk, by position. Made by `pack_groups`.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, compress, count
from operator import ne
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from rltrain.data.experience import SIBLINGS_APART, Experience
from rltrain.models.rope_positions import image_fields
from rltrain.models.routing_shape import RoutingShape
from rltrain.models.vision import PlacedImage

# Seeds of samples. They depend on the sample alone, not on its engine.

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Applies the splitmix64 finaliser, a bijection of 64-bit integers. Every input bit affects every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def request_seed(seed: int, step: int, row: int, sample: int) -> int:
    """Returns the seed of one response, in [0, 2**63). It is the same on every rank and in every engine."""
    state = 0
    for part in (seed, step, row, sample):
        state = mix64((state + _GOLDEN + part) & _MASK)
    return state >> 1


# Expert choices recorded by an engine.


def _written(experts: np.ndarray) -> tuple[tuple[int, ...], str, str]:
    """Encodes expert ids for JSON. The inverse is `_read`."""
    return experts.shape, experts.dtype.str, base64.b64encode(experts.tobytes()).decode()


def _read(written: Any) -> np.ndarray:
    shape, kind, values = written
    experts: np.ndarray = np.frombuffer(base64.b64decode(values), dtype=kind).reshape(shape)
    return experts


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """The experts chosen for the first tokens of a sample's context, as recorded by the engine.

    `experts` has shape [tokens, layers, top_k] and dtype int8 or int16. It covers the layers with experts.

    A token's record comes from the first forward pass over it, because its next token was sampled from that pass. The
    record stays if keys and values are dropped and recomputed later, even under other weights.
    """

    experts: Annotated[np.ndarray, PlainValidator(_read), PlainSerializer(_written, when_used="json")]

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedRouting) and np.array_equal(self.experts, other.experts)

    def __hash__(self) -> int:
        return hash(self.experts.shape)

    def followed_by(self, other: "RecordedRouting") -> "RecordedRouting":
        """Returns the routing of this one's tokens followed by those of `other`."""
        return RecordedRouting(np.concatenate([self.experts, other.experts]))

    def first(self, num_tokens: int) -> "RecordedRouting":
        """Returns the routing of at most the first `num_tokens` tokens."""
        return RecordedRouting(self.experts[:num_tokens])


class Status(IntEnum):
    """State of a sample. The numbers are part of file formats."""

    PENDING = 0
    """There are more tokens to generate."""
    STOPPED = 1
    """A stop token or a stop string ended it."""
    TRUNCATED = 2
    """A limit on tokens ended it."""
    ABORTED = 3
    """It was given up early, for example at a limit of time or turns."""
    FAILED = 4
    """Its environment or another part of its generation failed."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the response tokens generated so far. `seed` fixes the random numbers, in any engine and batch.

    `tokens`, `logprobs`, `policy_versions` and `loss_mask` have one entry per token of the response.

    A pending sample continues after its tokens as if it had never stopped. Prompt and tokens are its context, the next
    token takes the next random number, and existing tokens count towards the limits of the response.

    A conversation is a sample with several turns of the model. The answer to a turn is added by `observed`, and the
    next turn follows it.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-probs under the tempered but untruncated distribution (temperature 1 when greedy), as recomputed in
    training."""
    policy_versions: tuple[int, ...] = ()
    """The engine's policy version at the decode step of each token, 0 for observed tokens. It can change within a
    response."""
    loss_mask: tuple[bool, ...] = ()
    """Whether the model generated the token. Only these tokens are trained on."""
    status: Status = Status.PENDING
    turns: tuple[int, ...] = ()
    """For each finished turn, the number of response tokens at its end. The index of its last token is one less."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the first turns, in order. Later turns have no reward yet."""
    turn_limit: int | None = None
    """Most tokens of the response at the end of the present turn. None if the turn has no limit."""
    goes_on: bool = False
    """Whether the sample may return to the engine after the present turn. The engine then keeps its keys and values if
    it can."""
    parent: int | None = None
    """Id of the trajectory of the same episode from which this one branched."""
    routing: RecordedRouting | None = None
    """Routing of the tokens processed by a recording engine. It excludes the last generated token."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the context, in order. They begin at tokens of the prompt or of an observation."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions) == len(self.loss_mask):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.logprobs)} logprobs, {len(self.policy_versions)} "
                f"policy_versions and {len(self.loss_mask)} entries of loss_mask; expected one of each per token"
            )
        if len(self.turn_rewards) > len(self.turns):
            raise ValueError(
                f"{len(self.turn_rewards)} turn_rewards for {len(self.turns)} finished turns; expected at most one each"
            )

    @property
    def is_finished(self) -> bool:
        return self.status != Status.PENDING

    @property
    def episode(self) -> int:
        """Id of the first trajectory of its episode."""
        return self.id % SIBLINGS_APART

    @property
    def waits(self) -> bool:
        """Whether it is a pending conversation with an unanswered last turn."""
        return not self.is_finished and len(self.turn_rewards) < len(self.turns)

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response tokens."""
        return self.prompt + self.tokens

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """Tokens generated by the model in the present turn, after the last turn and its observation."""
        return self._turn_within(self.turns[-1] if self.turns else 0, len(self.tokens))

    @property
    def last_turn(self) -> tuple[int, ...]:
        """Tokens generated by the model in the last finished turn."""
        previous, end = (0, *self.turns)[-2:] if self.turns else (0, 0)
        return self._turn_within(previous, end)

    def _turn_within(self, begin: int, end: int) -> tuple[int, ...]:
        """Returns the tokens from `begin` to `end` without the observed tokens before them."""
        observed = next((i for i in range(end, begin, -1) if not self.loss_mask[i - 1]), begin)
        return self.tokens[observed:end]

    def drawn(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[int],
        status: Status = Status.PENDING,
    ) -> "Sample":
        """Returns the sample with further tokens generated by the model. Any status but pending ends a turn."""
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
        """Returns the sample with the routing of the tokens after those already recorded."""
        new = RecordedRouting(experts)
        return replace(self, routing=self.routing.followed_by(new) if self.routing else new)

    def observed(
        self, tokens: Sequence[int], images: Iterable[PlacedImage] = (), *, turn_limit: int | None = None
    ) -> "Sample":
        """Returns the pending sample with observed tokens appended, such as the answer of an environment.

        They are not trained on. The places of `images` are relative to the first of them. `turn_limit` is the limit of
        the next turn.
        """
        first = len(self.context)
        count = len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            logprobs=(*self.logprobs, *[0.0] * count),
            policy_versions=(*self.policy_versions, *[0] * count),
            loss_mask=(*self.loss_mask, *[False] * count),
            status=Status.PENDING,
            turn_limit=turn_limit,
            images=(*self.images, *(image._replace(begin=first + image.begin) for image in images)),
        )

    def first(self, num_tokens: int) -> "Sample":
        """Returns the sample as it was after `num_tokens` tokens of the response: pending, with the turns ended before
        that."""
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
            images=tuple(image for image in self.images if image.begin < len(self.prompt) + num_tokens),
        )


@dataclass(frozen=True)
class SampleGroup:
    """All samples of one prompt."""

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
        """Number of prompt and response tokens of all samples."""
        return sum(len(sample.context) for sample in self.samples)

    @property
    def num_distinct_tokens(self) -> int:
        """The same number, where tokens that several samples begin with alike count once."""
        contexts = sorted(sample.context for sample in self.samples)
        return self.num_tokens - sum(map(_num_equal, contexts, contexts[1:]))

    @property
    def num_response_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def updated(self, samples: Iterable[Sample]) -> "SampleGroup":
        """Returns the group with `samples` replacing those of equal ids. Samples with new ids are appended."""
        new = {sample.id: sample for sample in samples}
        kept = [new.pop(sample.id, sample) for sample in self.samples]
        return replace(self, samples=(*kept, *new.values()))

    def trajectories(self, episode: int) -> tuple[Sample, ...]:
        """Returns the trajectories of an episode."""
        return tuple(sample for sample in self.samples if sample.episode == episode)

    def without_siblings(self, episode: int) -> "SampleGroup":
        """Returns the group with only the first trajectory of `episode`. Other episodes are kept whole."""
        return replace(self, samples=tuple(s for s in self.samples if s.episode != episode or s.id == episode))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens with which two sequences begin alike."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))


# Conversion of groups to experience.


def pack_groups(
    groups: Sequence[SampleGroup],
    of_chunk: Sequence[int],
    routing: RoutingShape | None = None,
    merge: int | None = None,
) -> Experience:
    """Returns the samples of `groups` as an Experience. Without groups it has no samples.

    `of_chunk` has the positions of all groups of the chunk; a group id is an index into it. With `routing` the
    experience also has the recorded experts. With `merge`, the height and width of an image token in patches, it has
    the fields of images.
    """
    place = {position: index for index, position in enumerate(of_chunk)}
    samples = [sample for group in groups for sample in group.samples]
    routed = {} if routing is None else {"routed_experts": routing.packed(_routed_experts(samples, routing))}
    return Experience(
        **routed,
        **({} if merge is None else _image_fields(samples, merge)),
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
    """Returns the mask of tokens to train on. It is all False for a failed sample, because its reward is unknown."""
    return [False] * len(sample.tokens) if sample.status == Status.FAILED else sample.loss_mask


def _turn_rewards(sample: Sample) -> Sequence[float]:
    """Returns a reward per token: each turn's reward at its last token, 0 elsewhere."""
    rewards = [0.0] * len(sample.tokens)
    for end, reward in zip(sample.turns, sample.turn_rewards, strict=False):
        rewards[end - 1] += reward
    return rewards


def _routed_experts(samples: Sequence[Sample], shape: RoutingShape) -> Tensor:
    """Returns expert ids, shape [tokens, layers, top_k]. Tokens never fed to the engine, such as the last one, are
    unknown."""
    experts = shape.unknown(sum(len(sample.context) for sample in samples))
    first = 0
    for sample in samples:
        if sample.routing is not None:
            found = torch.from_numpy(sample.routing.experts)
            experts[first : first + len(found)] = found
        first += len(sample.context)
    return experts


def _image_fields(samples: Sequence[Sample], merge: int) -> dict[str, Tensor]:
    found = [image_fields(len(sample.context), sample.images, merge) for sample in samples]
    keys = [torch.from_numpy(of_sample) for of_sample, _ in found]
    positions = [torch.from_numpy(of_sample) for _, of_sample in found]
    none = torch.zeros(0, 3, dtype=torch.int32)
    return {
        "image_keys": torch.cat(keys) if keys else torch.zeros(0, dtype=torch.int64),
        "rope_positions": torch.cat([none, *positions]),
    }


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64)


def _of_response(samples: Sequence[Sample], dtype: torch.dtype, values: Callable[[Sample], Iterable[float]]) -> Tensor:
    """Returns one value per token of all samples, shape [tokens], with zeros for the prompts."""
    parts = chain.from_iterable(([0] * len(sample.prompt), values(sample)) for sample in samples)
    return torch.tensor([*chain.from_iterable(parts)], dtype=dtype)
