"""Messages as ids of a chat template, turn by turn. Ids are only ever appended."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from rltrain.data.assistant_turn import (
    OPENINGS,
    REASONING_MARKS,
    UNFINISHED_CHARACTER,
    AssistantTurn,
    DrawnText,
    ParsedCalls,
    Reasoning,
    before_marks,
    parser_by_name,
    parser_of,
    settled,
    special_tokens,
    with_ids,
)
from rltrain.data.chat_template import (
    PLACEHOLDER,
    TOOL_ROLES,
    ChatTemplate,
    RenderError,
    TurnEnd,
    arguments_of,
    text_of,
)
from rltrain.data.image_parts import images_of, with_sources, written
from rltrain.data.images import Context, ImageRules
from rltrain.environments.interface import Message
from rltrain.errors import ConfigError, DataError
from rltrain.models.vision import PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The template's text after the model's turn. A short conversation with a placeholder is rendered to find it.

OPENING: Message = {"role": "user", "content": "."}
NUMBERS_IMAGES = "add_vision_id"
"""The variable of Qwen's templates that numbers images. Text after a turn alone would begin at 1 again."""
CALL_ID = "call00000"
"""Nine letters and digits, as Mistral's templates require."""


class Increments:
    """The text after a model's turn: its closing, new messages and the start of the next turn.

    A placeholder replaces the turn, so no text of the model is rendered. The text after it is encoded alone, so no
    token crosses the boundary.
    """

    def __init__(self, template: ChatTemplate, end: TurnEnd) -> None:
        self._template = template
        self._end_texts = [
            str(template.tokenizer.convert_ids_to_tokens(token)) for token in sorted(end.tokens & end.added)
        ]
        self._shown_roles: dict[str, bool] = {}

    def following(self, messages: Sequence[Message]) -> str:
        """Returns the text after a turn answered by `messages`. Raises DataError if the template has no
        place for them."""
        if not messages:
            raise DataError("no message follows the model's turn; expected at least one, of a user or a tool")
        hidden = sorted({str(message["role"]) for message in messages if not self._shows(str(message["role"]))})
        if hidden:
            raise DataError(
                f"the chat template does not write messages of role {', '.join(hidden)} after the model's turn: it "
                "moves them before earlier turns or leaves them out; expected messages of the user or of tools"
            )
        try:
            return self._render(messages)
        except RenderError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template refuses messages of roles {roles} after the model's turn: {error}"
            ) from error

    def _shows(self, role: str) -> bool:
        if role not in self._shown_roles:
            message = {"role": role, "content": "rltrainsmessage"}
            try:
                self._shown_roles[role] = message["content"] in self._render([message])
            except RenderError:
                return True  # the template may accept it together with other messages
        return self._shown_roles[role]

    def _render(self, messages: Sequence[Message]) -> str:
        answered = [_with_call_id(self._template.bare(message)) for message in messages]
        mark = _unused_mark(answered, self._template.tools)
        refusal = RenderError("it does not write the model's turn")
        for placeholder in self._placeholders(mark, answered):
            try:
                text = self._template.render([OPENING, placeholder, *answered])
            except RenderError as error:
                refusal = error
                continue
            if text.count(mark) != 1:
                continue
            following = text.partition(mark)[2]
            if not placeholder.get("tool_calls"):
                return following
            ends = [place for end in self._end_texts if (place := following.find(end)) >= 0]
            if ends:
                return following[min(ends) :]
        raise refusal

    def _placeholders(self, mark: str, messages: Sequence[Message]) -> Iterator[Message]:
        """Yields turns that `messages` may answer. Tool results follow calls if the template writes calls."""
        results = []
        for message in messages:
            if message["role"] not in TOOL_ROLES:
                break
            results.append(message)
        for answered in (results, results[-1:]) if len(results) > 1 else (results,):
            if answered:
                calls = [self._call(result, mark if result is answered[-1] else ".") for result in answered]
                yield {"role": "assistant", "content": None, "tool_calls": calls}
                yield {"role": "assistant", "content": "", "tool_calls": calls}
        yield {"role": "assistant", "content": mark}

    def _call(self, result: Message, argument: str) -> dict[str, Any]:
        name = result.get("name") or next(iter(tool_names(self._template.tools)), "tool")
        function = {"name": name, "arguments": {"argument": argument}}
        return {"id": result["tool_call_id"], "type": "function", "function": function}


