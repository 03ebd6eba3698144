"""Where the model's turn ends in the template, and what of its closing a drawn turn lacks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from rltrain.chat.template import ChatTemplate, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "rltrainsturn"


@dataclass(frozen=True)
class TurnEnd:
    """The tokens by which a turn can end.

    A template closes a turn by text such as "<|im_end|>\\n". Of a turn that was cut all of it is missing; of one that
    the model ended, only what follows its end token. Where the model ended its turn by another of its end tokens, that
    one stands for the template's, because what was drawn is never changed.
    """

    closing: tuple[int, ...]
    """How the template closes a turn, through the token that ends it; empty: by text alone, or not at all."""
    tokens: frozenset[int]
    """Every token that ends a turn when it is drawn."""
    added: frozenset[int]
    """Tokens that stand for themselves in a text: special ones, and others that were added to the vocabulary."""
    last: int | None
    """The token that ends a turn behind which nothing or a message of the user follows; None: none is known."""

    @classmethod
    def of(cls, template: ChatTemplate, end_tokens: Collection[int]) -> "TurnEnd":
        """As the template closes a short conversation; `end_tokens` are others of the model's.

        Some templates write no token that ends a turn. There the mark of the next message ends it, if the checkpoint
        names that mark among its end tokens.
        """
        added = frozenset(template.tokenizer.added_tokens_decoder) | frozenset(template.tokenizer.all_special_ids)
        eos = template.tokenizer.eos_token_id
        known = frozenset(end_tokens) | ({eos} if isinstance(eos, int) else frozenset())
        ways = _behind_turns(template)
        closing = _beginning_of_all(ways)
        ends = [place for place, token in enumerate(closing) if token in added]
        end = next((place for place in ends if closing[place] in known), ends[0] if ends else -1)
        closing = closing[: end + 1]
        marks = [way[0] for way in ways if way and way[0] in known]
        last = closing[-1] if closing else marks[-1] if marks else eos if isinstance(eos, int) else None
        return cls(closing, known | set(closing[-1:]), added, last)

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether the model ended `turn`; otherwise a limit cut it."""
        return bool(turn) and turn[-1] in self.tokens

    def missing(self, turn: Sequence[int], following: Sequence[int]) -> Sequence[int]:
        """Of `following`, what the template writes after a turn, all but what `turn` ends with already."""
        first = next((place for place, token in enumerate(following) if token in self.added), None)
        if first is None or not self.ended(turn):
            return following
        if following[first] == turn[-1]:
            return following[first + 1 :]
        if self.closing and tuple(following[: len(self.closing)]) == self.closing:
            return following[len(self.closing) :]
        closes_otherwise = bool(self.closing) and following[first] in self.tokens
        return following[first + 1 :] if closes_otherwise else following


def ends_of_turns(
    tokenizer: "PreTrainedTokenizerBase", end_tokens: Collection[int], template: ChatTemplate | None
) -> frozenset[int]:
    """Returns every token that ends what a model says, for all who draw it or read it.

    These are `end_tokens`, which its checkpoint names, the tokenizer's eos_token and, where chats are rendered, the
    token by which the template closes a turn.
    """
    if template is not None:
        return TurnEnd.of(template, end_tokens).tokens
    eos = tokenizer.eos_token_id
    return frozenset(end_tokens) | ({eos} if isinstance(eos, int) else frozenset())


def _behind_turns(template: ChatTemplate) -> list[tuple[int, ...]]:
    """Returns what the template writes behind a turn, first where nothing follows, then before a user's message."""
    asked = {"role": "user", "content": "."}
    said = {"role": "assistant", "content": PLACEHOLDER}
    ways = []
    for messages, goes_on in (([asked, said], False), ([asked, said, asked], True)):
        try:
            text = template.render(messages, generation_prompt=goes_on)
        except RenderError:
            continue
        ways.append(template.encode(text.rpartition(PLACEHOLDER)[2]))
    return ways


def _beginning_of_all(ways: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    equal = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways, strict=False))
    return tuple(tokens[0] for tokens in equal)
