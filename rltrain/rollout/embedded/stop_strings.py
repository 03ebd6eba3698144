"""Stop strings: ending a response once its decoded text contains one."""

from collections.abc import Sequence
from typing import Protocol

_LEAD_TOKENS = 8
"""Decoded before the longest possible match, for tokenizers whose text depends on the tokens before."""


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], /) -> str: ...


class StopStrings:
    """Follows the responses of one generation by request number. A token adds at least one byte of text."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], num_requests: int) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window_tokens = max(len(string.encode()) for string in strings) + _LEAD_TOKENS
        self._responses: list[list[int]] = [[] for _ in range(num_requests)]

    def append(self, requests: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Add one token to each named request; which of them now contain a stop string."""
        return [self._append(request, token) for request, token in zip(requests, tokens, strict=True)]

    def _append(self, request: int, token: int) -> bool:
        response = self._responses[request]
        response.append(token)
        text = self._tokenizer.decode(response[-self._window_tokens :])
        return any(string in text for string in self._strings)
