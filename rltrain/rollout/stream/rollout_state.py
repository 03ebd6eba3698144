"""What of the stream of prompt groups crosses a checkpoint, and how any number of engines go on with it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor

from rltrain.checkpoint.run.files import Contents
from rltrain.errors import CheckpointError
from rltrain.rollout.engine import Completion, FinishReason, PartialResponse, Request
from rltrain.rollout.stream.groups import FinishedGroup, Prompt, RunningGroup

FORMAT = "rollout 1"
UNFINISHED = 0
FINISH_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length"}
"""States of a sample."""
TOKEN_FIELDS = ("tokens", "logprobs", "policy_versions")
NOTHING = PartialResponse((), (), ())


@dataclass(frozen=True)
class Consumed:
    """Positions whose groups have been handed over: all below `below`, which is not one, and those in `beyond`."""

    below: int = 0
    beyond: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def __contains__(self, position: int) -> bool:
        return position < self.below or position in self.beyond

    def after(self, positions: Iterable[int]) -> "Consumed":
        """With the groups at `positions` handed over too."""
        below, beyond = self.below, self.beyond.union(positions)
        while below in beyond:
            below += 1
        return Consumed(below, frozenset(position for position in beyond if position > below))


@dataclass(frozen=True)
class RolloutState:
    """What one engine leaves between two of its tasks: groups that it has begun, groups that it has drawn and not
    handed over, and which groups of the stream all engines together have handed over."""

    consumed: Consumed = Consumed()
    begun: tuple[RunningGroup, ...] = ()
    drawn: tuple[FinishedGroup, ...] = ()

    def contents(self) -> Contents:
        """As a file: a row of numbers per group and per sample, and all tokens end to end."""
        groups = [*map(_of_begun, self.begun), *map(_of_drawn, self.drawn)]
        samples = [sample for group in groups for sample in group.samples]
        tensors = {
            "consumed": _integers([self.consumed.below, *sorted(self.consumed.beyond)]),
            "groups": _integers([n for g in groups for n in (g.position, g.row, len(g.prompt), len(g.samples))]),
            "prompts": _integers(chain.from_iterable(group.prompt for group in groups)),
            "samples": _integers([n for s in samples for n in (s.id, s.seed, s.state, len(s.response.tokens))]),
            "tokens": _integers(chain.from_iterable(sample.response.tokens for sample in samples)),
            "policy_versions": _integers(chain.from_iterable(sample.response.policy_versions for sample in samples)),
            "logprobs": torch.tensor([x for s in samples for x in s.response.logprobs], dtype=torch.float64),
        }
        return Contents(tensors, {"format": FORMAT})

    @classmethod
    def from_contents(cls, contents: Contents) -> "RolloutState":
        """The inverse. Raises CheckpointError for another format."""
        found = contents.metadata.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"The rollout's state in a checkpoint has format {found!r}; expected {FORMAT!r}. Go on with the "
                "version of rltrain that saved it, or start anew with checkpoint.resume: none."
            )
        below, *beyond = contents.tensors["consumed"].tolist()
        groups = [*_read_groups(contents.tensors)]
        return cls(
            Consumed(below, frozenset(beyond)),
            tuple(group.begun() for group in groups if not group.is_drawn),
            tuple(group.drawn() for group in groups if group.is_drawn),
        )


@dataclass(frozen=True)
class Hand:
    """What one engine begins with: `returned` are positions before `next_position` that nobody has begun, for this
    engine to begin first; from `next_position` on the stream is dealt out."""

    carried: RolloutState = RolloutState()
    next_position: int = 0
    returned: tuple[int, ...] = ()

    @classmethod
    def at(cls, position: int) -> "Hand":
        """Where all groups below `position` have been handed over and nothing else has been begun."""
        return cls(RolloutState(Consumed(position)), position)


def deal(saved: Sequence[RolloutState], num_engines: int) -> list[Hand]:
    """The hands of `num_engines` engines that go on with what len(saved) engines left, by engine.

    The group at position p goes to engine p mod num_engines, as a fixed deal has it: so an equal number of engines
    gets what it had. Raises CheckpointError where `saved` cannot be of one run and one step.
    """
    if len({carried.consumed for carried in saved}) != 1:
        raise _damaged(f"{len(saved)} engines that do not agree on what has been handed over")
    consumed = saved[0].consumed
    begun = sorted(chain.from_iterable(carried.begun for carried in saved), key=lambda group: group.prompt.position)
    drawn = [*chain.from_iterable(carried.drawn for carried in saved)]
    found = Counter([*(group.prompt.position for group in begun), *(group.position for group in drawn)])
    twice = sorted(position for position, count in found.items() if count > 1 or position in consumed)
    if twice:
        raise _damaged(f"more than once the groups at positions {twice}")
    next_position = max([consumed.below - 1, *consumed.beyond, *found]) + 1
    returned = [p for p in range(consumed.below, next_position) if p not in consumed and p not in found]
    return [
        Hand(
            RolloutState(
                consumed,
                tuple(group for group in begun if group.prompt.position % num_engines == engine),
                tuple(group for group in drawn if group.position % num_engines == engine),
            ),
            next_position,
            tuple(position for position in returned if position % num_engines == engine),
        )
        for engine in range(num_engines)
    ]


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"The rollout's state in the checkpoint holds {what}; expected the files of one checkpoint, one per engine. "
        "Name another checkpoint by checkpoint.resume."
    )


@dataclass(frozen=True)
class _Sample:
    """A row of `samples` and its tokens."""

    id: int
    seed: int
    state: int
    response: PartialResponse

    @classmethod
    def finished(cls, completion: Completion, seed: int = 0) -> "_Sample":
        (state,) = (state for state, reason in FINISH_REASONS.items() if reason == completion.finish_reason)
        response = PartialResponse(*(tuple(getattr(completion, name)) for name in TOKEN_FIELDS))
        return cls(completion.id, seed, state, response)

    def request(self, prompt: tuple[int, ...]) -> Request:
        goes_on = self.state == UNFINISHED and self.response.tokens
        return Request(self.id, prompt, self.seed, self.response if goes_on else None)

    def completion(self) -> Completion:
        return Completion(self.id, **vars(self.response), finish_reason=FINISH_REASONS[self.state])


@dataclass(frozen=True)
class _Group:
    """A row of `groups`, its prompt and its samples."""

    position: int
    row: int
    prompt: tuple[int, ...]
    samples: tuple[_Sample, ...]

    @property
    def finished(self) -> list[_Sample]:
        return [sample for sample in self.samples if sample.state != UNFINISHED]

    @property
    def is_drawn(self) -> bool:
        return len(self.finished) == len(self.samples)

    def begun(self) -> RunningGroup:
        requests = tuple(sample.request(self.prompt) for sample in self.samples)
        completions = {sample.id: sample.completion() for sample in self.finished}
        return RunningGroup(Prompt(self.position, self.row, requests), completions)

    def drawn(self) -> FinishedGroup:
        return FinishedGroup(
            self.position, self.row, self.prompt, tuple(sample.completion() for sample in self.samples)
        )


def _of_begun(group: RunningGroup) -> _Group:
    def sample(request: Request) -> _Sample:
        if request.id in group.completions:
            return _Sample.finished(group.completions[request.id], request.seed)
        return _Sample(request.id, request.seed, UNFINISHED, request.drawn or NOTHING)

    prompt = group.prompt
    return _Group(prompt.position, prompt.row, prompt.requests[0].prompt, tuple(map(sample, prompt.requests)))


def _of_drawn(group: FinishedGroup) -> _Group:
    return _Group(group.position, group.row, group.prompt, tuple(map(_Sample.finished, group.completions)))


def _read_groups(tensors: Mapping[str, Tensor]) -> Iterator[_Group]:
    prompts = iter(tensors["prompts"].tolist())
    token_fields = [iter(tensors[name].tolist()) for name in TOKEN_FIELDS]
    samples = iter(tensors["samples"].view(-1, 4).tolist())
    for position, row, prompt_length, num_samples in tensors["groups"].view(-1, 4).tolist():
        prompt = tuple(islice(prompts, prompt_length))
        yield _Group(
            position,
            row,
            prompt,
            tuple(
                _Sample(
                    number, seed, state, PartialResponse(*(tuple(islice(values, length)) for values in token_fields))
                )
                for number, seed, state, length in islice(samples, num_samples)
            ),
        )


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64)
