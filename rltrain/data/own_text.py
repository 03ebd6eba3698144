"""Conversations as a model reads them that has a tokenizer and chat template of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rltrain.data.chat_template import ChatTemplate, RenderError, ends_of_turns
from rltrain.data.tokenizer import end_token_ids, load_tokenizer
from rltrain.errors import CheckpointError

Message = Mapping[str, Any]


class UnreadableTextError(Exception):
    """Why a text cannot be given to the model."""


class OwnText:
    """Texts that another model drew, each encoded once, as a whole."""

    def __init__(
        self, path: Path, config_key: str, *, vocab_size: int, chat_template: Literal["auto", "never"]
    ) -> None:
        """CheckpointError where the checkpoint's folder has no usable tokenizer."""
        self.tokenizer, self.vocab_size = load_tokenizer(path, config_key), vocab_size
        self.config_key, self.named_ends = config_key, end_token_ids(path, config_key)
        uses_template = chat_template == "auto" and self.tokenizer.chat_template is not None
        self.template = ChatTemplate(self.tokenizer, (), {}) if uses_template else None

    def ids(self, prompt: str, messages: Sequence[Message], completion: Sequence[Message]) -> list[int]:
        """Of a conversation that has ended: what the prompt was as text, its chat messages if it had any, and those
        that followed. Without a template the texts stand one after the other. Raises UnreadableTextError."""
        if self.template is None:
            said = (str(message.get("content") or "") for message in completion)
            return self._usable(self.tokenizer("".join([prompt, *said]))["input_ids"])
        asked = messages or [{"role": "user", "content": prompt}]
        try:
            text = self.template.render([*asked, *completion], generation_prompt=False)
        except RenderError as error:
            raise UnreadableTextError(f"its chat template refuses the conversation: {error}") from error
        return self._usable(self.template.encode(text))

    def up_to_eos(self, ids: Sequence[int]) -> list[int]:
        """Without what stands behind the last end-of-sequence token, which is added where there is none."""
        eos = self.eos
        behind = next((count for count, token in enumerate(reversed(ids)) if token == eos), None)
        return [*ids, eos] if behind is None else [*ids[: len(ids) - behind]]

    @property
    def eos(self) -> int:
        """CheckpointError where the tokenizer names none."""
        token = self.tokenizer.eos_token_id
        if not isinstance(token, int):
            raise CheckpointError(f"{self.config_key}: the tokenizer has no eos_token; set it in tokenizer_config.json")
        return token

    def question_ids(self, question: str) -> list[int]:
        """Of a user's question, up to where the model's answer begins. Raises UnreadableTextError."""
        if self.template is None:
            return self._usable(self.tokenizer(question)["input_ids"])
        try:
            text = self.template.render([{"role": "user", "content": question}])
        except RenderError as error:
            raise UnreadableTextError(f"its chat template refuses the question: {error}") from error
        return self._usable(self.template.encode(text))

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return ends_of_turns(self.tokenizer, self.named_ends, self.template)

    def _usable(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise UnreadableTextError("the text has no token")
        if max(ids) >= self.vocab_size:
            raise UnreadableTextError(
                f"its tokenizer gives token {max(ids)}, and the model's vocabulary has {self.vocab_size}"
            )
        return list(ids)