def tool_names(tools: Sequence[Any]) -> list[str]:
    return [str(tool.get("function", tool).get("name", "")) for tool in tools]


def _with_call_id(message: Message) -> Message:
    """Adds a call's id to a tool result. Templates ask for it, but environments with one tool at a time often leave it
    out."""
    return {"tool_call_id": CALL_ID, **message} if message["role"] in TOOL_ROLES else message


def _unused_mark(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    present = json.dumps([messages, tools], ensure_ascii=False, default=str)
    mark = PLACEHOLDER
    while mark in present:
        mark += "x"
    return mark


# Checks at the start whether a template can continue conversations, with small examples.

Verdict = Literal["exact", "appended", "refused"]
"""- exact: the appended ids equal the template's rendering of the whole conversation.
- appended: they keep the generated and observed text, but the template would render earlier turns differently.
- refused: the template has no place for the message."""

EXCERPT_CHARS = 40


@dataclass(frozen=True)
class Continuability:
    """The verdicts on messages of the user and tool results after a turn of the model."""

    user: Verdict
    tool: Verdict
    differences: tuple[str, ...]
    """Differences of the whole rendered conversation from the appended one, in words."""
    refusals: tuple[str, ...]

    def require(self, *roles: Literal["user", "tool"]) -> None:
        """Raises ConfigError if messages of `roles` cannot follow a turn of the model."""
        verdicts = {"user": self.user, "tool": self.tool}
        if refused := [role for role in roles if verdicts[role] == "refused"]:
            raise ConfigError(
                f"messages of role {', '.join(refused)} cannot follow a turn of the model: {'; '.join(self.refusals)}. "
                "Let the environment answer with messages of another role (a text is a user's message), or give the "
                "checkpoint's tokenizer a chat_template that takes them"
            )

    @property
    def notice(self) -> str | None:
        """A message on the differences for the user, or None."""
        if not self.differences:
            return None
        return (
            "conversations keep the generated and observed tokens, but the chat template would render earlier turns "
            "differently: " + "; ".join(self.differences)
        )


def find_out(template: ChatTemplate, increments: Increments) -> Continuability:
    """Continues small conversations and compares them with the template's rendering of the whole."""
    probe = _Probe(template, increments)
    user = [*probe.compare(_user_conversations(template, probe.opening))]
    tool = [*probe.compare(_tool_conversations(template, probe.opening))]
    refusals = tuple(result.words for result in (*user, *tool) if result.verdict == "refused")
    differences = {result.words: result.about for result in (*tool, *user) if result.verdict == "appended"}
    words = tuple(f"{about} ({words})" for words, about in differences.items())
    return Continuability(_worst(user), _worst(tool), words, refusals)


def require_tools(template: ChatTemplate) -> None:
    """Raises ConfigError if the template does not write its tools."""
    names = Counter(tool_names(template.tools))
    bare = _opening(ChatTemplate(template.tokenizer, (), template.options)) if names else ""
    shown = _opening(template) if names else ""
    if any(shown.count(name) < bare.count(name) + number for name, number in names.items()):
        raise ConfigError(
            "the checkpoint's chat template does not write the tools that it is given, so the model would not know "
            "them. Describe them in the prompt instead, or use a checkpoint with tools in its template"
        )


def _opening(template: ChatTemplate) -> str:
    """Returns a short prompt, or "" if the template refuses it."""
    try:
        return template.render([OPENING])
    except RenderError:
        return ""


@dataclass(frozen=True)
class _Result:
    verdict: Verdict
    about: str = ""
    words: str = ""


def _worst(results: Sequence[_Result]) -> Verdict:
    verdicts = {result.verdict for result in results}
    return "refused" if "refused" in verdicts else "appended" if "appended" in verdicts else "exact"


@dataclass(frozen=True)
class _Dialogue:
    """A prompt, and turns of the model with their answers."""

    about: str
    prompt: tuple[Message, ...]
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]


def _reasoning_marks(template: ChatTemplate, prompt: str) -> Iterator[str]:
    """Yields the possible beginnings of a model's answer to `prompt`: nothing, or reasoning between its marks."""
    marks = next(((opening, closing) for opening, closing in REASONING_MARKS if closing in template.source), None)
    if marks is None or not prompt.rstrip().endswith(marks[0]):
        yield ""
    if marks is not None and not prompt.rstrip().endswith(marks[1]):
        yield f"{marks[0]}\nthought\n{marks[1]}\n\n"


