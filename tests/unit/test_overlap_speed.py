"""Conversations are faster if environments step while the engine decodes. The real schedule runs on a simulated clock,
so the load of the machine does not matter."""

import heapq
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data.images import Context
from rltrain.environments.batch import EpisodeEvent
from rltrain.environments.interface import Action, Row
from rltrain.rollout.engine import START_FRACTION, SamplingParams
from rltrain.rollout.episodes import EnvironmentEpisodes, TurnLimits
from rltrain.rollout.groups import PromptGroups
from rltrain.rollout.sample import Sample, SampleGroup, Status

SAMPLING = SamplingParams(1.0, 1.0, 0, 10**6, ())
PER_GROUP = 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a run. Its unit of time is a decode step. Every decode step and every admission takes one."""

    num_groups: int = 64
    num_slots: int = 32
    num_turns: int = 8
    turn_tokens: int = 8
    """Largest number of tokens of a turn."""
    env_s: float = 80.0
    """Longest time of an environment's step. The mean is half of it."""


@dataclass
class SteppingEngine:
    """The part of `Engine` needed by PromptGroups: first in, first out, with several slots admitted together."""

    shape: Shape
    now: float = 0.0
    waiting: deque[Sample] = field(default_factory=deque)
    running: dict[int, tuple[Sample, int]] = field(default_factory=dict)
    """Running samples by id, each with the number of tokens left in its turn."""
    policy_version = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_free_slots(self) -> int:
        return max(0, self.shape.num_slots - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        return max(0, self.shape.num_slots + self.num_admitted - self.num_unfinished)

    @property
    def num_admitted(self) -> int:
        """Smallest number of samples admitted together."""
        return max(1, self.shape.num_slots // START_FRACTION)

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        self.waiting.extend(samples)

    def forget(self, ids: Collection[int]) -> None:
        """This engine keeps nothing."""

    def step(self) -> list[Sample]:
        num_free = self.shape.num_slots - len(self.running)
        if 0 < min(len(self.waiting), self.num_admitted) <= num_free:
            for _ in range(min(num_free, len(self.waiting))):
                sample = self.waiting.popleft()
                length = random.Random(f"{sample.id} {len(sample.turns)}").randint(1, self.shape.turn_tokens)
                self.running[sample.id] = sample, length
            self.now += 1.0
        self.running = {number: (sample, left - 1) for number, (sample, left) in self.running.items()}
        self.now += bool(self.running)
        ended = [sample for sample, left in self.running.values() if not left]
        for sample in ended:
            del self.running[sample.id]
        return [sample.drawn([1], [0.0], [0], Status.STOPPED) for sample in ended]


@dataclass
class SleepingEnvironments:
    """A stand-in for RemoteEnvironments with parallel sleeps."""

    engine: SteppingEngine
    turns: dict[int, int] = field(default_factory=dict)
    due: list[tuple[float, int]] = field(default_factory=list)
    going_on: Collection[int] = ()

    def begin(self, episode: int, row: Row, seed: int) -> None:
        self.turns[episode] = 0
        heapq.heappush(self.due, (self.engine.now, episode))

    def act(self, episode: int, action: Action) -> None:
        self.turns[episode] += 1
        takes = random.Random(f"{episode} {self.turns[episode]} env").uniform(0, self.engine.shape.env_s)
        heapq.heappush(self.due, (self.engine.now + takes, episode))

    def events(self) -> list[EpisodeEvent]:
        events = []
        while self.due and self.due[0][0] <= self.engine.now:
            episode = heapq.heappop(self.due)[1]
            turns = self.turns[episode]
            events.append(EpisodeEvent(episode, "on" if turns else None, done=turns == self.engine.shape.num_turns))
        return events


class Nothing:
    """A `TurnFormat` with one token for every observation."""

    def prompt(self, observation: object) -> Context:
        return Context((1,))

    def continuation(self, turn: Sequence[int], observation: object) -> Context:
        return Context((1,))

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        return Action("")


def seconds(shape: Shape, *, overlaps: bool) -> float:
    """Returns the time until all groups are done."""
    engine = SteppingEngine(shape)
    environments = SleepingEnvironments(engine)
    limits = TurnLimits(1000, 10, 10**6, 10**6, vocab_size=10**6)
    wait_for = None  # these episodes are never saved
    episodes = EnvironmentEpisodes([environments], Nothing(), limits, lambda row: {}, wait_for, overlaps=overlaps)

    def group_at(position: int) -> SampleGroup:
        ids = range(position * PER_GROUP, (position + 1) * PER_GROUP)
        return SampleGroup(position, position, tuple(Sample(number, (1,), seed=0) for number in ids))

    groups = PromptGroups(engine, SAMPLING, group_at, PER_GROUP, episodes)
    groups.start(range(shape.num_groups))
    for _ in count():
        groups.answer(groups.answers())
        if not groups.begun:
            return engine.now
        if engine.num_unfinished:
            groups.step()
        elif environments.due:
            engine.now = max(engine.now, environments.due[0][0])
    raise AssertionError


def speedup(shape: Shape) -> float:
    return seconds(shape, overlaps=False) / seconds(shape, overlaps=True)


def test_environments_that_take_as_long_as_the_engine_cost_little_beside_it() -> None:
    assert speedup(Shape()) >= 1.85
    assert speedup(Shape(num_turns=4)) >= 1.6, "the last step overlaps nothing, so it weighs more among few steps"


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.builds(
        Shape,
        num_groups=st.integers(1, 12),
        num_slots=st.integers(1, 32),
        num_turns=st.integers(1, 6),
        turn_tokens=st.integers(1, 12),
        env_s=st.sampled_from([0.0, 1.0, 10.0, 100.0]),
    )
)
def test_it_is_never_slower(shape: Shape) -> None:
    """Two turns of loss are tolerated, since samples may be grouped worse at the end."""
    assert seconds(shape, overlaps=True) <= seconds(shape, overlaps=False) + 2 * shape.turn_tokens
