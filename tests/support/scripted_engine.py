"""An engine without a model: a script gives the length of each sample, and each step adds one token."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rltrain.errors import SyncError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status


class ScriptedEngine:
    """`length_of(sample id)` is the length of its response. Token t of a sample is 1000 * id + t."""

    def __init__(self, length_of: Callable[[int], int], num_slots: int = 4) -> None:
        self.length_of, self.num_slots = length_of, num_slots
        self.policy_version: int | None = 0
        self.unfinished: list[Sample] = []
        self.num_steps = 0
        self.started: list[int] = []
        """Ids of the submitted samples, once more for each return."""

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)

    @property
    def num_free_slots(self) -> int:
        return max(self.num_slots - len(self.unfinished), 0)

    @property
    def num_usable(self) -> int:
        return max(self.num_slots + 1 - len(self.unfinished), 0)

    def begin_update(self) -> None:
        self.policy_version = None

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        ids = [sample.id for sample in (*self.unfinished, *samples)]
        assert len(set(ids)) == len(ids), f"submitted twice: {ids}"
        assert not any(sample.is_finished for sample in samples)
        self.started += [sample.id for sample in samples]
        self.unfinished += samples

    def step(self) -> list[Sample]:
        if self.policy_version is None:
            raise SyncError("the weights are incomplete")
        self.num_steps += 1
        running = [self._draw(sample) for sample in self.unfinished[: self.num_slots]]
        self.unfinished[: self.num_slots] = running
        done = [sample for sample in running if len(sample.tokens) == self.length_of(sample.id)]
        self.unfinished = [sample for sample in self.unfinished if sample not in done]
        return [replace(sample, status=Status.STOPPED) for sample in done]

    def suspend(self) -> list[Sample]:
        suspended, self.unfinished = self.unfinished, []
        return suspended

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        raise NotImplementedError("nothing under test calls it")

    def forget(self, ids: Collection[int]) -> None:
        pass

    def release_cache(self) -> None:
        assert not self.unfinished

    def _draw(self, sample: Sample) -> Sample:
        assert self.policy_version is not None
        return sample.drawn([1000 * sample.id + len(sample.tokens)], [-0.5], [self.policy_version])
