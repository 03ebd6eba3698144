"""The interface of all rollout engines, with their inputs and shared checks."""

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
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World

# Stop strings: a response ends once its decoded text contains one.

_LEAD_TOKENS = 8
"""Extra tokens decoded before the longest possible match. Some tokenizers decode a token differently after others."""


StopCut = Callable[[Sequence[int], Sequence[int]], int | None]
"""A function (earlier tokens of the turn, new tokens) -> number of new tokens up to the end of a complete stop string.

It returns None if no stop string is complete.
"""


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], /) -> str: ...


class StopStrings:
    """Finds the responses that contain a stop string.

    It decodes only the last tokens of a response. This is enough because a token adds at least one byte of text.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window_tokens = max(len(string.encode()) for string in strings) + _LEAD_TOKENS

    def recent(self, tokens: Sequence[int]) -> deque[int]:
        """Returns the last tokens of a response, in the form expected by `append`."""
        return deque(tokens, maxlen=self._window_tokens)

    def append(self, responses: Sequence[deque[int]], tokens: Sequence[int]) -> list[bool]:
        """Appends one token to each response. Returns for each response whether it contains a stop string now."""
        return [self._append(response, token) for response, token in zip(responses, tokens, strict=True)]

    def _append(self, response: deque[int], token: int) -> bool:
        response.append(token)
        text = self._tokenizer.decode(list(response))
        return any(string in text for string in self._strings)


def stop_strings(strings: Sequence[str], tokenizer: Tokenizer | None) -> StopStrings | None:
    """Returns the matcher for `strings`, or None if there are none. Raises ConfigError if strings need a missing
    tokenizer."""
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError(
            f"rollout.sampling.stop = {list(strings)} needs a tokenizer to decode responses, but model.path has none. "
            "Put tokenizer files into model.path, or leave rollout.sampling.stop empty."
        )
    return StopStrings(tokenizer, strings)


def stop_cut(strings: Sequence[str], tokenizer: Tokenizer | None) -> StopCut | None:
    """Returns a function that cuts a server's tokens after the first complete stop string.

    Returns None without strings or without a tokenizer.

    It is needed because a server may search too little text. A server may skip the text that it takes for the prompt.
    It may also look back only as many tokens as the encoded string has, although a model can spell the string with
    more.
    """
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


# The interface of an engine.

START_FRACTION = 8
"""New samples start once 1/8 of the slots are free, so one prefill serves several samples."""


@dataclass(frozen=True)
class GreedyPlaces:
    """Selects the last `count` of every `of` consecutive episode ids. Samples of a group have consecutive ids."""

    count: int
    of: int

    def hold(self, sample: Sample) -> bool:
        """Returns whether `sample` is selected."""
        return sample.episode % self.of >= self.of - self.count


@dataclass(frozen=True)
class SamplingParams:
    """Settings for choosing tokens. Temperature 0 is greedy. `top_k` 0 and `top_p` 1 switch truncation off.

    A token of `stop_token_ids` ends a response and stays part of it. A string of `stop` ends a response once its
    decoded text contains the string.
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    greedy: GreedyPlaces | None = None
    """Samples that are always greedy, at any temperature."""

    def is_greedy(self, sample: Sample) -> bool:
        return self.temperature == 0 or (self.greedy is not None and self.greedy.hold(sample))


