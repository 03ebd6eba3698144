"""Prompt groups on one engine: their samples, guests, and which groups count for a step."""

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch.distributed as dist

from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.episodes import CURRENT_VERSION, Episodes, Observed, with_shared_reward
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.runtime.job_store import poll_s

# Conversations that are to go on while the engine has no slot for them: which of them is next.


class ReadySamples:
    """Those with the fewest turns made come first. They have most before them, so that conversations come to their
    ends together, and environments' steps lie beside decode steps for longer: what nothing overlaps are the last ones.

    A turn made counts as much as `spread` samples that have come since. So whoever waits with t turns made is overtaken
    by at most t * spread others, however many still come.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Sample]] = []
        """(when its turn is, its number among all that ever came, sample)."""
        self._num_ever = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, samples: Iterable[Sample], spread: int) -> None:
        for sample in samples:
            heapq.heappush(self._queue, (self._num_ever + spread * len(sample.turns), self._num_ever, sample))
            self._num_ever += 1

    def take(self, count: int) -> list[Sample]:
        """The next ones, at most so many."""
        return [heapq.heappop(self._queue)[-1] for _ in range(min(count, len(self._queue)))]


# Turns that somebody asks an engine for from outside, beside the groups that it draws.


@dataclass(frozen=True)
class PendingTurn:
    """A pending sample whose next turn is to be drawn. Those that are under way at one time have distinct ids."""

    sample: Sample
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    """Strings of the request's own that end the turn, beside those of `sampling`. They are looked for in what the turn
    draws alone, and the tokens that spell one are part of the turn."""
    is_watched: bool = False
    """Whether its progress is to be told."""


@dataclass(frozen=True)
class Mail:
    """What was asked for since the last decode step. Equal on all ranks of the engine."""

    turns: tuple[PendingTurn, ...] = ()
    given_up: frozenset[int] = frozenset()
    """Ids of samples whose turns came earlier, and that nobody waits for any more."""
    forgotten: frozenset[int] = frozenset()
    """Ids of samples that have no further turn."""

    def __bool__(self) -> bool:
        return bool(self.turns or self.given_up or self.forgotten)


class Guests(Protocol):
    """Such turns on one engine. Its ranks make equal calls in one order, but for `mail`, which is the first one's."""

    def mail(self) -> Mail | None:
        """What has come since the last call, for the next decode step; None where that has nothing of theirs to do."""
        ...

    def begin_step(self, mail: Mail) -> None:
        """Before a decode step: give the engine what there is."""
        ...

    def end_step(self, finished: Iterable[Sample]) -> list[Sample]:
        """After it: take theirs of what has finished; the others."""
        ...

    def take_back(self, samples: Iterable[Sample]) -> list[Sample]:
        """The engine was suspended: take theirs of what it gave back; the others."""
        ...


# Prompt groups on one engine: a group is finished when all of its samples are.


class PromptGroups:
    """What an engine has begun of the groups that `group_at` describes, and what it has finished of them.

    With `episodes` samples are conversations: one that has ended a turn waits, and leaves its place in the engine to
    others, until it is answered. A turn may have `max_turn_tokens`.

    Ranks of one engine make equal calls in one order.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        group_at: Callable[[int], SampleGroup],
        num_samples: int,
        episodes: Episodes | None = None,
        max_turn_tokens: int | None = None,
        guests: Guests | None = None,
    ) -> None:
        self.engine, self.sampling, self.group_at, self.num_samples = engine, sampling, group_at, num_samples
        self.episodes, self.max_turn_tokens, self.guests = episodes, max_turn_tokens, guests
        self.begun: dict[int, SampleGroup] = {}
        """By position."""
        self.suspended: list[Sample] = []
        self.waiting: dict[int, Sample] = {}
        """Samples that wait for their episodes, by id."""
        self.ready = ReadySamples()
        """Samples that were answered, and for which the engine has no use yet: it has something to do then."""

    @property
    def num_wanted(self) -> int:
        """Groups that could start at once."""
        if self.episodes is not None:
            return self._num_wanted_to_play
        return self.engine.num_free_slots // self.num_samples or int(self.engine.num_unfinished == 0)

    @property
    def _num_wanted_to_play(self) -> int:
        """Samples that have yet to begin will take slots, those that wait for an answer have left theirs. What of a
        group finds no slot takes the first that gets free: conversations leave and come one by one."""
        num_beginning = sum(not sample.turns for sample in self.waiting.values())
        num_free = max(0, self.engine.num_free_slots - num_beginning - len(self.ready))
        return -(-num_free // self.num_samples)

    def start(self, positions: Sequence[int]) -> None:
        """Begin these groups, after those that were suspended."""
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
        """What is asked for from outside, as `Guests` says; on the engine's first rank."""
        return None if self.guests is None else self.guests.mail()

    def step(self, mail: Mail | None = None) -> list[SampleGroup]:
        """One decode step, with what is asked for from outside; the groups that it finished."""
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
        """What waiting samples have been answered since the last call; on the engine's first rank."""
        if self.episodes is None or not self.waiting:
            return ()
        return tuple(self.episodes.answers(engine_is_idle=self.engine.num_unfinished == 0))

    def answer(self, answers: Sequence[Observed]) -> list[SampleGroup]:
        """Go on with the samples that were answered; the groups that this finished."""
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
        """Leave the engine; the next `start` goes on with what is unfinished."""
        suspended = self.engine.suspend()
        if self.guests is not None:
            suspended = self.guests.take_back(suspended)
        for sample in (*suspended, *self.ready.take(len(self.ready))):
            self._take(sample)
            self.suspended.append(sample)

    def state(self) -> tuple[SampleGroup, ...]:
        """Leave the engine as `suspend` does; what is begun, each sample with what it has drawn so far."""
        self.suspend()
        return tuple(self.begun.values())

    def resume(self, state: Sequence[SampleGroup]) -> None:
        """Go on with groups that were begun elsewhere: the next `start` submits what of them is unfinished. Episodes
        that have not come along begin anew."""
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
        """The engine could not draw the sample's turn to its end, which ends its episode."""
        ended = replace(sample, turn_rewards=(*sample.turn_rewards, 0.0), turn_limit=None, goes_on=False)
        self._take(ended)
        episodes.fail(ended)
        self.engine.forget([ended.episode])
        return self._end_episode(ended)

    def _end_episode(self, sample: Sample) -> Sample:
        """The sample, worth what its whole episode was, as are the other trajectories of that."""
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
        """With the engine's version for tokens that came without one."""
        if CURRENT_VERSION not in sample.policy_versions:
            return sample
        version = self.engine.policy_version or 0
        known = [version if one == CURRENT_VERSION else one for one in sample.policy_versions]
        return replace(sample, policy_versions=tuple(known))

    def _finished(self, samples: Iterable[Sample]) -> list[SampleGroup]:
        """The groups that these samples finish, which are finished."""
        positions = [self._take(sample) for sample in samples]
        return [self.begun.pop(position) for position in dict.fromkeys(positions) if self.begun[position].is_finished]

    def _take(self, sample: Sample) -> int:
        """Put what came back into its group: the group's position."""
        position = self._position(sample)
        self.begun[position] = self.begun[position].updated([sample])
        return position

    def _position(self, sample: Sample) -> int:
        return sample.episode // self.num_samples


