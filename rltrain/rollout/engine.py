"""What every rollout engine understands: samples to draw in, the same samples drawn out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rltrain.rollout.sample import Sample

START_FRACTION = 8
"""New samples start once 1/8 of the slots are free: one prefill then serves several."""


@dataclass(frozen=True)
class GreedyPlaces:
    """The last `count` of every `of` samples in a row, by their episodes' ids: as samples of groups are numbered."""

    count: int
    of: int

    def hold(self, sample: Sample) -> bool:
        """Whether `sample` is one of them."""
        return sample.episode % self.of >= self.of - self.count


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch truncation off.

    `stop_token_ids` end a response and are part of it; `stop` strings end it once the decoded text contains one.
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    greedy: GreedyPlaces | None = None
    """Samples whose every token is the most likely one, whatever the temperature."""

    def is_greedy(self, sample: Sample) -> bool:
        return self.temperature == 0 or (self.greedy is not None and self.greedy.hold(sample))


class Engine(Protocol):
    """Draws many samples at once, one token of each or more per `step`; samples may come and weights change between
    steps.

    Everything is collective over the engine's ranks: they make equal calls in one order.
    """

    policy_version: int | None
    """Of the weights that it serves; set once all of an update has arrived. None: they are not complete."""
    num_restarts: int
    """How often a process of its own was lost and started anew."""

    @property
    def num_unfinished(self) -> int:
        """Samples submitted that no step has returned yet."""
        ...

    @property
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step: slots that no running or queued one takes."""
        ...

    @property
    def num_usable(self) -> int:
        """How many more samples it has use for by now: those that would start at the next step, and as many as it
        starts together. Above 0 while nothing is unfinished."""
        ...

    def begin_update(self) -> None:
        """The weights are about to be rewritten: no token may be drawn until `end_update`.

        Running responses stay and go on under the new weights, with the keys and values that the old ones computed.
        """
        ...

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Where a part of the new weights (rollout.layout.engine_parts) is to be written, by parameter; parts come in
        order, and this waits until the engine has taken what lay there before. Where `is_kept` it has what the last
        update left, of which some will be overwritten; parts that stay as they are need not come then. An update may
        begin anew from any part, back to the first."""
        ...

    def arrived(self, part: int) -> None:
        """This rank's share of the part has been written."""
        ...

    def end_update(self, version: int) -> None:
        """All parts have arrived, on all ranks: the engine serves `version` from now on. Raises EngineError where its
        process was lost and cannot be brought back."""
        ...

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Queue `samples`, first in, first out. What is unfinished at one time has distinct ids and equal `sampling`.

        A sample whose turn has ended, and to which something was added by `observed`, comes back so for its next turn.

        Raises ValueError where it has not, or where a sample has nothing left to draw; DataError for a prompt that
        leaves no room. Then none of the samples is queued.
        """
        ...

    def step(self) -> list[Sample]:
        """Start queued samples where slots are free, draw one token of every running one; those now finished.

        A sample whose log-probs are not finite has failed, and lacks those. Raises DivergenceError if that holds for
        every sample that runs, after which nothing is unfinished. Raises SyncError while there is no policy version.
        """
        ...

    def suspend(self) -> list[Sample]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far.

        Submitted again, also to another engine, a sample continues where it stopped.
        """
        ...

    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the running samples, each with what it is known to have drawn so far; they go on. Not collective:
        of an engine with several ranks the first one is asked.
        """
        ...

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """As `suspend`, for these samples alone; the others go on."""
        ...

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """Submit `samples` and step until all are finished; in the order of `samples`.

        Raises as `submit` and `step` do, and ValueError where something else is unfinished.
        """
        ...

    def forget(self, ids: Collection[int]) -> None:
        """The conversations with these sample ids are over: nothing need be kept for another turn of them."""
        ...

    def release_cache(self) -> None:
        """Free the memory of keys and values until the next step. Raises ValueError while anything is unfinished."""
        ...

    def close(self) -> None:
        """Called once, after the last use."""
        ...