class Engine(ABC):
    """Generates tokens for many samples at once. Each `step` adds one or more tokens to every running sample.

    Between two steps samples may arrive and weights may change. All methods are collective over the engine's ranks
    unless they say otherwise: all ranks make the same calls in the same order.
    """

    policy_version: int | None
    """Version of the served weights. It is set when an update is complete, and None while the weights are
    incomplete."""
    num_restarts: int = 0
    """Number of restarts of the engine's own process."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Number of submitted samples that no step has returned yet."""

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """Number of further samples that could start at the next step: slots not taken by running or queued samples."""

    @property
    @abstractmethod
    def num_usable(self) -> int:
        """Number of further samples worth submitting: one per free slot, and a batch to start together next.

        It is above 0 if nothing is unfinished.
        """

    @abstractmethod
    def begin_update(self) -> None:
        """Prepares the engine for new weights. No token may be generated until `end_update`.

        Running responses stay. They continue under the new weights and keep the keys and values computed by the old
        ones.
        """

    @abstractmethod
    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        """Returns the destination tensors for one part of the new weights, by parameter name (see
        rollout.layout.engine_parts).

        Parts come in order. The call waits until the engine has taken the previous content of these tensors. With
        `is_kept` the tensors still hold the values of the last update, some of which will be overwritten. Unchanged
        parts need not come then. An update may start over from any earlier part, even the first.
        """

    @abstractmethod
    def arrived(self, part: int) -> None:
        """Notes that this rank's share of the part has been written."""

    @abstractmethod
    def end_update(self, version: int) -> None:
        """Completes the update after all parts have arrived on all ranks. The engine then serves `version`.

        Raises EngineError if the engine's process was lost and cannot be restarted.
        """

    @abstractmethod
    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        """Queues `samples`, first in, first out. Unfinished samples have distinct ids and equal `sampling`.

        A sample with a finished turn and a new observation (see `Sample.observed`) is submitted again for its next
        turn.

        Raises ValueError if ids repeat, if `sampling` differs or if a sample has nothing left to generate. Raises
        DataError if a prompt leaves no room for a response. In both cases none of the samples is queued.
        """

    @abstractmethod
    def step(self) -> list[Sample]:
        """Starts queued samples in free slots, generates tokens for all running samples and returns the finished ones.

        A sample with log-probs that are not finite has failed and is returned without them. Raises DivergenceError if
        all running samples failed this way; nothing is unfinished afterwards. Raises SyncError if there is no policy
        version.
        """

    @abstractmethod
    def suspend(self) -> list[Sample]:
        """Removes and returns all unfinished samples in the order of submission, each with its tokens so far.

        A sample continues from its last token when it is submitted again, to this engine or another one.
        """

    @abstractmethod
    def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns the running samples with these ids, each with its known tokens so far. They keep running.

        Not collective: only the first rank of the engine is asked.
        """

    @abstractmethod
    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        """Removes and returns the samples with these ids. The others keep running."""

    def generate(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[Sample]:
        """Submits `samples`, steps until all are finished and returns them in the given order.

        Raises the errors of `submit` and `step`. Raises ValueError if other samples are unfinished.
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
        """Drops everything kept for another turn of the conversations with these sample ids."""

    @abstractmethod
    def release_cache(self) -> None:
        """Frees the memory of keys and values until the next step. Raises ValueError if anything is unfinished."""

    @abstractmethod
    def close(self) -> None:
        """Closes the engine. Called once, after the last use."""


# The parts of an engine on one rank.


@dataclass(frozen=True)
class EngineSite:
    """The inputs for building an engine on `ranks`, a subset of the ranks of the role's `grid`."""

    config: Config
    world: World
    ranks: tuple[int, ...]
    grid: Grid
    groups: ProcessGroups
    architecture: Architecture
    tokenizer: Tokenizer
    job_store: JobStore
    leaves: bool
    """Whether the engine gives up its device memory between its tasks."""
    draws_during_syncs: bool
    """Whether new weights may arrive while responses are unfinished."""
    others: tuple[str, ...] = ()
    """Other roles with memory on this rank's device."""
    role: str = "rollout"
    """The role, and with it the config section of the engine."""
    updates_together: bool = False
    """Whether an update reaches all engines of the role before the next one begins. Engines of a node then share one
    copy of the weights."""

    images: ImageStore | None = None
    """The decoded images of samples, with model.vision."""
    weights_change: bool = True
    """Whether syncs bring weights. If not, the engine serves the role's checkpoint throughout."""

    @property
    def settings(self) -> Served:
        return self.config.served(self.role)

    @property
    def num_nodes(self) -> int:
        return len({rank // self.world.ranks_per_node for rank in self.ranks})


@dataclass(frozen=True)
class HostedEngine:
    """An engine with its memory parts: "weights", "kv_cache" and, for separate adapters, "base" (see tasks.roles)."""

    engine: Engine
    parts: Mapping[str, MemoryPart]
    metrics: Callable[[], dict[str, float]] = dict
    """Returns the engine's metrics since the last call."""


# Checks shared by all engines.


def served_version(policy_version: int | None) -> int:
    """Returns the version if it is set. Raises SyncError if it is None."""
    if policy_version is None:
        raise SyncError(
            "the engine was asked to generate while its weights are incomplete: no weight sync has ended yet, or one "
            "has begun and not ended. Expected a successful weight_sync before every generate"
        )
    return policy_version


def expect_idle(num_unfinished: int, method: str) -> None:
    """Raises ValueError if samples are unfinished. `method` is the caller's name in the message."""
    if num_unfinished:
        raise ValueError(f"{method} with {num_unfinished} samples unfinished; expected none: suspend() first")


def response_limit(sample: Sample, sampling: SamplingParams, max_context_tokens: int) -> int:
    """Returns the most tokens that the response may have at the end of the present turn, existing tokens included."""
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
    """Checks that `samples` can be queued beside the unfinished ids with sampling `running`.

    Raises DataError if a prompt leaves no room for a response. Raises ValueError if the sampling differs, if ids repeat
    or if a sample has nothing left to generate.
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
        raise ValueError("samples have equal ids; expected distinct ids among all unfinished samples")
    for sample in samples:
        limit = response_limit(sample, sampling, max_context_tokens)
        if sample.is_finished or len(sample.tokens) >= limit:
            raise ValueError(
                f"sample {sample.id} is {sample.status.name.lower()} and has {len(sample.tokens)} tokens; expected a "
                f"pending sample with fewer than {limit} tokens, the limit of its response"
            )
