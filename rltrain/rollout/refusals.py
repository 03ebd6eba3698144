"""What every engine refuses, in the same words whichever it is."""

from collections.abc import Collection, Sequence

from rltrain.errors import DataError, SyncError
from rltrain.rollout.engine import Request, SamplingParams


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
        raise ValueError(f"{method} with {num_unfinished} requests unfinished; expected none: suspend() first")


def response_limit(request: Request, sampling: SamplingParams, max_context_tokens: int) -> int:
    """Tokens that the response may have, those drawn before included."""
    return min(sampling.max_response_tokens, max_context_tokens - len(request.prompt))


def check_requests(
    requests: Sequence[Request],
    sampling: SamplingParams,
    *,
    unfinished: Collection[int],
    running: SamplingParams | None,
    max_context_tokens: int,
) -> None:
    """Whether `requests` may be queued beside those with ids `unfinished`, which have the sampling `running`.

    DataError for a prompt that leaves no room; ValueError for sampling that differs, for ids that are not distinct, and
    where nothing is left to draw.
    """
    for request in requests:
        if not 0 < len(request.prompt) < max_context_tokens:
            raise DataError(
                f"The prompt of request {request.id} has {len(request.prompt)} tokens; expected at least 1 and "
                f"fewer than rollout.max_context_tokens = {max_context_tokens}, so that a response fits. "
                "Raise rollout.max_context_tokens or lower data.max_prompt_tokens."
            )
    if unfinished and running != sampling:
        raise ValueError(f"submitted with {sampling} while requests with {running} are unfinished")
    new = {request.id for request in requests}
    if len(new) < len(requests) or not new.isdisjoint(unfinished):
        raise ValueError("requests with equal ids; expected distinct ones among all that are unfinished")
    for request in requests:
        limit = response_limit(request, sampling, max_context_tokens)
        if request.drawn and len(request.drawn.tokens) >= limit:
            raise ValueError(
                f"request {request.id} has drawn {len(request.drawn.tokens)} tokens; expected fewer than the "
                f"{limit} that its response may have"
            )
