"""A turn in pieces of text as it is drawn; and its log-probs in OpenAI's form."""

from os.path import commonprefix
from typing import Any

from rltrain.endpoint.answer import Answer, Choice
from rltrain.endpoint.opening import Reply
from rltrain.endpoint.token_text import TokenText


class Deltas:
    """Of one choice. What is given out is never taken back: together it is the text of the whole."""

    def __init__(self, answer: Answer, choice: Choice) -> None:
        self._answer, self._choice = answer, choice
        self._sent = ""
        self._num_tokens = 0
        self._num_tokens_told = 0

    def text(self) -> str:
        """Returns what has been added since the last call.

        A tokenizer may change text of tokens before, where a new one follows. Then nothing is given until the turn is
        done, and then what follows the place where the text changed.
        """
        if not self._choice.is_done and len(self._choice.tokens) == self._num_tokens:
            return ""
        self._num_tokens = len(self._choice.tokens)
        whole = self._choice.standing(self._answer.opening)
        if not whole.startswith(self._sent) and not self._choice.is_done:
            return ""
        new = whole[len(commonprefix([whole, self._sent])) :]
        self._sent += new
        return new

    def reply(self) -> Reply:
        return self._choice.read(self._answer.opening)

    def new_tokens(self) -> slice:
        """Which of the turn's tokens have come since the last call."""
        start, self._num_tokens_told = self._num_tokens_told, len(self._choice.tokens)
        return slice(start, self._num_tokens_told)


def finish_reason(choice: Choice, reply: Reply) -> str:
    """OpenAI's word for how the turn ended."""
    if choice.sample.status.name == "TRUNCATED":
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def token_logprobs(choice: Choice, which: slice, tokens: TokenText) -> list[dict[str, Any]]:
    """Of some of a turn's tokens; those that might have been drawn instead are not known."""
    items = []
    for token, logprob in zip(choice.tokens[which], choice.logprobs[which], strict=True):
        text = tokens.spelling(token)
        items.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return items
