"""How turns become tokens and tokens become actions: by a chat template, or as plain text."""

from collections.abc import Sequence
from typing import Protocol

from rltrain.data.chat_format import ChatFormat
from rltrain.data.tokenizer import PromptEncoder
from rltrain.environments.interface import Action, Message
from rltrain.errors import EpisodeError

Shown = str | Sequence[Message]
"""What is yet to be encoded."""


class TurnFormat(Protocol):
    def prompt(self, observation: Shown) -> tuple[int, ...]:
        """Token ids up to where the model's first turn begins."""
        ...

    def continuation(self, turn: Sequence[int], observation: Shown) -> tuple[int, ...]:
        """Token ids between the drawn ids `turn` and the next turn's beginning."""
        ...

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        """What an environment gets for the drawn ids `turn`, which is at `position` among the turns."""
        ...


class PlainText:
    """Implements `TurnFormat` for models without a chat template: texts follow one another."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self.tokenizer = encoder.tokenizer

    def prompt(self, observation: Shown) -> tuple[int, ...]:
        return tuple(self.tokenizer(_text_of(observation))["input_ids"])

    def continuation(self, turn: Sequence[int], observation: Shown) -> tuple[int, ...]:
        return tuple(self.tokenizer(_text_of(observation), add_special_tokens=False)["input_ids"])

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        return Action(str(self.tokenizer.decode(list(turn), skip_special_tokens=True)), truncated=truncated)


class ChatTurns:
    """Implements `TurnFormat` by the tokenizer's chat template."""

    def __init__(self, chat_format: ChatFormat, system_prompt: str | None) -> None:
        self.chat_format, self.system_prompt = chat_format, system_prompt

    def prompt(self, observation: Shown) -> tuple[int, ...]:
        messages = _messages_of(observation)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return self.chat_format.prompt(messages)

    def continuation(self, turn: Sequence[int], observation: Shown) -> tuple[int, ...]:
        return self.chat_format.continuation(turn, _messages_of(observation))

    def action(self, turn: Sequence[int], *, truncated: bool, position: int) -> Action:
        said = self.chat_format.message_of(turn, mark=position)
        return Action(said.text, tuple(said.tool_calls), truncated)


def _messages_of(observation: Shown) -> list[Message]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def _text_of(observation: Shown) -> str:
    if isinstance(observation, str):
        return observation
    raise EpisodeError(
        f"an environment answered with {len(observation)} chat messages, and the checkpoint's tokenizer has no chat "
        "template, or data.chat_template is never; expected a text"
    )
