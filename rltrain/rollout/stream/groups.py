"""Prompt groups on one engine: a group is finished when all of its samples are."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.sample import Sample, SampleGroup, Status
from rltrain.rollout.stream.episodes import CURRENT_VERSION, Answer, Episodes, with_shared_reward
from rltrain.rollout.stream.guests import Guests, Mail
from rltrain.rollout.stream.ready_samples import ReadySamples


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

    def answers(self) -> tuple[Answer, ...]:
        """What waiting samples have been answered since the last call; on the engine's first rank."""
        if self.episodes is None or not self.waiting:
            return ()
        return tuple(self.episodes.answers(engine_is_idle=self.engine.num_unfinished == 0))

    def answer(self, answers: Sequence[Answer]) -> list[SampleGroup]:
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
