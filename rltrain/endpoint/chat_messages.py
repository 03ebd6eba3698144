"""The form of chat messages, whichever API they come by."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rltrain.data.chat_template import text_of
from rltrain.endpoint.refused import invalid
from rltrain.environments.interface import Message
from rltrain.errors import DataError


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: Function


class ChatMessage(BaseModel):
    """What else there is in it is the chat template's."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None
    name: str | None = None


_MESSAGES = TypeAdapter(list[ChatMessage])


def checked(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """With contents of text alone, and `system` for `developer`. Raises Refused."""
    try:
        _MESSAGES.validate_python(list(messages))
        made = [{**message, "content": text_of(message.get("content"))} for message in messages]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, ("messages", *first["loc"])))
        raise invalid(f"{place}: {first['msg']}", place) from error
    except DataError as error:
        raise invalid(f"messages: {error}", "messages") from error
    return tuple({**message, "role": "system"} if message["role"] == "developer" else message for message in made)