def _user_conversations(template: ChatTemplate, prompt: str) -> Iterator[_Dialogue]:
    for reasoning in _reasoning_marks(template, prompt):
        steps = tuple(
            (
                {"role": "assistant", "content": f"{reasoning}answer{number}"},
                ({"role": "user", "content": f"asks{number}"},),
            )
            for number in range(2)
        )
        system = {"role": "system", "content": "rules"}
        yield _Dialogue("the system prompt or earlier turns", (system, OPENING), steps)
        yield _Dialogue("reasoning of earlier turns" if reasoning else "earlier turns", (OPENING,), steps)


def _tool_conversations(template: ChatTemplate, prompt: str) -> Iterator[_Dialogue]:
    name = next(iter(tool_names(template.tools)), "tool")
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": {"argument": "x"}}}
    result = {"role": "tool", "tool_call_id": CALL_ID, "name": name, "content": "result"}
    for reasoning in _reasoning_marks(template, prompt):
        calling = {"role": "assistant", "content": reasoning, "tool_calls": [call]}
        about = "reasoning of turns with tool calls" if reasoning else "turns with tool calls"
        yield _Dialogue(about, (OPENING,), ((calling, (result,)), (calling, (result,))))


class _Probe:
    def __init__(self, template: ChatTemplate, increments: Increments) -> None:
        self._template = template
        self._increments = increments
        self.opening = _opening(template)

    def compare(self, dialogues: Iterator[_Dialogue]) -> Iterator[_Result]:
        for dialogue in dialogues:
            try:
                prompt = self._template.render(dialogue.prompt)
            except RenderError:
                continue  # the template has no such prompt, for example no system prompt
            try:
                yield self._verdict(dialogue, prompt)
            except DataError as error:
                yield _Result("refused", dialogue.about, str(error))
                return

    def _verdict(self, dialogue: _Dialogue, appended: str) -> _Result:
        after_turns = [self._increments.following(answer) for _, answer in dialogue.steps]
        messages = list(dialogue.prompt)
        for (turn, answer), following in zip(dialogue.steps, after_turns, strict=True):
            messages += [turn, *answer]
            try:
                whole = self._template.render(messages)
            except RenderError as error:
                return _Result("appended", dialogue.about, f"refused as a whole: {error}")
            if not whole.startswith(appended):
                return _Result("appended", dialogue.about, _first_difference(whole, appended))
            drawn = whole[len(appended) : len(whole) - len(following)]
            if not whole.endswith(following) or not _says(drawn, turn, appended):
                written = _excerpt(whole[len(appended) :])
                return _Result("appended", dialogue.about, f"a turn {_excerpt(str(turn['content']))} becomes {written}")
            appended = whole
        return _Result("exact")


def _says(drawn: str, turn: Message, prompt: str) -> bool:
    """Returns whether `drawn` is `turn` in a model's writing after `prompt`. The prompt may have
    opened the reasoning."""
    content, prompt = str(turn["content"]).strip(), prompt.rstrip()
    begun = next((size for size in range(len(content), 0, -1) if prompt.endswith(content[:size])), 0)
    said = content[begun:].strip()
    return said in drawn if turn.get("tool_calls") else said == drawn.strip()


