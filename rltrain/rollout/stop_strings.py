"""Stop strings: ending a response once its decoded text contains one."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from rltrain.errors import ConfigError

_LEAD_TOKENS = 8
"""Decoded before the longest possible match, for tokenizers whose text depends on the tokens before."""


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
