"""A turn of the model: its text, its reasoning and its tool calls, in the formats of model families."""

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rltrain.data.chat_template import as_text
from rltrain.environments.interface import ToolCall
from rltrain.errors import ConfigError, one_of
from rltrain.runtime.json_text import is_finite, parse_json, parse_json_at, with_escapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The parts of a model's turn: text, reasoning and tool calls.

REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
LEAD_TOKENS = 16
"""Tokens decoded before others, for tokenizers whose text depends on earlier tokens."""
ID_LETTERS = 9
"""Length of a call's id. Mistral's templates accept no other length."""
ID_FORM = re.compile(rf"[A-Za-z0-9]{{{ID_LETTERS}}}")


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the model for readers of messages. It is never turned into ids again."""

    text: str
    """Text before the first tool call, with reasoning and without special tokens."""
    content: str
    """`text` without its reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """Text between the family's marks of reasoning. None if the family or the turn has none."""
    malformed: bool = False
    """Whether something begins like a tool call but is none. It is then part of `text`."""
    ended: bool = True
    """Whether the model ended the turn. Otherwise a limit cut it."""

    def message(self) -> dict[str, Any]:
        """Returns the turn as an OpenAI message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": as_text(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class DrawnText:
    """The text of generated ids, with a record of its special tokens. Other text may only look like them.

    Without the special tokens it equals the text of a tokenizer that skips them.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], special: frozenset[int]) -> None:
        said = [token for token in tokens if token not in special]
        plain = _decoded(tokenizer, said)
        self.text = ""
        self._said: list[tuple[int, int]] = []
        num_said = placed = 0
        for is_special, run in _runs(tokens, special):
            if is_special:
                self.text += _decoded(tokenizer, run)
                continue
            lead, before, num_said = max(0, num_said - LEAD_TOKENS), num_said, num_said + len(run)
            end = len(plain)
            if num_said < len(said):
                longer, shorter = said[lead:num_said], said[lead:before]
                added = len(_decoded(tokenizer, longer)) - len(_decoded(tokenizer, shorter))
                end = min(placed + max(added, 0), len(plain))
            self._said.append((len(self.text), len(self.text) + end - placed))
            self.text += plain[placed:end]
            placed = end

    def said(self, begin: int, end: int) -> str:
        """Returns the text from `begin` to `end` without special tokens."""
        stretches = ((max(first, begin), min(last, end)) for first, last in self._said)
        return "".join(self.text[first:last] for first, last in stretches if first < last)


def _decoded(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else ""


def _runs(tokens: Sequence[int], special: frozenset[int]) -> list[tuple[bool, list[int]]]:
    runs: list[tuple[bool, list[int]]] = []
    for token in tokens:
        if runs and not runs[-1][0] and token not in special:
            runs[-1][1].append(token)
        else:
            runs.append((token in special, [token]))
    return runs


@dataclass(frozen=True)
class Reasoning:
    """The marks around a model family's reasoning."""

    opening: str
    closing: str
    begun: bool
    """Whether the prompt opens the reasoning, so the model's turn begins inside it."""

    @classmethod
    def of(cls, template: str, generation_prompt: str) -> "Reasoning | None":
        """Returns the marks in a template's source, or None. `generation_prompt` is the template's text before the
        model's turn."""
        for opening, closing in REASONING_MARKS:
            if closing in template:
                return cls(opening, closing, generation_prompt.rstrip().endswith(opening))
        return None

    def end(self, text: str, *, ended: bool) -> int | None:
        """Returns the place in a turn's text where the answer begins, or None if the turn has no reasoning.

        A turn has reasoning if the prompt or the turn begins with the opening mark. A turn may lack the closing mark
        and still be an answer: if the model ended it and only the prompt opened the reasoning. The prompt after a tool
        result may not have done so.
        """
        begins = text.lstrip().startswith(self.opening)
        place = text.find(self.closing)
        if place >= 0 and (begins or self.begun):
            return place + len(self.closing)
        return len(text) if begins or (self.begun and not ended) else None

    def begins_answer(self, text: str) -> bool:
        """Returns whether an unfinished turn can get no reasoning any more. `text` is its text so far, without
        reasoning."""
        return not self.begun and not self.opening.startswith(text.lstrip()[: len(self.opening)])

    def inside(self, text: str) -> str:
        """Returns the reasoning in `text` without its marks. A cut text may lack the closing mark."""
        return text.strip().removeprefix(self.opening).removesuffix(self.closing).strip("\n")


def with_ids(
    calls: Sequence[ToolCall], turn: Sequence[int], mark: int | str, taken: Collection[str] = ()
) -> tuple[ToolCall, ...]:
    """Returns the calls, each with a unique id that every template accepts.

    Ids written by the model are kept if they qualify. The others are made from the turn and its mark, so equal turns
    with equal marks get equal ids. `taken` has ids of earlier calls.
    """
    digest = hashlib.sha256(repr((tuple(turn), mark)).encode()).hexdigest()
    made = (hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:ID_LETTERS] for number in itertools.count())
    used, named = set(taken), []
    for call in calls:
        is_usable = ID_FORM.fullmatch(call.id) is not None and call.id not in used
        id = call.id if is_usable else next(id for id in made if id not in used)
        used.add(id)
        named.append(replace(call, id=id))
    return tuple(named)