def _first_difference(whole: str, appended: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(whole, appended, strict=False)) if a != b), len(whole))
    begin = max(0, place - EXCERPT_CHARS // 3)
    return f"{_excerpt(appended[begin:])} becomes {_excerpt(whole[begin:])}"


def _excerpt(text: str) -> str:
    return repr(text[:EXCERPT_CHARS] + ("..." if len(text) > EXCERPT_CHARS else ""))


if TYPE_CHECKING:
    pass


# A conversation for the engine: ids, and a mask of the ids generated by the model.


@dataclass(frozen=True)
class Conversation:
    """A record that only grows. Generated and observed ids are appended, and no id ever changes.

    Every step returns a new record and leaves the old one unchanged, so a conversation can branch anywhere.
    """

    format: "ChatFormat" = field(repr=False, compare=False)
    ids: tuple[int, ...]
    """All ids given to the engine or generated by it."""
    turns: tuple[tuple[int, int], ...]
    """(begin, end) of each turn of the model in `ids`, including its end token."""
    messages: tuple[Message, ...]
    """The same as messages. Those of the model come from `ChatFormat.message_of`."""
    images: tuple[PlacedImage, ...] = ()
    """The images in `ids`, in order."""

    @classmethod
    def begin(cls, format: "ChatFormat", messages: Sequence[Message]) -> "Conversation":
        """Returns a conversation up to the start of the model's first turn. Raises DataError if the template refuses
        `messages`."""
        begun = format.prompt(messages)
        return cls(format, begun.ids, (), tuple(messages), begun.images)

    @property
    def awaits_model(self) -> bool:
        """Returns whether the next turn is the model's. If not, the last turn in the conversation is the model's."""
        return not self.turns or self.turns[-1][1] < len(self.ids)

    @cached_property
    def drawn_mask(self) -> tuple[bool, ...]:
        """Whether the model generated each id."""
        mask = [False] * len(self.ids)
        for begin, end in self.turns:
            mask[begin:end] = [True] * (end - begin)
        return tuple(mask)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The ids of the model's last turn."""
        begin, end = self.turns[-1]
        return self.ids[begin:end]

    def drawn(self, tokens: Sequence[int]) -> "Conversation":
        """Returns the conversation with another complete turn of the model.

        Raises ValueError if it is not the model's turn, or if `tokens` is empty.
        """
        if not self.awaits_model or not tokens:
            raise ValueError("a turn needs tokens, and messages between it and the previous turn")
        said = self.format.message_of(tokens, mark=len(self.turns)).message()
        turn = (len(self.ids), len(self.ids) + len(tokens))
        return replace(self, ids=(*self.ids, *tokens), turns=(*self.turns, turn), messages=(*self.messages, said))

    def observed(self, messages: Sequence[Message]) -> "Conversation":
        """Returns the conversation with answers to the last turn, up to the start of the next one.

        Raises ValueError if the model has had no turn since the last messages. Raises DataError if the template has no
        place for `messages`.
        """
        if self.awaits_model:
            raise ValueError("the model speaks first: it has generated nothing since the last messages")
        following = self.format.continuation(self.last_turn, messages)
        return replace(
            self,
            ids=(*self.ids, *following.ids),
            messages=(*self.messages, *messages),
            images=(*self.images, *following.images_from(len(self.ids))),
        )

    def said(self, turn: int) -> AssistantTurn:
        """Returns the parsed content of turn number `turn`."""
        begin, end = self.turns[turn]
        return self.format.message_of(self.ids[begin:end], mark=turn % len(self.turns))


# Comparison of a client's messages with a recorded conversation. It compares messages, never rendered text.

REASONING_KEYS = ("reasoning_content", "reasoning")


def new_messages(seen: Conversation, messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """Returns the messages after the last turn of `seen`, or None if `messages` do not continue `seen`.

    Clients send the whole conversation with every request. They drop unknown fields (reasoning, ids of calls), write
    empty content in several ways, strip content, and send it in parts. Such messages count as equal. Any other
    difference makes another conversation.
    """
    recorded = seen.messages
    if seen.awaits_model or len(messages) <= len(recorded):
        return None
    try:
        rules = seen.format.images
        goes_on = all(_same(old, new, rules) for old, new in zip(recorded, messages, strict=False))
    except (DataError, LookupError, TypeError, AttributeError):
        return None  # rendering these messages reports the problem
    return tuple(messages[len(recorded) :]) if goes_on else None


def _same(recorded: Message, given: Message, rules: ImageRules | None) -> bool:
    if recorded["role"] != given["role"] or _calls(recorded) != _calls(given):
        return False
    if not _agree(_reasoning(recorded), _reasoning(given)):
        return False
    if recorded["role"] == "tool" and not _agree(recorded.get("tool_call_id"), given.get("tool_call_id")):
        return False
    return _content(recorded, rules) == _content(given, rules)


def _content(message: Message, rules: ImageRules | None) -> tuple[str, list[int]]:
    """Returns a message's text and the keys of its images."""
    content = message.get("content")
    if rules is None or message["role"] == "assistant" or not isinstance(content, list | tuple):
        return text_of(content).strip(), []
    shown = with_sources(message)
    return written(shown["content"]).strip(), [rules.placed(image, 0).key for image in images_of([shown])]


def _agree(recorded: Any, given: Any) -> bool:
    """Returns whether both are equal, or one of them is missing."""
    return not recorded or not given or recorded == given


def _reasoning(message: Message) -> str:
    return next((text_of(message[key]).strip() for key in REASONING_KEYS if message.get(key)), "")


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions: list[Mapping[str, Any]] = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], arguments_of(function.get("arguments"))) for function in functions]


