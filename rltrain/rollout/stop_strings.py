"""Stop strings: ending a response once its decoded text contains one."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rltrain.errors import ConfigError

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
