"""Tool calls as families of models write them. Nothing that a model wrote raises: what is no call stays text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rltrain.environments.interface import ToolCall
from rltrain.errors import ConfigError, one_of
from rltrain.json_text import is_finite, parse_json, parse_json_at, with_escapes

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ParsedCalls:
    """What a parser found in a turn's text, which has its special tokens."""

    begin: int
    """Where the first call begins, malformed ones included; the text's length where there is none."""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[tuple[int, int], ...] = ()
    """Stretches that begin like a call and are none."""


Parser = Callable[[str, Tools], ParsedCalls]


class _NotACall(Exception):  # noqa: N818 - a verdict; never leaves this file
    pass


def parse_hermes(text: str, tools: Tools) -> ParsedCalls:
    """Hermes, Qwen2.5, Qwen3, SmolLM3: <tool_call>{"name": .., "arguments": {..}}</tool_call>, any number of them."""
    return _each(text, "<tool_call>", "</tool_call>", lambda body: [_call_of_json(body)])


def parse_qwen3_coder(text: str, tools: Tools) -> ParsedCalls:
    """Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""
    opening = "<tool_call>" if "<tool_call>" in text else "<function="
    return _each(
        text, opening, "</tool_call>", lambda body: [_call_of_tags(body, tools)], keeps=opening == "<function="
    )


def parse_llama3_json(text: str, tools: Tools) -> ParsedCalls:
    """Llama-3.1 and later: the whole turn is {"name": .., "parameters": {..}}, several of them apart by semicolons."""
    tag = "<|python_tag|>"
    begin = text.find(tag)
    stripped = len(text) - len(text.lstrip())
    if begin < 0 and not text.startswith("{", stripped):
        return ParsedCalls(len(text))
    begin, body = (begin, begin + len(tag)) if begin >= 0 else (stripped, stripped)
    try:
        return ParsedCalls(begin, tuple(_calls_in_a_row(text[body:])))
    except _NotACall:
        looks_like_a_call = text.startswith(tag, begin) or re.match(r'\{\s*"name"\s*:', text[begin:]) is not None
        return ParsedCalls(begin, malformed=((begin, len(text)),)) if looks_like_a_call else ParsedCalls(len(text))


def parse_mistral(text: str, tools: Tools) -> ParsedCalls:
    """Mistral: [TOOL_CALLS][{"name": .., "arguments": {..}, "id": ..}], or later [TOOL_CALLS]name[ARGS]{..}."""
    return _each(text, "[TOOL_CALLS]", None, _calls_of_mistral)


def parse_deepseek(text: str, tools: Tools) -> ParsedCalls:
    """DeepSeek-V3, R1 and V3.1: <｜tool▁call▁begin｜>..<｜tool▁sep｜>..<｜tool▁call▁end｜>, any number of them."""
    parsed = _each(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", lambda body: [_call_of_deepseek(body)])
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

_SIGNS = (
    ("<arg_key>", None),  # GLM-4.5 writes other calls between Hermes' marks
    ("<function=", "qwen3_coder"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython<|end_header_id|>", "llama3_json"),
)
"""What a template of each family has; the first that is found decides."""


_BETWEEN_CALLS = "; \t\r\n"


def parser_of(template: str) -> str | None:
    """The name of the parser for what a template of this source has its model write; None: none is known."""
    return next((name for sign, name in _SIGNS if sign in template), None)


def parser_by_name(name: str) -> Parser:
    """Raises ConfigError for a name that is not in `PARSERS`."""
    if name not in PARSERS:
        raise ConfigError(f"there is no parser of tool calls named {name!r}; expected {one_of(name, PARSERS)}")
    return PARSERS[name]


def _each(
    text: str, opening: str, closing: str | None, read: Callable[[str], list[ToolCall]], keeps: bool = False
) -> ParsedCalls:
    """What `read` makes of every stretch from `opening` to `closing`, to the next `opening` or to the text's end.

    `keeps`: `opening` is part of what is read.
    """
    begins = [match.start() for match in re.finditer(re.escape(opening), text)]
    calls: list[ToolCall] = []
    malformed: list[tuple[int, int]] = []
    for begin, limit in pairwise([*begins, len(text)]):
        inside = begin if keeps else begin + len(opening)
        end = text.rfind(closing, inside, limit) if closing else -1
        try:
            calls += read(text[inside : end if end >= 0 else limit])
        except _NotACall:
            malformed.append((begin, limit if end < 0 or closing is None else end + len(closing)))
    return ParsedCalls(begins[0] if begins else len(text), tuple(calls), tuple(malformed))


def _json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise _NotACall from error


def _call(name: Any, arguments: Any, id: Any = None) -> ToolCall:
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not is_finite(arguments):
        raise _NotACall
    return ToolCall(with_escapes(name), with_escapes(arguments), id if isinstance(id, str) else "")


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not ("arguments" in value or "parameters" in value):
        raise _NotACall
    return _call(value.get("name"), value.get("arguments", value.get("parameters")), value.get("id"))


def _call_of_json(body: str) -> ToolCall:
    return _call_of(_json(body))


def _calls_in_a_row(text: str) -> list[ToolCall]:
    calls, rest = [], text.lstrip(_BETWEEN_CALLS)
    while rest:
        try:
            value, end = parse_json_at(rest)
        except ValueError as error:
            raise _NotACall from error
        calls.append(_call_of(value))
        rest = rest[end:].lstrip(_BETWEEN_CALLS)
    if not calls:
        raise _NotACall
    return calls


def _calls_of_mistral(body: str) -> list[ToolCall]:
    named = re.match(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(\{.*)$", body, re.DOTALL)
    if named:
        return [_call(named[1], _json(named[3]), named[2])]
    values = _json(body)
    if not isinstance(values, list) or not values:
        raise _NotACall
    return [_call_of(value) for value in values]


def _call_of_deepseek(body: str) -> ToolCall:
    before, separator, after = body.partition("<｜tool▁sep｜>")
    if not separator:
        raise _NotACall
    fenced = re.match(r"\s*([^\n]*)\n```(?:json)?\n(.*)\n```\s*$", after, re.DOTALL)
    return _call(fenced[1].strip(), _json(fenced[2])) if fenced else _call(before.strip(), _json(after))


def _call_of_tags(body: str, tools: Tools) -> ToolCall:
    function = re.match(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?$", body, re.DOTALL)
    if not function:
        raise _NotACall
    name, inside = function[1].strip(), function[2]
    parameter = r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)"
    if re.sub(parameter, "", inside, flags=re.DOTALL).strip():
        raise _NotACall
    types = _parameter_types(name, tools)
    values = {key.strip(): value for key, value in re.findall(parameter, inside, re.DOTALL)}
    return _call(name, {key: _typed(value, types.get(key)) for key, value in values.items()})


def _parameter_types(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(value: str, type: Any) -> Any:
    """A parameter as its tool's schema has it: a value of JSON, but for texts, which are written as they are."""
    value = value.removeprefix("\n").removesuffix("\n")
    if type == "string":
        return value
    try:
        parsed = parse_json(value)
    except ValueError:
        return value
    return parsed if is_finite(parsed) else value