# Messages as ids of a checkpoint's chat template, turn by turn.


class ChatFormat:
    """The format of conversations by a checkpoint's tokenizer and chat template. It holds no conversation.

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
        images: ImageRules | None = None,
    ) -> None:
        """`tools` are schemas in OpenAI's format, `template_options` are variables of the template. Without `images`
        messages have no images.

        `end_tokens` end a turn in addition to the tokenizer's eos_token and the template's closing token. `tool_parser`
        is a name in `PARSERS`. None means the template's parser if there are tools, else no parser.
        """
        self.tokenizer, self.images = tokenizer, images
        self.template = ChatTemplate(tokenizer, tools, template_options, takes_images=images is not None)
        self.end = TurnEnd.of(self.template, end_tokens)
        self._increments = Increments(self.template, self.end)
        if tool_parser is None and tools:
            tool_parser = parser_of(self.template.source)
        self.tool_parser = tool_parser
        self._parse = None if tool_parser is None else parser_by_name(tool_parser)
        self._openings = () if tool_parser is None else OPENINGS[tool_parser]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a turn in an engine."""
        return self.end.tokens

    @cached_property
    def continuability(self) -> Continuability:
        """Whether the template can continue conversations, and whether they equal its rendering of the whole."""
        return find_out(self.template, self._increments)

    def require_tools(self) -> None:
        """Raises ConfigError if the template does not write the tools."""
        require_tools(self.template)

    def prompt(self, messages: Sequence[Message]) -> Context:
        """Returns the ids up to the start of the model's turn. Raises DataError if the template refuses `messages`, or
        if an image cannot be used."""
        return self.placed(self._prompt_ids(messages), messages)

    def num_tokens(self, messages: Sequence[Message]) -> int:
        """Returns the number of ids of `prompt`. Of images it reads headers alone. Raises DataError like `prompt`."""
        ids = self._prompt_ids(messages)
        return len(ids) if self.images is None else self.images.num_placed(ids, images_of(messages))

    def _prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        try:
            return self.template.encode(self.template.render(messages))
        except RenderError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the tokenizer's chat template refuses messages of roles {roles}: {error} "
                "(see data.system_prompt; data.chat_template=never takes plain texts as they are)"
            ) from error

    def placed(self, ids: Sequence[int], messages: Sequence[Message]) -> Context:
        """Returns the ids of a text with the images of `messages` at their placeholders. Raises DataError."""
        return Context(tuple(ids)) if self.images is None else self.images.place(ids, images_of(messages))

    def following(self, messages: Sequence[Message]) -> str:
        """Returns the text after a turn answered by `messages`: its closing, the messages and the start of the next
        turn.

        Raises DataError if the template has no place for `messages`.
        """
        if self.template.options.get(NUMBERS_IMAGES) and self.images is not None and images_of(messages):
            raise DataError(
                f"messages after a turn have images, and data.chat_template_args.{NUMBERS_IMAGES} makes the template "
                "number images from the beginning of the conversation; expected no such option"
            )
        return self._increments.following(messages)

    def continuation(self, turn: Sequence[int], messages: Sequence[Message]) -> Context:
        """Returns the ids after the generated ids `turn`: its missing closing, `messages` and the start of the next
        turn.

        They are encoded alone, so none of their tokens reaches into the model's turn. The places of images count from
        the first of them. Raises DataError if the template has no place for `messages`, or if an image cannot be used.
        """
        following = self.template.encode(self.following(messages))
        return self.placed(self.end.missing(turn, following), messages)

    def message_of(self, turn: Sequence[int], *, mark: int | str = 0, taken_ids: Collection[str] = ()) -> AssistantTurn:
        """Returns the parsed content of `turn`. Never raises: text without a meaning stays text.

        Calls of equal turns get different ids if their `mark` differs, for example the turn's position. No call gets an
        id of `taken_ids`.
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
        """Returns the beginning of an unfinished turn's content that later tokens cannot change.

        It has no tool call and no reasoning.
        """
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
        """Returns the new messages if a client's complete `messages` continue `seen`, or None for a branch.

        It is a branch too while `seen` awaits the model, because its last request then has no answer. The same holds if
        the template has no place for the new messages, for example for a system prompt after a turn.
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