# Parsers of tool calls by model family. They never raise for a model's text: text without a valid call stays text.

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ParsedCalls:
    """The calls found in a turn's text. The text has its special tokens."""

    begin: int
    """Place of the first call, even a malformed one. The text's length if there is none."""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[tuple[int, int], ...] = ()
    """(begin, end) of stretches that begin like a call but are none."""


Parser = Callable[[str, Tools], ParsedCalls]
Reader = Callable[[str, int], tuple[list[ToolCall], int]]
"""Reads the calls at a place of a text. Returns them and the place after them. Raises _NotACall."""


class _NotACall(Exception):  # noqa: N818 - a verdict; never leaves this file
    pass


def parse_hermes(text: str, tools: Tools) -> ParsedCalls:
    """Parses the calls of Hermes, Qwen2.5, Qwen3 and SmolLM3: <tool_call>{"name": .., "arguments": {..}}</tool_call>.

    A turn has any number of them.
    """
    return _each(text, "<tool_call>", "</tool_call>", _read_json_call)


def parse_qwen3_coder(text: str, tools: Tools) -> ParsedCalls:
    """Parses Qwen3-Coder's calls: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""
    wrapped, bare = text.find("<tool_call>"), text.find("<function=")
    is_bare = bare >= 0 and (wrapped < 0 or bare < wrapped)
    opening = "<function=" if is_bare else "<tool_call>"

    def read(text: str, begin: int) -> tuple[list[ToolCall], int]:
        return _read_tags(text, begin - len(opening) if is_bare else begin, opening, tools)

    return _each(text, opening, "</tool_call>", read)


def parse_llama3_json(text: str, tools: Tools) -> ParsedCalls:
    """Parses the calls of Llama-3.1 and later. The whole turn is {"name": .., "parameters": {..}}.

    Semicolons separate several calls.
    """
    tag, start = "<|python_tag|>", len(text) - len(text.lstrip())
    tagged = [(match.start(), match.end()) for match in re.finditer(re.escape(tag), text)]
    for begin, body in [(start, start), *tagged] if text.startswith("{", start) else tagged:
        try:
            calls = _calls_in_a_row(text[body:])
        except _NotACall:
            continue
        first = tagged[0][0] if tagged and begin > start else begin
        return ParsedCalls(first, tuple(calls), ((first, begin),) if first < begin else ())
    if tagged or re.match(r'\{\s*"name"\s*:', text[start:]):
        begin = tagged[0][0] if tagged else start
        return ParsedCalls(begin, malformed=((begin, len(text)),))
    return ParsedCalls(len(text))


def parse_mistral(text: str, tools: Tools) -> ParsedCalls:
    """Parses Mistral's calls: [TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}], or later
    [TOOL_CALLS]name[ARGS]{..}."""
    return _each(text, "[TOOL_CALLS]", None, _read_mistral)


def parse_deepseek(text: str, tools: Tools) -> ParsedCalls:
    """Parses the calls of DeepSeek-V3, R1 and V3.1: <｜tool▁call▁begin｜>..<｜tool▁sep｜>..<｜tool▁call▁end｜>.

    A turn has any number of them.
    """
    parsed = _each(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_deepseek)
    frame = text.find("<｜tool▁calls▁begin｜>")
    if frame < 0 or frame > parsed.begin:
        return parsed
    if parsed.begin == len(text):
        return ParsedCalls(frame, malformed=((frame, len(text)),))
    return ParsedCalls(frame, parsed.calls, parsed.malformed)


PARSERS: dict[str, Parser] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    "deepseek": parse_deepseek,
}

OPENINGS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "llama3_json": ("{", "<|python_tag|>"),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
}
"""Marks by parser. Every call begins with one of them."""

_SIGNS = (
    ("<arg_key>", None),  # GLM-4.5 writes other calls between Hermes' marks
    ("<function=", "qwen3_coder"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython<|end_header_id|>", "llama3_json"),
)
"""Signs of a family in its templates, and its parser. The first sign found decides."""


_BETWEEN_CALLS = "; \t\r\n"
_SPACE = re.compile(r"\s+")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_DEEPSEEK_HEAD = re.compile(r"((?:(?!<｜tool▁).)*)<｜tool▁sep｜>", re.DOTALL)
_DEEPSEEK_FENCE = re.compile(r"\s*([^\n]{0,256})\n```(?:json)?\n")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")


def parser_of(template: str) -> str | None:
    """Returns the name of the parser for calls in the format of a template's source, or None if none is known."""
    return next((name for sign, name in _SIGNS if sign in template), None)


