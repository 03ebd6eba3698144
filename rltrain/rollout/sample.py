"""A sample: one response on its way from a prompt to training, in every state of it; and the samples of one prompt.

Engines draw samples, the stream groups them, checkpoints of the rollout hold them, packing makes experience of them.

What is numbered, and by which name:

- `position`: a group's place in the stream of all prompts of a run;
- `row`: the prompt's place in the prompt file, which comes up again in every epoch (`prompt_ids` of an Experience);
- `id`: a sample's own number in the stream, position * samples_per_prompt + 0, 1, ... (`sample_ids`); further
  trajectories of its episode, where it has several, are SIBLINGS_APART;
- `group_ids`, of an Experience alone: a group's place among those of its chunk, by position; `pack_groups` makes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from rltrain.data.experience import SIBLINGS_APART
from rltrain.rollout.routing import RecordedRouting


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

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "routing": self.routing and self.routing.record()}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Sample":
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
        }
        routing = record.get("routing")
        return cls(
            **{**values, "status": Status(record["status"])}
            | {"routing": routing and RecordedRouting.of_record(routing)}
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
