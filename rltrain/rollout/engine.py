"""What every engine understands, is built of, and refuses."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rltrain.config.schema import Config, Served
from rltrain.errors import ConfigError, DataError, SyncError
from rltrain.models import Architecture
from rltrain.offload.memory_parts import MemoryPart
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World

# Stop strings: ending a response once its decoded text contains one.

_LEAD_TOKENS = 8
"""Decoded before the longest possible match, for tokenizers whose text depends on the tokens before."""


StopCut = Callable[[Sequence[int], Sequence[int]], int | None]
"""(tokens that the turn has drawn before, new ones) -> how many of the new there are when a stop string is complete."""


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], /) -> str: ...


class StopStrings:
    """Which responses end, from the last tokens of each. A token adds at least one byte of text."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window_tokens = max(len(string.encode()) for string in strings) + _LEAD_TOKENS

    def recent(self, tokens: Sequence[int]) -> deque[int]:
        """What `append` must know of a response that has drawn `tokens`."""
        return deque(tokens, maxlen=self._window_tokens)

    def append(self, responses: Sequence[deque[int]], tokens: Sequence[int]) -> list[bool]:
        """Add one token to each response; which of them now contain a stop string."""
        return [self._append(response, token) for response, token in zip(responses, tokens, strict=True)]

    def _append(self, response: deque[int], token: int) -> bool:
        response.append(token)
        text = self._tokenizer.decode(list(response))
        return any(string in text for string in self._strings)


def stop_strings(strings: Sequence[str], tokenizer: Tokenizer | None) -> StopStrings | None:
    """None where there are no `strings`; ConfigError where they cannot be looked for."""
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError(
            f"rollout.sampling.stop = {list(strings)} needs the model's tokenizer to decode responses, and "
            "there is none. Put tokenizer files into model.path, or leave rollout.sampling.stop empty."
        )
    return StopStrings(tokenizer, strings)


def stop_cut(strings: Sequence[str], tokenizer: Tokenizer | None) -> StopCut | None:
    """For tokens that a server has drawn, which may look for `strings` neither in what it takes for the prompt, nor
    further back than the tokens that a string itself is encoded to, though a model may spell it with more."""
    if not strings or tokenizer is None:
        return None
    looked_for = StopStrings(tokenizer, strings)

    def cut(before: Sequence[int], new: Sequence[int]) -> int | None:
        recent = [*looked_for.recent(before)]

        def is_complete(count: int) -> bool:
            text = tokenizer.decode([*recent, *new[:count]])
            return any(string in text for string in strings)

        if not new or not is_complete(len(new)):
            return None
        return 1 + bisect_left(range(1, len(new)), True, key=is_complete)

    return cut


# What every rollout engine understands: samples to draw in, the same samples drawn out.

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


