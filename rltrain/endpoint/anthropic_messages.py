"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount
from rltrain.data.chat_template import as_text
from rltrain.endpoint.answer import Answer, Choice, Deltas, Event, event_stream
from rltrain.endpoint.openai import stop_strings_of
from rltrain.endpoint.opening import ChatOpening, History, Reply
from rltrain.endpoint.requests import AskedSampling, RequestRefused, invalid, object_in, text_in, unsupported
from rltrain.endpoint.service import (
    DrawingBody,
    SamplingFields,
    Service,
    answer_to,
    read_json,
    repetition,
    session_of,
    wait_for,
)
from rltrain.endpoint.session import Asked

Block = Mapping[str, Any]
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""A code of Anthropic's API. Its clients react to it by sending the same request without a thread."""


class PromptFields(DrawingBody):
    """The fields that determine the tokens of a prompt."""

    model: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None

    def opening(self, service: Service) -> ChatOpening:
        """Returns the chat as a prompt. Raises RequestRefused."""
        if self.thread is not None:
            problem = "thread: this server keeps no threads; expected all messages in every request"
            raise invalid(problem, "thread", THREAD_UNSUPPORTED)
        self.refuse_unknown(service.rules)
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            service.rules.refuse_unless_overridden("tool_choice", choice, "auto or none")
        if (self.thinking or {}).get("type") == "enabled":
            service.rules.refuse_unless_overridden("thinking", "enabled", "disabled")
        system = text_of_blocks(self.system or "", "system")
        messages = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages.{number}")
        tools = [] if choice == "none" else [_function(tool) for tool in self.tools or ()]
        return service.chat(messages, tools, {})


class MessagesRequest(PromptFields, SamplingFields):
    """The body of POST /v1/messages."""

    max_tokens: TokenCount
    stop_sequences: list[str] | None = None
    stream: bool = False

    def asked(self, service: Service) -> Asked:
        """Returns the settings of the turn. Raises RequestRefused."""
        return Asked(
            service.rules.sampling_for(AskedSampling(self.temperature, self.top_p, self.top_k)),
            max_tokens=self.max_tokens,
            stop=stop_strings_of(self.stop_sequences, "stop_sequences"),
            is_watched=self.stream,
        )


