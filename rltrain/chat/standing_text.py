"""How much of an unfinished turn's text stays as it is, whatever is drawn next."""

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED_CHARACTER = "\ufffd"
"""What tokenizers write for bytes that are no whole character, or not yet."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Returns the tokens that are left out of texts."""
    added = tokenizer.added_tokens_decoder
    return frozenset([*tokenizer.all_special_ids, *(token for token, of in added.items() if of.special)])


def settled(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], special: Collection[int]) -> Sequence[int]:
    """Returns the tokens up to a last run of single bytes.

    A tokenizer with such tokens decodes a run as a whole. Every byte of it becomes another character where one of them
    does not fit. Special tokens do not end a run, since texts are decoded without them.
    """
    end = len(tokens)
    for place in range(len(tokens) - 1, -1, -1):
        if BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(tokens[place]))):
            end = place
        elif tokens[place] not in special:
            break
    return tokens[:end]


def before_marks(text: str, marks: Collection[str]) -> str:
    """Returns the text before the first of the marks, and without an end that may begin one."""
    whole = (place for mark in marks if (place := text.find(mark)) >= 0)
    begun = (len(text) - size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return text[: min((*whole, *begun), default=len(text))]