def parser_by_name(name: str) -> Parser:
    """Returns the parser. Raises ConfigError for a name outside `PARSERS`."""
    if name not in PARSERS:
        raise ConfigError(f"there is no parser of tool calls named {name!r}; expected {one_of(name, PARSERS)}")
    return PARSERS[name]


def _each(text: str, opening: str, closing: str | None, read: Reader) -> ParsedCalls:
    """Calls `read` after each `opening` outside of earlier calls, and returns all calls found.

    A call is followed by its `closing`, the next `opening` or the end of the text. A malformed call ends at its last
    `closing` before the next `opening`, or else at that opening.
    """
    first = place = text.find(opening)
    calls: list[ToolCall] = []
    malformed: list[tuple[int, int]] = []
    while place >= 0:
        inside = place + len(opening)
        try:
            made, end = read(text, inside)
            end = _behind_call(text, end, opening, closing)
            calls += made
        except _NotACall:
            following = text.find(opening, inside)
            limit = following if following >= 0 else len(text)
            closed = text.rfind(closing, inside, limit) if closing else -1
            end = limit if closed < 0 or closing is None else closed + len(closing)
            malformed.append((place, end))
        place = text.find(opening, end)
    return ParsedCalls(first if first >= 0 else len(text), tuple(calls), tuple(malformed))


def _behind_call(text: str, end: int, opening: str, closing: str | None) -> int:
    """Returns the place after the closing of a call that was read up to `end`."""
    end = _skip_space(text, end)
    if closing and text.startswith(closing, end):
        return end + len(closing)
    if end < len(text) and not text.startswith(opening, end):
        raise _NotACall
    return end


def _skip_space(text: str, begin: int) -> int:
    match = _SPACE.match(text, begin)
    return match.end() if match else begin


def _json_at(text: str, begin: int) -> tuple[Any, int]:
    """Returns the JSON value at a place, after any space, and the place after the value."""
    try:
        return parse_json_at(text, _skip_space(text, begin))
    except ValueError as error:
        raise _NotACall from error


def _call(name: Any, arguments: Any, id: Any = None) -> ToolCall:
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            raise _NotACall from error
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not is_finite(arguments):
        raise _NotACall
    return ToolCall(with_escapes(name), with_escapes(arguments), id if isinstance(id, str) else "")


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not ("arguments" in value or "parameters" in value):
        raise _NotACall
    return _call(value.get("name"), value.get("arguments", value.get("parameters")), value.get("id"))


def _read_json_call(text: str, begin: int) -> tuple[list[ToolCall], int]:
    value, end = _json_at(text, begin)
    return [_call_of(value)], end


def _calls_in_a_row(text: str) -> list[ToolCall]:
    calls, rest = [], text.lstrip(_BETWEEN_CALLS)
    while rest:
        value, end = _json_at(rest, 0)
        calls.append(_call_of(value))
        rest = rest[end:].lstrip(_BETWEEN_CALLS)
    if not calls:
        raise _NotACall
    return calls


