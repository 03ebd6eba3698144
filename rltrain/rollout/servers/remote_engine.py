"""What engines on servers have in common: the samples they have under way, and how many more they take."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from rltrain.rollout.engine import START_FRACTION, SamplingParams, check_samples, expect_idle, served_version
from rltrain.rollout.sample import Sample
from rltrain.rollout.stop_strings import Tokenizer, stop_strings


class RemoteEngine(ABC):
    """Part of an `Engine`: keeps account of the samples that a subclass sends to servers and takes back finished."""

    def __init__(self, max_running_requests: int, max_context_tokens: int, tokenizer: Tokenizer | None) -> None:
        self.policy_version: int | None = None
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._tokenizer = tokenizer
        self._unfinished: dict[int, Sample] = {}
        self._sampling: SamplingParams | None = None

    @property
    def num_unfinished(self) -> int:
        """Samples submitted that no step has returned yet."""
        return len(self._unfinished)

    @property
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step."""
        return max(0, self._num_slots - self.num_unfinished)

    @property
    def num_usable(self) -> int:
        """Those, and some for servers to start before they are looked at again."""
        return max(0, self._num_slots + max(1, self._num_slots // START_FRACTION) - self.num_unfinished)

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests

    @abstractmethod
    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None: ...

    @abstractmethod
    def step(self) -> list[Sample]: ...

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """The samples, finished and in their order, while nothing else is unfinished.

        Raises as `submit` and `step` do. Collective over: the engine's ranks.
        """
        served_version(self.policy_version)
        expect_idle(self.num_unfinished, "generate")
        self.submit(samples, sampling)
        finished: dict[int, Sample] = {}
        while self._unfinished:
            finished |= {sample.id: sample for sample in self.step()}
        return [finished[sample.id] for sample in samples]

    def forget(self, ids: Collection[int]) -> None:
        """Does nothing: servers give up first what they have not used for longest."""
        return

    def _accept(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Counts `samples` as unfinished. Raises, on all ranks alike, if they may not be queued beside the others."""
        check_samples(
            samples,
            sampling,
            unfinished=self._unfinished,
            running=self._sampling,
            max_context_tokens=self._max_context_tokens,
        )
        stop_strings(sampling.stop, self._tokenizer)
        self._sampling = sampling
        self._unfinished |= {sample.id: sample for sample in samples}