def text_of_blocks(content: object, where: str) -> str:
    """Returns the joined text of `content`. Raises RequestRefused if it is not text or has blocks of other types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: expected a text or a list of blocks", where)
    texts = []
    for block in (object_in(block, where) for block in content):
        if block.get("type") != "text":
            raise unsupported(where, block.get("type"), "blocks of text")
        texts.append(text_in(block, where))
    return "\n".join(texts)


def _content_of(content: object, where: str) -> str | list[dict[str, Any]]:
    """Returns the content of a chat message in OpenAI's form: a text, or parts if there are images.

    Raises RequestRefused like `text_of_blocks`, and for images that are not base64 text.
    """
    if not isinstance(content, list) or all(object_in(block, where).get("type") != "image" for block in content):
        return text_of_blocks(content, where)
    return [
        _image(block, where)
        if block.get("type") == "image"
        else {"type": "text", "text": text_of_blocks([block], where)}
        for block in (object_in(block, where) for block in content)
    ]


def _image(block: Block, where: str) -> dict[str, Any]:
    source = object_in(block.get("source"), f"{where}.source")
    if source.get("type") != "base64":
        raise unsupported(f"{where}.source", source.get("type"), "base64, as nothing is downloaded")
    return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}


def _function(tool: Block) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or "name" not in tool:
        raise unsupported("tools", tool.get("type"), "tools with a name and an input_schema")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _chat_messages(message: Block, where: str) -> Iterator[dict[str, Any]]:
    """Yields the equivalent messages in OpenAI's form. Raises RequestRefused."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
        raise invalid(f"{where}: expected role user or assistant, and content", where)
    if content == [] and role != "assistant":
        raise invalid(f"{where}.content: got []; expected at least one block, or a text", f"{where}.content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[Block] = []
    calls: list[dict[str, Any]] = []
    for block in (object_in(block, f"{where}.content") for block in content):
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            result = _content_of(block.get("content") or "", f"{where}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    if texts or calls or role == "assistant":
        spoken: dict[str, Any] = {"role": role, "content": _content_of(texts, f"{where}.content")}
        yield spoken | ({"tool_calls": calls} if calls else {})


async def messages(service: Service, request: Request) -> Response:
    """POST /v1/messages: answers a chat, whole or as a stream."""
    session = session_of(service, request)
    asked, body = await read_json(request, MessagesRequest, service.limits.max_body_bytes)
    wanted = asked.asked(service)
    answer = await answer_to(session, asked.opening(service), wanted, repetition(request, body))
    shell = _shell(answer, service)
    if asked.stream:
        return event_stream(answer, _events(answer, asked, shell), anthropic_error, named=True)
    with answer.attached():
        await wait_for(request, [answer])
    choice = answer.choices[0]
    reply = choice.read(answer.opening)
    return JSONResponse({**shell, "content": _blocks(reply), **_ending(choice, reply), "usage": _usage(choice)})


async def count_tokens(service: Service, request: Request) -> Response:
    """POST /v1/messages/count_tokens: returns the number of prompt tokens."""
    session_of(service, request)
    asked, _ = await read_json(request, PromptFields, service.limits.max_body_bytes)
    _, context = asked.opening(service).begin(History())
    return JSONResponse({"input_tokens": len(context.ids)})


def _shell(answer: Answer, service: Service) -> dict[str, Any]:
    usage = {"input_tokens": len(answer.choices[0].context), "output_tokens": 0}
    return {
        "id": "msg_" + secrets.token_hex(12),
        "type": "message",
        "role": "assistant",
        "model": service.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(choice: Choice) -> dict[str, int]:
    return {"input_tokens": len(choice.context), "output_tokens": len(choice.tokens)}


def _ending(choice: Choice, reply: Reply) -> dict[str, Any]:
    if choice.sample.status.name == "TRUNCATED":
        reason = "max_tokens"
    elif reply.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if reply.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop}


def _tool_uses(reply: Reply) -> list[dict[str, Any]]:
    """Returns tool_use blocks. Their input must be an object, so other arguments are wrapped in one."""
    return [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": call.arguments if isinstance(call.arguments, Mapping) else {"input": call.arguments},
        }
        for call in reply.tool_calls
    ]


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": reply.text}] if reply.text or not reply.tool_calls else []
    return [*text, *_tool_uses(reply)]


async def _events(answer: Answer, asked: MessagesRequest, shell: Mapping[str, Any]) -> AsyncIterator[Event]:
    yield {"type": "message_start", "message": shell}
    deltas = Deltas(answer, answer.choices[0])
    begun = False
    async for _ in answer.changes():
        text = deltas.text()
        if not begun and (text or (answer.is_whole and not deltas.reply().tool_calls)):
            begun = True
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        if text:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    reply = deltas.reply()
    if begun:
        yield {"type": "content_block_stop", "index": 0}
    for index, use in enumerate(_tool_uses(reply), start=int(begun)):
        yield {"type": "content_block_start", "index": index, "content_block": {**use, "input": {}}}
        written = {"type": "input_json_delta", "partial_json": as_text(use["input"])}
        yield {"type": "content_block_delta", "index": index, "delta": written}
        yield {"type": "content_block_stop", "index": index}
    choice = answer.choices[0]
    yield {"type": "message_delta", "delta": _ending(choice, reply), "usage": _usage(choice)}
    yield {"type": "message_stop"}


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(refused: RequestRefused) -> dict[str, Any]:
    """Returns the error in Anthropic's form."""
    default = "invalid_request_error" if refused.status < 500 else "api_error"
    error: dict[str, Any] = {"type": ERROR_TYPES.get(refused.status, default), "message": refused.message}
    if refused.code == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": None}
