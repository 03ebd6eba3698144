"""Messages as ids of a checkpoint's chat template, turn by turn: ids are only ever appended."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rltrain.chat.assistant_turn import AssistantTurn, DrawnText, Reasoning, with_ids
from rltrain.chat.continuability import Continuability, find_out, require_tools
from rltrain.chat.conversation import Conversation
from rltrain.chat.increments import OPENING, Increments
from rltrain.chat.recorded_messages import new_messages
from rltrain.chat.standing_text import UNFINISHED_CHARACTER, before_marks, settled, special_tokens
from rltrain.chat.template import ChatTemplate, RenderError
from rltrain.chat.tool_calls import OPENINGS, ParsedCalls, parser_by_name, parser_of
from rltrain.chat.turn_end import TurnEnd
from rltrain.environments.interface import Message
from rltrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatFormat:
    """How a checkpoint's tokenizer and chat template write a conversation. Holds no conversation itself.

    Safe to use from several threads.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] = MappingProxyType({}),
        end_tokens: Collection[int] = (),
        tool_parser: str | None = None,
    ) -> None:
        """`tools` are schemas as OpenAI writes them, `template_options` variables of the template.

        `end_tokens`: what ends a turn beside the tokenizer's eos_token and the token by which the template closes it.
        `tool_parser`: a name in `PARSERS`; None: with tools the one that the template calls for, else none.
        """
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, tools, template_options)
        self.end = TurnEnd.of(self.template, end_tokens)
        self._increments = Increments(self.template, self.end)
        if tool_parser is None and tools:
            tool_parser = parser_of(self.template.source)
        self.tool_parser = tool_parser
        self._parse = None if tool_parser is None else parser_by_name(tool_parser)
        self._openings = () if tool_parser is None else OPENINGS[tool_parser]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens at which an engine ends a turn."""
        return self.end.tokens

    @cached_property
    def continuability(self) -> Continuability:
        """Whether conversations of this template can go on, and whether they stay what the template makes of them."""
        return find_out(self.template, self._increments)

    def require_tools(self) -> None:
        """Raises ConfigError where the template does not write the tools."""
        require_tools(self.template)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids up to where the model's turn begins. Raises DataError where the template refuses `messages`."""
        try:
            return self.template.encode(self.template.render(messages))
        except RenderError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the tokenizer's chat template refuses messages of roles {roles}: {error} "
                "(see data.system_prompt; data.chat_template=never takes plain texts as they are)"
            ) from error

    def following(self, messages: Sequence[Message]) -> str:
        """The text that follows a turn which `messages` answer, its closing included, up to where the next begins.
        Raises DataError where the template has no place for `messages`."""
        return self._increments.following(messages)

    def continuation(self, turn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow the drawn ids `turn`: what still closes it, `messages`, up to where the next turn begins.

        They are encoded by themselves, so no token of theirs reaches into what the model drew. Raises DataError where
        the template has no place for `messages`.
        """
        following = self.template.encode(self.following(messages))
        return tuple(self.end.missing(turn, following))

    def message_of(self, turn: Sequence[int], *, mark: int | str = 0, taken_ids: Collection[str] = ()) -> AssistantTurn:
        """What `turn` says. Never raises: what cannot be understood stays text.

        Calls of equal turns get other ids where their `mark` differs, such as the turn's position. No call gets one of
        `taken_ids`.
        """
        ended = self.end.ended(turn)
        tokens = list(turn[:-1] if ended else turn)
        drawn = DrawnText(self.tokenizer, tokens, self._special)
        reasoning = self._reasoning
        thought = reasoning.end(drawn.text, ended=ended) if reasoning else None
        answer = thought or 0
        calls = ParsedCalls(len(drawn.text) - answer)
        if self._parse is not None:
            calls = self._parse(drawn.text[answer:], self.template.tools)
        stretches = [(0, calls.begin), *calls.malformed]
        content = "".join(drawn.said(answer + begin, answer + end) for begin, end in stretches)
        text = drawn.said(0, answer) + content
        return AssistantTurn(
            text=text,
            content=text if thought is None else content.lstrip("\n"),
            tool_calls=with_ids(calls.calls, turn, mark, taken_ids),
            reasoning=reasoning.inside(drawn.text[:answer]) if reasoning and thought is not None else None,
            malformed=bool(calls.malformed),
            ended=ended,
        )

    def standing_content(self, turn: Sequence[int]) -> str:
        """Returns the beginning of an unfinished turn's content that stays, whatever is drawn next: no tool call, and
        no thought."""
        drawn = DrawnText(self.tokenizer, settled(self.tokenizer, turn, self._special), self._special)
        reasoning, answer = self._reasoning, 0
        thought = reasoning.end(drawn.text, ended=False) if reasoning else None
        if thought is not None:
            answer = thought
        elif reasoning and not reasoning.begins_answer(drawn.text):
            return ""
        end = answer + len(before_marks(drawn.text[answer:], self._openings))
        content = drawn.said(answer, end).rstrip(UNFINISHED_CHARACTER)
        return content if thought is None else content.lstrip("\n")

    def extends(self, seen: Conversation, messages: Sequence[Message]) -> tuple[Message, ...] | None:
        """The messages that are new where `messages`, as a client sends them whole, go on from `seen`; None: a branch.

        It is one too while `seen` awaits the model, whose last request is not answered then, and where the template has
        no place for what is new, a system prompt that it moves to the front for instance.
        """
        new = new_messages(seen, messages)
        try:
            return new if new and self._increments.following(new) else None
        except DataError:
            return None

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_tokens(self.tokenizer)

    @cached_property
    def _reasoning(self) -> Reasoning | None:
        try:
            opened = self.template.render([OPENING])
        except RenderError:
            opened = ""
        return Reasoning.of(self.template.source, opened)