class Engine(ABC):
    """Draws many samples at once, one token of each or more per `step`; samples may come and weights change between
    steps.

    Everything is collective over the engine's ranks: they make equal calls in one order.
    """

    policy_version: int | None
    """Of the weights that it serves; set once all of an update has arrived. None: they are not complete."""
    num_restarts: int = 0
    """How often a process of its own was lost and started anew."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Samples submitted that no step has returned yet."""

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """How many more samples would start at the next step: slots that no running or queued one takes."""

    @property
    @abstractmethod
    def num_usable(self) -> int:
        """How many more samples it has use for by now: those that would start at the next step, and as many as it
        starts together. Above 0 while nothing is unfinished."""

    @abstractmethod
    def begin_update(self) -> None:
        """The weights are about to be rewritten: no token may be drawn until `end_update`.

        Running responses stay and go on under the new weights, with the keys and values that the old ones computed.
        """

    @abstractmethod
    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Where a part of the new weights (rollout.layout.engine_parts) is to be written, by parameter; parts come in
        order, and this waits until the engine has taken what lay there before. Where `is_kept` it has what the last
        update left, of which some will be overwritten; parts that stay as they are need not come then. An update may
        begin anew from any part, back to the first."""

    @abstractmethod
    def arrived(self, part: int) -> None:
        """This rank's share of the part has been written."""

    @abstractmethod
    def end_update(self, version: int) -> None:
        """All parts have arrived, on all ranks: the engine serves `version` from now on. Raises EngineError where its
        process was lost and cannot be brought back."""

    @abstractmethod
    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Queue `samples`, first in, first out. What is unfinished at one time has distinct ids and equal `sampling`.

        A sample whose turn has ended, and to which something was added by `observed`, comes back so for its next turn.

        Raises ValueError where it has not, or where a sample has nothing left to draw; DataError for a prompt that
        leaves no room. Then none of the samples is queued.
        """

    @abstractmethod
    def step(self) -> list[Sample]:
        """Start queued samples where slots are free, draw one token of every running one; those now finished.

        A sample whose log-probs are not finite has failed, and lacks those. Raises DivergenceError if that holds for
        every sample that runs, after which nothing is unfinished. Raises SyncError while there is no policy version.
        """

    @abstractmethod
    def suspend(self) -> list[Sample]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far.

        Submitted again, also to another engine, a sample continues where it stopped.
        """

    @abstractmethod
    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the running samples, each with what it is known to have drawn so far; they go on. Not collective:
        of an engine with several ranks the first one is asked.
        """

    @abstractmethod
    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """As `suspend`, for these samples alone; the others go on."""

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """Submit `samples` and step until all are finished; in the order of `samples`.

        Raises as `submit` and `step` do, and ValueError where something else is unfinished.
        """
        served_version(self.policy_version)
        expect_idle(self.num_unfinished, "generate")
        self.submit(samples, sampling)
        finished: dict[int, Sample] = {}
        while self.num_unfinished:
            finished |= {sample.id: sample for sample in self.step()}
        return [finished[sample.id] for sample in samples]

    @abstractmethod
    def forget(self, ids: Collection[int]) -> None:
        """The conversations with these sample ids are over: nothing need be kept for another turn of them."""

    @abstractmethod
    def release_cache(self) -> None:
        """Free the memory of keys and values until the next step. Raises ValueError while anything is unfinished."""

    @abstractmethod
    def close(self) -> None:
        """Called once, after the last use."""


# What an engine is built of, and what it is to the rest of the job.


@dataclass(frozen=True)
class EngineSite:
    """This rank's place for an engine on `ranks`, of those of the role's `grid`."""

    config: Config
    world: World
    ranks: tuple[int, ...]
    grid: Grid
    groups: ProcessGroups
    architecture: Architecture
    tokenizer: Tokenizer
    job_store: JobStore
    leaves: bool
    """Whether it gives its device memory up between its tasks."""
    draws_during_syncs: bool
    """Whether weights may come while it has responses under way."""
    others: tuple[str, ...] = ()
    """Other roles with something on this rank's device."""
    role: str = "rollout"
    """The config section that describes it."""
    updates_together: bool = False
    """Whether all engines of the role get an update before any gets the next one: those of a node then keep one copy of
    the weights."""

    weights_change: bool = True
    """Whether syncs bring weights, or the role's checkpoint is served as it is."""

    @property
    def settings(self) -> Served:
        return self.config.served(self.role)

    @property
    def num_nodes(self) -> int:
        return len({rank // self.world.ranks_per_node for rank in self.ranks})


@dataclass(frozen=True)
class HostedEngine:
    """`parts` are "weights" and "kv_cache", as tasks.roles names them, and "base" where it has adapters apart."""

    engine: Engine
    parts: Mapping[str, MemoryPart]
    metrics: Callable[[], dict[str, float]] = dict
    """Of what it did since the last call."""


# What every engine refuses, in the same words whichever it is.


def served_version(policy_version: int | None) -> int:
    """The version that an engine may draw with; SyncError while it has none."""
    if policy_version is None:
        raise SyncError(
            "the engine was asked to generate while its weights are incomplete: a weight sync has not been made "
            "yet, or one has begun and not ended. Expected a weight_sync that succeeds before every generate"
        )
    return policy_version


def expect_idle(num_unfinished: int, method: str) -> None:
    """ValueError where `method` was called too early."""
    if num_unfinished:
        raise ValueError(f"{method} with {num_unfinished} samples unfinished; expected none: suspend() first")


def response_limit(sample: Sample, sampling: SamplingParams, max_context_tokens: int) -> int:
    """Tokens that the response may have at the end of the present turn, those that exist included."""
    limit = min(sampling.max_response_tokens, max_context_tokens - len(sample.prompt))
    return limit if sample.turn_limit is None else min(limit, sample.turn_limit)


def check_samples(
    samples: Sequence[Sample],
    sampling: SamplingParams,
    *,
    unfinished: Collection[int],
    running: SamplingParams | None,
    max_context_tokens: int,
) -> None:
    """Whether `samples` may be queued beside those with ids `unfinished`, which have the sampling `running`.

    DataError for a prompt that leaves no room; ValueError for sampling that differs, for ids that are not distinct, and
    where nothing is left to draw.
    """
    for sample in samples:
        if not 0 < len(sample.prompt) < max_context_tokens:
            raise DataError(
                f"The prompt of sample {sample.id} has {len(sample.prompt)} tokens; expected at least 1 and "
                f"fewer than rollout.max_context_tokens = {max_context_tokens}, so that a response fits. "
                "Raise rollout.max_context_tokens or lower data.max_prompt_tokens."
            )
    if unfinished and running != sampling:
        raise ValueError(f"submitted with {sampling} while samples with {running} are unfinished")
    new = {sample.id for sample in samples}
    if len(new) < len(samples) or not new.isdisjoint(unfinished):
        raise ValueError("samples with equal ids; expected distinct ones among all that are unfinished")
    for sample in samples:
        limit = response_limit(sample, sampling, max_context_tokens)
        if sample.is_finished or len(sample.tokens) >= limit:
            raise ValueError(
                f"sample {sample.id} is {sample.status.name.lower()} and has {len(sample.tokens)} tokens; expected a "
                f"pending one with fewer than the {limit} that its response may have"
            )