# Which of the groups that an engine has finished count for a step: those that a filter keeps, while it may drop.

STEPS_COUNTED = 2
"""What was dropped in steps before this one and the last is not kept: they are over on all engines."""


@dataclass(frozen=True)
class Verdict:
    """What a filter makes of a group that is finished."""

    position: int
    dropped_for: str | None
    """The reason; None: it counts."""
    record: str = ""
    """What is to be known of a group that counts until it is handed over: its rewards, say."""


class GroupFilter(Protocol):
    """On an engine's first rank, which tells the others."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int) -> Iterable[Verdict]:
        """Of those of `groups`, by position, that it knows by now; of each once. Never blocks."""
        ...

    def drop(self, group: SampleGroup, step: int, reason: str) -> None:
        """The group was dropped in this step."""
        ...

    def spare(self, group: SampleGroup, step: int, reason: str) -> None:
        """It would have been, but no more may be dropped in this step."""
        ...


class DropCount:
    """How many groups all engines have dropped in this job: of those that they finish in one step at most `limit`.
    `num_engines` look how many.
    """

    def __init__(self, store: dist.Store, limit: int, num_engines: int = 1) -> None:
        self.store = dist.PrefixStore("dropped", store)
        self.limit = limit
        self.poll_s = poll_s(num_engines)
        self._counted: list[int] = []
        """Steps in which this engine has asked, whose counts are still there."""
        self._known = 0
        self._last_look = 0.0

    def take(self, step: int) -> bool:
        """Whether one more may be dropped in this step; then it is counted."""
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
        """Known at once where this rank dropped the last one; looked for every `poll_s` at most where another
        did."""
        now = time.monotonic()
        if now - self._last_look >= self.poll_s:
            self._last_look = now
            self._known = self.store.add("all", 0)
        return self._known


@dataclass
class Selection:
    """The groups of one engine that are finished and not yet decided on, and what is known of those that count.

    All ranks of the engine have the same groups; verdicts come from the first, where alone `filter` is set, before the
    first decode step.
    """

    drops: DropCount
    filter: GroupFilter | None = None
    undecided: dict[int, SampleGroup] = field(default_factory=dict)
    """By position, as they were finished."""
    records: dict[int, str] = field(default_factory=dict)
    """On the first rank: of groups that count and have not been handed over."""
    untold: list[int] = field(default_factory=list)
    """Positions that were dropped here and that no entry of the completion log tells of."""
    told: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the position of a group that counts and has not been handed over: those of which its entry tells."""

    def decide(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """On the first rank: positions (that count, that are dropped) of what is known by now."""
        assert self.filter is not None, "whoever scores groups sets the filter before the first decode step"
        kept, dropped = [], []
        for verdict in self.filter.verdicts(self.undecided, step) if self.undecided else ():
            group, reason = self.undecided[verdict.position], verdict.dropped_for
            if reason is not None and self.drops.take(step):
                self.filter.drop(group, step, reason)
                dropped.append(verdict.position)
                continue
            if reason is not None:
                self.filter.spare(group, step, reason)
            self.records[verdict.position] = verdict.record
            kept.append(verdict.position)
        return tuple(kept), tuple(dropped)

    def apply(self, kept: Sequence[int], dropped: Collection[int]) -> list[SampleGroup]:
        """The groups that count from now on."""
        for position in dropped:
            del self.undecided[position]
        self.untold += dropped
        return [self.undecided.pop(position) for position in kept]

    def tell(self, position: int) -> tuple[int, ...]:
        """What was dropped since the last entry of the completion log, for that of the group at `position`."""
        self.told[position], self.untold = tuple(self.untold), []
        return self.told[position]

    def hand_over(self, positions: Iterable[int]) -> None:
        """All engines have read the entries of these groups."""
        for position in positions:
            self.told.pop(position, None)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Positions that were dropped here and that other engines do not count as dropped yet."""
        return (*chain.from_iterable(self.told.values()), *self.untold)
