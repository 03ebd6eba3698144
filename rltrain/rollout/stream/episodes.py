"""What happens between the turns of samples that are conversations, as an engine's ranks know it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rltrain.data.experience import SIBLINGS_APART
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.rollout.stream.seeds import mix64

CURRENT_VERSION = -1
"""In the place of a policy version: the engine's, when it learns of the token."""


class Unusable(Exception):  # noqa: N818 - a finding, which fails an episode
    """Nothing of an episode can be drawn or trained on: why."""


@dataclass(frozen=True)
class Answer:
    """What became of a sample that waited: of its beginning, or of the turn that it ended. Equal on all ranks of its
    engine."""

    id: int
    status: Status = Status.PENDING
    """Of the sample from now on; pending goes back to the engine."""
    tokens: tuple[int, ...] = ()
    """What it is to go on after. At the beginning this is the prompt, and none keeps the one that it has."""
    reward: float = 0.0
    """Of the turn that it ended."""
    branches: bool = False
    """`tokens` are the whole context of another trajectory, with which the episode goes on."""
    max_turn_tokens: int | None = None
    """Of the next turn; None: the run's."""
    trajectories: tuple[Sample, ...] = ()
    """All of an episode that ends with them, in the place of what was drawn."""

    def applied_to(self, sample: Sample, max_turn_tokens: int | None) -> tuple[Sample, ...]:
        """The sample from now on, and trajectories of its episode that come to be."""
        most = max_turn_tokens if self.max_turn_tokens is None else self.max_turn_tokens
        if self.trajectories:
            return self.trajectories
        if self.branches:
            return self._branched(sample, most)
        if not sample.turns:
            goes_on = self.status == Status.PENDING
            prompt = self.tokens or sample.prompt
            return (replace(sample, status=self.status, prompt=prompt, turn_limit=most, goes_on=goes_on),)
        rewards = (*sample.turn_rewards, self.reward)
        if self.status != Status.PENDING:
            return (replace(sample, status=self.status, turn_rewards=rewards, turn_limit=None, goes_on=False),)
        limit = None if most is None else len(sample.tokens) + len(self.tokens) + most
        return (replace(sample.observed(self.tokens, turn_limit=limit), turn_rewards=rewards),)

    def _branched(self, sample: Sample, max_turn_tokens: int | None) -> tuple[Sample, ...]:
        """The episode's new trajectory under the sample's id, which is the engine's, and what was drawn under another.
        What both have in common is trained on in the first."""
        before = sample.parent or sample.id
        closed = replace(
            sample,
            id=before + SIBLINGS_APART,
            status=Status.STOPPED,
            turn_rewards=(*sample.turn_rewards, self.reward),
            turn_limit=None,
            goes_on=False,
        )
        seed = mix64(sample.seed + closed.id) >> 1
        new = Sample(sample.id, self.tokens, seed, turn_limit=max_turn_tokens, goes_on=True, parent=closed.id)
        return new, closed

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "trajectories": [sample.record() for sample in self.trajectories]}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Answer":
        trajectories = tuple(Sample.of_record(sample) for sample in record["trajectories"])
        return cls(
            **{
                **record,
                "status": Status(record["status"]),
                "tokens": tuple(record["tokens"]),
                "trajectories": trajectories,
            }
        )


def with_shared_reward(trajectories: Sequence[Sample], besides: float = 0.0) -> list[Sample]:
    """Of one episode that has ended: each is worth what all of its turns were, and what it got `besides`. What of that
    did not come with a trajectory's own turns stands at its last one."""
    total = besides + sum(sum(sample.turn_rewards) for sample in trajectories)
    return [_worth(sample, total) if sample.turns else sample for sample in trajectories]


def _worth(sample: Sample, total: float) -> Sample:
    rewards = [*sample.turn_rewards, *[0.0] * (len(sample.turns) - len(sample.turn_rewards))]
    rewards[-1] += total - sum(rewards)
    return replace(sample, turn_rewards=tuple(rewards))


class Episodes(Protocol):
    """Episodes of one engine's samples, on its first rank, which tells the others what was answered."""

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        """These of its samples wait for the beginning of an episode each."""
        ...

    def goes_on(self, sample: Sample) -> bool:
        """Whether the episode of a sample that crossed a checkpoint has done so too. All ranks know."""
        ...

    def resume(self, sample: Sample) -> None:
        """It goes on here."""
        ...

    def act(self, sample: Sample, *, truncated: bool) -> None:
        """A sample has ended a turn, at a limit of tokens where it is `truncated`, and waits for what follows."""
        ...

    def fail(self, sample: Sample) -> None:
        """The engine could not draw a sample's turn: its episode is over."""
        ...

    def answers(self, *, engine_is_idle: bool) -> list[Answer]:
        """What has been answered since the last call; never blocks."""
        ...

    def begin_anew(self, count: int) -> None:
        """So many episodes could not go on from a checkpoint."""
        ...

    def settle(self) -> list[Answer]:
        """What can be answered before a checkpoint is; until then it waits. All engines do."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the episodes that have ended since the last call."""
        ...


class FollowedEpisodes:
    """On the other ranks of an engine: implements `Episodes`, and knows nothing by itself but which episodes are
    `going_on` from a checkpoint."""

    def __init__(self, going_on: Collection[int]) -> None:
        self.going_on = going_on

    def begin(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        """The first rank does."""

    def goes_on(self, sample: Sample) -> bool:
        return sample.id in self.going_on

    def resume(self, sample: Sample) -> None:
        """The first rank does."""

    def act(self, sample: Sample, *, truncated: bool) -> None:
        """The first rank does."""

    def fail(self, sample: Sample) -> None:
        """The first rank does."""

    def answers(self, *, engine_is_idle: bool) -> list[Answer]:
        return []

    def begin_anew(self, count: int) -> None:
        """The first rank counts them."""

    def settle(self) -> list[Answer]:
        return []

    def metrics(self) -> dict[str, float]:
        return {}
