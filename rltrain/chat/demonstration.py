"""Conversations that somebody wrote down, as ids and which of them are to be learnt."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rltrain.chat.assistant_turn import REASONING_MARKS
from rltrain.chat.chat_format import ChatFormat
from rltrain.chat.conversation import Conversation
from rltrain.chat.template import RenderError
from rltrain.data.messages import Message
from rltrain.errors import DataError


def demonstrate(chat: ChatFormat, messages: Sequence[Message]) -> Conversation:
    """The record that the engine would have left had the model drawn the assistant's turns of `messages`.

    Every turn is what the template writes of it while it is the last one, through the token that ends it. Between two
    turns stands what the template appends. Each piece is encoded by itself, as prompts and answers of a rollout are.
    `messages` begin with others than the assistant's, end with a turn of it, and have others between two of its turns.
    Raises DataError where the template has no place for one of them.
    """
    ids: list[int] = []
    turns: list[tuple[int, int]] = []
    for text, is_turn in _pieces(chat, messages):
        begin = len(ids)
        ids += chat.template.encode(text)
        if is_turn:
            turns.append((begin, len(ids)))
    return Conversation(chat, tuple(ids), tuple(turns), tuple(messages))


def _pieces(chat: ChatFormat, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a turn of the assistant) in the order of the conversation."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        yield chat.template.render(messages[: places[0]]), False
        for place, following in pairwise([*places, len(messages)]):
            answers = messages[place + 1 : following]
            behind = chat.following(answers) if answers else ""
            said, is_ended = _turn(chat, messages[: place + 1])
            if is_ended:
                yield said, True
                behind = _behind_the_end(chat, behind)
            else:
                end, behind = _next_mark(chat, behind or _behind_last(chat, messages[place]))
                yield said + end, True
            if answers:
                yield behind, False
    except RenderError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(f"the chat template refuses messages of roles {roles}: {error}") from error


def _turn(chat: ChatFormat, messages: Sequence[Message]) -> tuple[str, bool]:
    """(the last of `messages`, through the token that ends it, whether the template writes such a token)."""
    asked = chat.template.render(messages[:-1])
    whole = chat.template.render(messages, generation_prompt=False)
    said = whole.removeprefix(asked) if whole.startswith(asked) else _continued(chat, asked, messages[-1])
    ends = [said.rfind(end) + len(end) for end in _end_texts(chat) if end in said]
    return (said[: max(ends)], True) if ends else (said, False)


def _behind_last(chat: ChatFormat, turn: Message) -> str:
    """What the template would write behind a conversation's last turn."""
    role = "tool" if turn.get("tool_calls") else "user"
    try:
        return chat.following([{"role": role, "content": "."}])
    except DataError:
        return ""


def _next_mark(chat: ChatFormat, behind: str) -> tuple[str, str]:
    """(what ends a turn that the template ends by no token, what then still stands behind it).

    The mark of the next message ends it, if that is one of the model's end tokens; else the tokenizer's eos_token does.
    """
    for end in _end_texts(chat):
        if behind.lstrip().startswith(end):
            return end, behind.lstrip().removeprefix(end)
    return str(chat.tokenizer.eos_token or ""), _behind_the_end(chat, behind)


def _continued(chat: ChatFormat, asked: str, message: Message) -> str:
    """A turn that the template would render otherwise than what it asks the model to go on from: its prompt begins the
    reasoning, which it leaves out of turns."""
    content = str(message["content"])
    for opening, closing in REASONING_MARKS:
        thought = message.get("reasoning_content")
        if asked.rstrip().endswith(opening) and not message.get("tool_calls"):
            if thought is not None:
                content = f"{thought}\n{closing}\n\n{content}"
            if closing in content:
                return content.removeprefix(opening).lstrip("\n")
    raise DataError(
        f"the chat template asks the model to go on from {asked[-40:]!r} and renders the turn {content[:40]!r} "
        "otherwise; expected a turn that begins with its reasoning, if the template begins it, and calls no tools"
    )


def _behind_the_end(chat: ChatFormat, following: str) -> str:
    """`following` without what closes the turn before it, which is learnt with that turn."""
    ends = [following.index(end) + len(end) for end in _end_texts(chat) if end in following]
    return following[min(ends) :] if ends else following


def _end_texts(chat: ChatFormat) -> list[str]:
    ends = sorted(chat.end.tokens & chat.end.added)
    return [str(text) for text in chat.tokenizer.convert_ids_to_tokens(ends)]
