"""What every rollout engine understands: requests of token ids in, completions of token ids out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length"]


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


@dataclass(frozen=True)
class PartialResponse:
    """The part of a response that exists already: three sequences with one entry per token, as in `Completion`."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.policy_versions):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.logprobs)} logprobs and {len(self.policy_versions)} "
                "policy_versions; expected one of each per token"
            )


@dataclass(frozen=True)
class Request:
    """One response to draw. `seed` fixes its random numbers, whichever engine or batch it runs in.

    With `drawn` the response goes on after these tokens as if it had never stopped: prompt and drawn tokens are its
    context, the next token takes the next random number, and limits on the response count the drawn tokens.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    drawn: PartialResponse | None = None


@dataclass(frozen=True)
class Completion:
    """One drawn response. The three sequences have one entry per response token, those of `Request.drawn` included.

    `logprobs` are of the tempered but untruncated distribution (temperature 1 when greedy): what training recomputes.
    `policy_versions` are the engine's at the decode step that drew the token: weights may change within a response.
    """

    id: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: Sequence[int]
    finish_reason: FinishReason


class Engine(Protocol):
    """Draws many responses at once, one token of each or more per `step`; requests may come and weights change between
    steps.

    Everything is collective over the engine's ranks: they make equal calls in one order.
    """

    policy_version: int | None
    """Of the weights that it serves; set once all of an update has arrived. None: they are not complete."""

    @property
    def num_unfinished(self) -> int:
        """Requests submitted whose completion no step has returned yet."""
        ...

    @property
    def num_free_slots(self) -> int:
        """How many more requests would start at the next step: slots that no running or queued request takes."""
        ...

    def begin_update(self) -> None:
        """The weights are about to be rewritten: no token may be drawn until `end_update`.

        Running responses stay and go on under the new weights, with the keys and values that the old ones computed.
        """
        ...

    def incoming(self, part: int) -> Mapping[str, Tensor]:
        """Where a part of the new weights (rollout.layout.engine_parts) is to be written, by parameter; parts come in
        order, and this waits until the engine has taken what lay there before."""
        ...

    def arrived(self, part: int) -> None:
        """This rank's share of the part has been written."""
        ...

    def end_update(self, version: int) -> None:
        """All parts have arrived, on all ranks: the engine serves `version` from now on. Raises EngineError where its
        process was lost and cannot be brought back."""
        ...

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Queue `requests`, first in, first out. What is unfinished at one time has distinct ids and equal `sampling`.

        Raises ValueError where it has not, or where `drawn` leaves nothing to draw; DataError for a prompt that leaves
        no room. Then none of the requests is queued.
        """
        ...

    def step(self) -> list[Completion]:
        """Start queued requests where slots are free, draw one token of every running response; those now finished.

        Raises SyncError while there is no policy version, and DivergenceError for log-probs that are not finite, after
        which nothing is unfinished.
        """
        ...

    def suspend(self) -> list[Request]:
        """Take back all that is unfinished, in the order of submission, each with what it has drawn so far.

        Submitted again, also to another engine, a response continues where it stopped.
        """
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Submit `requests` and step until all are finished; completions in the order of `requests`.

        Raises as `submit` and `step` do, and ValueError where something else is unfinished.
        """
        ...

    def release_cache(self) -> None:
        """Free the memory of keys and values until the next step. Raises ValueError while anything is unfinished."""
        ...

    def close(self) -> None:
        """Called once, after the last use."""
        ...
