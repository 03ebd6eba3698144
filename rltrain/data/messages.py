"""Chat messages and tools as rows hold them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.chat.template import text_of
from rltrain.data.rows import BadRow, Struct
from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json

Message = dict[str, Any]
"""One chat message: "role", "content" as a text and, where they apply, KEPT."""
AS_GIVEN = ("arguments", "parameters")
"""In an object under one of these a null is a value like others, unless the object is a Struct."""
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def parse_messages(value: Sequence[Any], key: str) -> list[Message]:
    """Raises BadRow for what is no message, or says nothing that a chat template could write."""
    return [_parse_message(message, key) for message in value]


def _parse_message(message: Any, key: str) -> Message:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        kept = {name: _without_nulls(message[name]) for name in KEPT if message.get(name)}
        content, calls = message.get("content"), kept.get("tool_calls")
        is_content = isinstance(content, str | list) or (content is None and calls is not None)
        if is_content and (calls is None or _are_calls(calls)):
            try:
                return {"role": message["role"], "content": text_of(content), **kept}
            except DataError as error:
                raise BadRow(f"has {error} under {key!r}") from None
    raise BadRow(
        f"has the chat message {shown(message)} under {key!r}; expected role and content, both texts, and in the place "
        "of content perhaps tool_calls, a list of {function: {name, arguments}}"
    )


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )


def parse_tools(value: Any, key: str) -> str:
    """Returns the JSON text of a list of tools; empty where the row has none. Of a list of objects fields that are null
    are left out, except for those within `parameters` that no Struct has."""
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = parse_json(value)
        except ValueError as error:
            raise BadRow(f"has {shown(value)} under {key!r}, which is not JSON: {error}") from None
    elif value is not None and value != "":
        tools = _without_nulls(value)
    if not tools:
        return ""
    if isinstance(tools, list) and all(isinstance(tool, dict) and _is_named(tool) for tool in tools):
        return json.dumps(tools, ensure_ascii=False, separators=(",", ":"))
    raise BadRow(f"has {shown(value)} under {key!r}; expected tools: a list of {{type, function: {{name, ...}}}}")


def _is_named(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function", tool)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _without_nulls(value: Any, *, as_given: bool = False) -> Any:
    """Returns a value without fields that are null. `as_given`: it stands under one of AS_GIVEN."""
    if isinstance(value, Mapping):
        keeps_nulls = as_given and not isinstance(value, Struct)
        return {
            name: _without_nulls(part, as_given=as_given or name in AS_GIVEN)
            for name, part in value.items()
            if keeps_nulls or part is not None
        }
    return [_without_nulls(part, as_given=as_given) for part in value] if isinstance(value, list) else value


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