def _read_mistral(text: str, begin: int) -> tuple[list[ToolCall], int]:
    if named := _MISTRAL_NAME.match(text, begin):
        arguments, end = _json_at(text, named.end())
        return [_call(named[1], arguments, named[2])], end
    values, end = _json_at(text, begin)
    if not isinstance(values, list) or not values:
        raise _NotACall
    return [_call_of(value) for value in values], end


def _read_deepseek(text: str, begin: int) -> tuple[list[ToolCall], int]:
    """Reads one call. Its arguments are fenced after the word "function", or bare after the function's name."""
    head = _DEEPSEEK_HEAD.match(text, begin)
    if not head:
        raise _NotACall
    fence = _DEEPSEEK_FENCE.match(text, head.end())
    arguments, end = _json_at(text, fence.end() if fence else head.end())
    if not fence:
        return [_call(head[1].strip(), arguments)], end
    end = _skip_space(text, end)
    if not text.startswith("```", end):
        raise _NotACall
    return [_call(fence[1].strip(), arguments)], end + len("```")


def _read_tags(text: str, begin: int, opening: str, tools: Tools) -> tuple[list[ToolCall], int]:
    function = _FUNCTION.match(text, begin)
    if not function:
        raise _NotACall
    name, end = function[1].strip(), function.end()
    types, values = _parameter_types(name, tools), {}
    while parameter := _PARAMETER.match(text, end):
        limit = _end_of_value(text, parameter.end(), opening, types)
        key = parameter[1].strip()
        values[key] = _typed(text[parameter.end() : limit], types.get(key))
        end = limit + len("</parameter>") if text.startswith("</parameter>", limit) else limit
    closed = re.compile(r"\s*</function>").match(text, end)
    return [_call(name, values)], closed.end() if closed else end


def _end_of_value(text: str, begin: int, opening: str, known: Collection[str]) -> int:
    """Returns the end of a parameter's value. The value is written verbatim and may contain any mark.

    It ends at the first mark that is followed by a valid rest of the call. If a model leaves </parameter> out, a line
    with another parameter ends the value. This must be one of the `known` parameters if the tool's schema names any.
    """
    names = "|".join(map(re.escape, known)) or r"[^>\n]+"
    ends = (
        r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))"
        rf"|</function>(?=\s*(?:</tool_call>|{opening}|\Z))"
        rf"|\n(?=[ \t]*<parameter=(?:{names})>)"
        r"|</tool_call>(?=\s*<tool_call>\s*<function=)"
    )
    found = re.search(ends, text[begin:]) or re.search(r"</tool_call>|\Z", text[begin:])
    return begin + found.start() if found else len(text)


def _parameter_types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(value: str, type: Any) -> Any:
    """Returns a parameter's value by its tool's schema. Strings are written verbatim, other values as JSON."""
    value = value.removeprefix("\n").removesuffix("\n")
    if type == "string":
        return value
    try:
        parsed = parse_json(value)
    except ValueError:
        return value
    return parsed if is_finite(parsed) else value


# The part of an unfinished turn's text that later tokens cannot change.

UNFINISHED_CHARACTER = "\ufffd"
"""The tokenizers' character for bytes that are no complete character, or not yet."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Returns the tokens that are left out of texts."""
    added = tokenizer.added_tokens_decoder
    return frozenset([*tokenizer.all_special_ids, *(token for token, of in added.items() if of.special)])


def settled(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], special: Collection[int]) -> Sequence[int]:
    """Returns the tokens before a final run of single bytes.

    Tokenizers with byte tokens decode a run as a whole. One byte that does not fit changes every character of the run.
    Special tokens do not end a run, because texts are decoded without them.
    """
    end = len(tokens)
    for place in range(len(tokens) - 1, -1, -1):
        if BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(tokens[place]))):
            end = place
        elif tokens[place] not in special:
            break
    return tokens[:end]


def before_marks(text: str, marks: Collection[str]) -> str:
    """Returns the text before the first of the marks, and before an end that may begin one."""
    whole = (place for mark in marks if (place := text.find(mark)) >= 0)
    begun = (len(text) - size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return text[: min((*whole, *begun), default=len(text))]
