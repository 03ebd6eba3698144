"""Prompt groups on one engine: a group is finished when all of its samples are."""

from collections.abc import Callable, Sequence

from rltrain.rollout.engine import Engine, SamplingParams
from rltrain.rollout.sample import Sample, SampleGroup


class PromptGroups:
    """What an engine has begun of the groups that `group_at` describes, and what it has finished of them.

    Ranks of one engine make equal calls in one order.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, group_at: Callable[[int], SampleGroup], num_samples: int
    ) -> None:
        self.engine, self.sampling, self.group_at, self.num_samples = engine, sampling, group_at, num_samples
        self.begun: dict[int, SampleGroup] = {}
        """By position."""
        self.suspended: list[Sample] = []

    @property
    def num_wanted(self) -> int:
        """Groups that could start at once."""
        return self.engine.num_free_slots // self.num_samples or int(self.engine.num_unfinished == 0)

    def start(self, positions: Sequence[int]) -> None:
        """Begin these groups, after those that were suspended."""
        samples, self.suspended = self.suspended, []
        for position in positions:
            self.begun[position] = self.group_at(position)
            samples += self.begun[position].samples
        if samples:
            self.engine.submit(samples, self.sampling)

    def step(self) -> list[SampleGroup]:
        """One decode step; the groups that it finished."""
        finished = []
        for sample in self.engine.step():
            position = self._take(sample)
            if self.begun[position].is_finished:
                finished.append(self.begun.pop(position))
        return finished

    def suspend(self) -> None:
        """Leave the engine; the next `start` goes on with what is unfinished."""
        for sample in self.engine.suspend():
            self._take(sample)
            self.suspended.append(sample)

    def state(self) -> tuple[SampleGroup, ...]:
        """Leave the engine as `suspend` does; what is begun, each sample with what it has drawn so far."""
        self.suspend()
        return tuple(self.begun.values())

    def resume(self, state: Sequence[SampleGroup]) -> None:
        """Go on with groups that were begun elsewhere: the next `start` submits what of them is unfinished."""
        for group in state:
            self.begun[group.position] = group
            self.suspended += group.pending

    def _take(self, sample: Sample) -> int:
        """Put what came back from the engine into its group: the group's position."""
        position = sample.id // self.num_samples
        self.begun[position] = self.begun[position].updated([sample])
        return position
