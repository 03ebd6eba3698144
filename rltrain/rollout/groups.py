"""Prompt groups on one engine: their samples, turns requested from outside, and the choice of groups for a step."""

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch.distributed as dist

from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.engine_feed import EngineFeed, Mail
from rltrain.rollout.episodes import CURRENT_VERSION, Episodes, Observed, with_shared_reward
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.runtime.job_store import poll_s

# Conversations that are ready but have no slot in the engine yet.


class ReadySamples:
    """A queue of samples. Those with the fewest finished turns come first.

    They have the most turns left. Conversations then end at similar times, and more environment steps overlap decode
    steps.

    A finished turn counts as much as `spread` samples that arrive later. So a sample with t turns is overtaken by at
    most t * spread samples, however many arrive.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Sample]] = []
        """Entries are (priority, arrival number, sample)."""
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, samples: Iterable[Sample], spread: int) -> None:
        for sample in samples:
            heapq.heappush(self._queue, (self._num_ever + spread * len(sample.turns), self._num_ever, sample))
            self._num_ever += 1

    def take(self, count: int) -> list[Sample]:
        """Removes and returns the next samples, at most `count`."""
        return [heapq.heappop(self._queue)[-1] for _ in range(min(count, len(self._queue)))]


# Prompt groups on one engine. A group is finished when all of its samples are.


class PromptGroups:
    """The groups started on an engine, as described by `group_at`.

    With `episodes` samples are conversations. After a turn a sample waits for its answer and frees its slot in the
    engine for others. `max_turn_tokens` limits a turn.

    The ranks of an engine make the same calls in the same order.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        group_at: Callable[[int], SampleGroup],
        num_samples: int,
        episodes: Episodes | None = None,
        max_turn_tokens: int | None = None,
        guests: EngineFeed | None = None,
    ) -> None:
        self.engine, self.sampling, self.group_at, self.num_samples = engine, sampling, group_at, num_samples
        self.episodes, self.max_turn_tokens, self.guests = episodes, max_turn_tokens, guests
        self.begun: dict[int, SampleGroup] = {}
        """Started groups by position."""
        self.suspended: list[Sample] = []
        self.waiting: dict[int, Sample] = {}
        """Samples waiting for their episodes, by id."""
        self.ready = ReadySamples()
        """Answered samples that the busy engine cannot use yet."""

    @property
    def num_wanted(self) -> int:
        """Number of groups that could start at once."""
        if self.episodes is not None:
            return self._num_wanted_conversations
        return self.engine.num_free_slots // self.num_samples or int(self.engine.num_unfinished == 0)

    @property
    def _num_wanted_conversations(self) -> int:
        """Number of groups for the free slots, rounded up. Unstarted samples will take slots; samples waiting for an
        answer hold none. The rest of a group takes the next slots to become free, because conversations come and leave
        one by one."""
        num_beginning = sum(not sample.turns for sample in self.waiting.values())
        num_free = max(0, self.engine.num_free_slots - num_beginning - len(self.ready))
        return -(-num_free // self.num_samples)

    def start(self, positions: Sequence[int]) -> None:
        """Starts the groups at `positions`, after the suspended samples."""
        samples, self.suspended = self.suspended, []
        for position in positions:
            group = self.begun[position] = self.group_at(position)
            if self.episodes is None:
                samples += group.samples
            else:
                self._await_beginning(group, group.samples)
        if samples:
            self.engine.submit(samples, self.sampling)

    def mail(self) -> Mail | None:
        """Returns the requests from outside (see `EngineFeed.mail`). Called on the engine's first rank."""
        return None if self.guests is None else self.guests.mail()

    def step(self, mail: Mail | None = None) -> list[SampleGroup]:
        """Makes one decode step with the requests of `mail`. Returns the groups finished by it."""
        if self.guests is not None:
            self.guests.begin_step(mail or Mail())
        drawn = self.engine.step()
        if self.guests is not None:
            drawn = self.guests.end_step(drawn)
        if self.episodes is None:
            return self._finished(drawn)
        failed = []
        for sample in drawn:
            if sample.status == Status.FAILED:
                failed.append(self._fail(self.episodes, sample))
            else:
                self._await_answer(self.episodes, sample)
        self._submit_ready()
        return self._finished(failed)

    def answers(self) -> tuple[Observed, ...]:
        """Returns the answers to waiting samples since the last call. Called on the engine's first rank."""
        if self.episodes is None or not self.waiting:
            return ()
        return tuple(self.episodes.answers(engine_is_idle=self.engine.num_unfinished == 0))

    def answer(self, answers: Sequence[Observed]) -> list[SampleGroup]:
        """Continues the answered samples. Returns the groups finished by this."""
        pending, ended = [], []
        for answer in answers:
            first, *siblings = answer.applied_to(self.waiting.pop(answer.id), self.max_turn_tokens)
            if answer.trajectories:
                self._forget_siblings(first)
            for sample in (first, *siblings):
                self._take(self._versioned(sample))
            if answer.trajectories:
                ended.append(first)
            elif first.is_finished:
                ended.append(self._end_episode(first))
            else:
                pending.append(first)
        if ended:
            self.engine.forget([sample.episode for sample in ended])
        self.ready.add(pending, spread=self.num_samples * len(self.begun))
        self._submit_ready()
        return self._finished(ended)

    def _submit_ready(self) -> None:
        if samples := self.ready.take(self.engine.num_usable):
            self.engine.submit(samples, self.sampling)

    def suspend(self) -> None:
        """Takes all samples off the engine. The next `start` submits the unfinished ones again."""
        suspended = self.engine.suspend()
        if self.guests is not None:
            suspended = self.guests.take_back(suspended)
        for sample in (*suspended, *self.ready.take(len(self.ready))):
            self._take(sample)
            self.suspended.append(sample)

    def state(self) -> tuple[SampleGroup, ...]:
        """Suspends, and returns the started groups, each sample with its tokens so far."""
        self.suspend()
        return tuple(self.begun.values())

    def resume(self, state: Sequence[SampleGroup]) -> None:
        """Continues groups that were started elsewhere. The next `start` submits their unfinished samples.

        Episodes without a saved state begin again.
        """
        for group in state:
            self.begun[group.position] = group
            if self.episodes is None:
                self.suspended += group.pending
            else:
                self._resume_episodes(self.episodes, group)

    def _resume_episodes(self, episodes: Episodes, group: SampleGroup) -> None:
        lost = [sample.id for sample in group.pending if not episodes.goes_on(sample)]
        for sample in group.pending:
            if sample.id not in lost:
                episodes.resume(sample)
                if sample.waits:
                    self.waiting[sample.id] = sample
                else:
                    self.suspended.append(sample)
        if lost:
            episodes.begin_anew(len(lost))
            new = [sample for sample in self.group_at(group.position).samples if sample.id in lost]
            for sample in new:
                group = group.without_siblings(sample.id)
            self.begun[group.position] = group.updated(new)
            self._await_beginning(self.begun[group.position], new)

    def _await_beginning(self, group: SampleGroup, samples: Sequence[Sample]) -> None:
        assert self.episodes is not None
        self.waiting |= {sample.id: sample for sample in samples}
        self.episodes.begin(group, samples)

    def _await_answer(self, episodes: Episodes, sample: Sample) -> None:
        waiting = replace(sample, status=Status.PENDING, turn_limit=None)
        self._take(waiting)
        self.waiting[sample.id] = waiting
        episodes.act(waiting, truncated=sample.status == Status.TRUNCATED)

    def _fail(self, episodes: Episodes, sample: Sample) -> Sample:
        """Ends the episode of a failed sample. The engine could not finish its turn."""
        ended = replace(sample, turn_rewards=(*sample.turn_rewards, 0.0), turn_limit=None, goes_on=False)
        self._take(ended)
        episodes.fail(ended)
        self.engine.forget([ended.episode])
        return self._end_episode(ended)

    def _end_episode(self, sample: Sample) -> Sample:
        """Returns the sample with the reward of its whole episode. All trajectories of the episode get it."""
        position = self._position(sample)
        trajectories = self.begun[position].trajectories(sample.episode)
        if len(trajectories) == 1:
            return sample
        if sample.status == Status.FAILED:
            trajectories = tuple(replace(one, status=Status.FAILED) for one in trajectories)
        shared = with_shared_reward(trajectories)
        self.begun[position] = self.begun[position].updated(shared)
        return next(one for one in shared if one.id == sample.id)

    def _forget_siblings(self, sample: Sample) -> None:
        position = self._position(sample)
        self.begun[position] = self.begun[position].without_siblings(sample.episode)

    def _versioned(self, sample: Sample) -> Sample:
        """Returns the sample with the engine's version for tokens that came without one."""
        if CURRENT_VERSION not in sample.policy_versions:
            return sample
        version = self.engine.policy_version or 0
        known = [version if one == CURRENT_VERSION else one for one in sample.policy_versions]
        return replace(sample, policy_versions=tuple(known))

    def _finished(self, samples: Iterable[Sample]) -> list[SampleGroup]:
        """Returns the groups that these samples complete."""
        positions = [self._take(sample) for sample in samples]
        return [self.begun.pop(position) for position in dict.fromkeys(positions) if self.begun[position].is_finished]

    def _take(self, sample: Sample) -> int:
        """Updates the sample in its group. Returns the group's position."""
        position = self._position(sample)
        self.begun[position] = self.begun[position].updated([sample])
        return position

    def _position(self, sample: Sample) -> int:
        return sample.episode // self.num_samples


# Selection of finished groups. A filter keeps or drops them, up to a limit of drops per step.

STEPS_COUNTED = 2
"""Number of latest steps with kept drop counts. Earlier steps are over on all engines."""


@dataclass(frozen=True)
class Verdict:
    """A filter's decision on a finished group."""

    position: int
    is_dropped: bool
    record: str = ""
    """Data of a counted group until it is handed over, such as its rewards."""


Verdicts = Callable[[Mapping[int, SampleGroup], int, Callable[[int], bool]], Iterable[Verdict]]
"""The filter on an engine's first rank. Its arguments are finished groups by position, a step and `DropCount.take`.

It returns the decisions known so far, each of them once. It drops a group only if `take` allows it. It never blocks.
"""


class DropCount:
    """Counts the groups dropped by all engines in this job, at most `limit` in one step. `num_engines` engines poll the
    count."""

    def __init__(self, store: dist.Store, limit: int, num_engines: int = 1) -> None:
        self.store = dist.PrefixStore("dropped", store)
        self.limit = limit
        self.poll_s = poll_s(num_engines)
        self._counted: list[int] = []
        """Steps with a counter in the store made by this engine."""
        self._known = 0
        self._last_look = 0.0

    def take(self, step: int) -> bool:
        """Returns whether one more group may be dropped in this step, and counts it if so."""
        if step not in self._counted:
            for over in [earlier for earlier in self._counted if earlier <= step - STEPS_COUNTED]:
                self._counted.remove(over)
                self.store.delete_key(f"step {over}")
            self._counted.append(step)
        if self.store.add(f"step {step}", 1) > self.limit:
            return False
        self._known = self.store.add("all", 1)
        return True

    @property
    def total(self) -> int:
        """Groups dropped by all engines. This rank's own drops count at once. The store is asked for those of others at
        most every `poll_s` seconds."""
        now = time.monotonic()
        if now - self._last_look >= self.poll_s:
            self._last_look = now
            self._known = self.store.add("all", 0)
        return self._known


@dataclass
class Selection:
    """The undecided finished groups of one engine, and the data of its counted groups.

    All ranks of the engine hold the same groups. The first rank decides. Only it has a `filter`, set before the first
    decode step.
    """

    drops: DropCount
    filter: Verdicts | None = None
    undecided: dict[int, SampleGroup] = field(default_factory=dict)
    """Finished groups by position, in the order of finishing."""
    records: dict[int, str] = field(default_factory=dict)
    """Data of counted groups until they are handed over, by position. Only on the first rank."""
    untold: list[int] = field(default_factory=list)
    """Positions dropped on this engine and not yet reported in the completion log."""
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """For each counted group not yet handed over: the dropped positions in its entry of the completion log."""

    def decide(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (kept positions, dropped positions) of the decisions known so far. Called on the first rank."""
        assert self.filter is not None, "the role that scores groups sets the filter before the first decode step"
        kept, dropped = [], []
        for verdict in self.filter(self.undecided, step, self.drops.take) if self.undecided else ():
            if verdict.is_dropped:
                dropped.append(verdict.position)
            else:
                self.records[verdict.position] = verdict.record
                kept.append(verdict.position)
        return tuple(kept), tuple(dropped)

    def apply(self, kept: Sequence[int], dropped: Collection[int]) -> list[SampleGroup]:
        """Applies a decision of the first rank. Returns the groups that count."""
        for position in dropped:
            del self.undecided[position]
        self.untold += dropped
        return [self.undecided.pop(position) for position in kept]

    def tell(self, position: int) -> tuple[int, ...]:
        """Returns the positions dropped since the last entry of the completion log. They go into the entry of this
        group."""
        self.told[position], self.untold = tuple(self.untold), []
        return self.told[position]

    def hand_over(self, positions: Iterable[int]) -> None:
        """Notes that all engines have read the entries of these groups."""
        for position in positions:
            self.told.pop(position, None)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Positions dropped on this engine and not yet counted as dropped by the others."""
        return (*chain.from_iterable(self.told.values()), *self.untold)
