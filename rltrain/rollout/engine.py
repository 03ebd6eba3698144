"""What every rollout engine understands: requests of token ids in, completions of token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
class Request:
    """One response to draw. `seed` fixes its random numbers, whichever engine or batch it runs in."""

    id: int
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One drawn response. The three sequences have one entry per response token.

    `logprobs` are of the tempered but untruncated distribution (temperature 1 when greedy): what training recomputes.
    """

    id: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    policy_versions: Sequence[int]
    finish_reason: FinishReason


class Engine(Protocol):
    """Generation is collective over the engine's tensor-parallel group: its ranks pass equal requests in one order."""

    policy_version: int | None
    """Of the weights that it serves; set once all of an update has arrived. None: they are not complete."""

    def begin_update(self) -> None:
        """The weights are about to be rewritten: nothing may be generated until `policy_version` is set again."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Completions in the order of `requests`, on every rank of the engine.

        Raises SyncError while there is no policy version.
        """
        ...
