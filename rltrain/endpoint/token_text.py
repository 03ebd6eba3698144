"""Texts of tokens and tokens of texts, outside of chats."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rltrain.data.assistant_turn import UNFINISHED_CHARACTER, settled, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenText:
    """Implements `rollout.stop_strings.Tokenizer` as well."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """`begins`: with what the tokenizer puts before a text, if anything."""
        return tuple(self._tokenizer(text, add_special_tokens=begins)["input_ids"])

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def standing(self, token_ids: Sequence[int]) -> str:
        """Returns the beginning of the text that stays, whatever tokens follow."""
        return self.decode(settled(self._tokenizer, token_ids, self._special)).rstrip(UNFINISHED_CHARACTER)

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_tokens(self._tokenizer)

    def spelling(self, token: int) -> str:
        """Of one token by itself, special or not."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))
