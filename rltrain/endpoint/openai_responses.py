"""OpenAI's responses, the simple ones: POST /v1/responses with text, messages and functions; previous_response_id
within a session."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount
from rltrain.data.chat_template import as_text
from rltrain.endpoint.answer import Answer, Deltas, Event, event_stream, finish_reason
from rltrain.endpoint.openai import message_of, offered, openai_error
from rltrain.endpoint.opening import ChatOpening, Reply
from rltrain.endpoint.requests import AskedSampling, Refused, invalid, object_in, text_in, unsupported
from rltrain.endpoint.service import SamplingFields, Service, answer_to, read_json, repetition, session_of, wait_for
from rltrain.endpoint.session import Asked, Session

MESSAGE_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(SamplingFields):
    model: str = ""
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    previous_response_id: str | None = None
    max_output_tokens: TokenCount | None = None
    stream: bool = False
    background: bool = False
    text: Mapping[str, Any] | None = None
    conversation: Any = None
    include: list[str] | None = None

    def asked(self, service: Service) -> Asked:
        """Raises Refused."""
        self.refuse_unknown(service.rules)
        for included in self.include or ():
            if "logprobs" in included:
                raise unsupported("include", included, "none of log-probs, which /v1/chat/completions gives")
        if self.background:
            raise unsupported("background", True, "false")
        if self.conversation is not None:
            raise unsupported("conversation", self.conversation, "previous_response_id, or all messages as input")
        form = ((self.text or {}).get("format") or {}).get("type", "text")
        if form != "text":
            raise unsupported("text.format", form, "text")
        if (verbosity := (self.text or {}).get("verbosity")) is not None:
            service.rules.refuse_unless_overridden("text.verbosity", verbosity, "none")
        sampling = service.rules.sampling_for(AskedSampling(self.temperature, self.top_p, self.top_k))
        return Asked(sampling, max_tokens=self.max_output_tokens, is_watched=self.stream)

    def opening(self, service: Service, session: Session) -> ChatOpening:
        """Raises Refused."""
        before: Sequence[Mapping[str, Any]] = ()
        if self.previous_response_id is not None:
            before = _messages_until(session, self.previous_response_id)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if system:  # those of the response before do not hold any more, as OpenAI has it
            before = [message for message in before if message["role"] != "system"]
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        tools = offered([_function(tool) for tool in self.tools or ()], self.tool_choice, service)
        return service.chat([*system, *before, *given], tools, {})


def _messages_until(session: Session, name: str) -> list[Mapping[str, Any]]:
    answer = session.responses.get(name)
    if answer is None or not isinstance(answer.opening, ChatOpening):
        raise Refused(
            HTTPStatus.NOT_FOUND,
            f"previous_response_id: this session has no response {name!r}; responses are kept within a session",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*answer.opening.messages, message_of(answer.choices[0].read(answer.opening))]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise unsupported("tools", tool.get("type"), "type function, with a name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A list of input items as chat messages. Raises Refused."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text_of(item.get("content"))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output_of(item.get("output"))}
            messages.append(result)
        elif kind != "reasoning":
            raise unsupported("input", kind, "items of type message, function_call and function_call_output")
    if not messages:
        raise invalid("input: expected at least one message", "input")
    return messages


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in (object_in(part, "input") for part in (content if isinstance(content, list) else ())):
        if part.get("type") not in MESSAGE_PARTS:
            raise unsupported("input", part.get("type"), "parts of text")
        texts.append(text_in(part, "input"))
    return "".join(texts)


def _output_of(output: object) -> str:
    return _text_of(output) if isinstance(output, list) else output if isinstance(output, str) else json.dumps(output)


async def responses(service: Service, request: Request) -> Response:
    session = session_of(service, request)
    asked, body = await read_json(request, ResponsesRequest, service.limits.max_body_bytes)
    wanted = asked.asked(service)
    answer = await answer_to(session, asked.opening(service, session), wanted, repetition(request, body))
    name = "resp_" + secrets.token_hex(12)
    session.responses[name] = answer
    shell = _shell(name, asked, service)
    if asked.stream:
        return event_stream(answer, _events(answer, asked, shell), _stream_error, named=True)
    with answer.attached():
        await wait_for(request, [answer])
    return JSONResponse(_ended(answer, shell))


def _shell(name: str, asked: ResponsesRequest, service: Service) -> dict[str, Any]:
    """All of a response but what is drawn."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "metadata": {},
        "model": service.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_response_id,
        "temperature": asked.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools or [],
        "top_p": asked.top_p,
    }


def _ended(answer: Answer, shell: Mapping[str, Any]) -> dict[str, Any]:
    choice = answer.choices[0]
    reply, status = choice.read(answer.opening), _status(answer)
    cut = status == "incomplete"
    prompt, drawn = len(choice.context), len(choice.tokens)
    return {
        **shell,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [*_message_item(shell, reply, status=status), *_call_items(shell, reply)],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + drawn,
        },
    }


def _status(answer: Answer) -> str:
    choice = answer.choices[0]
    cut = finish_reason(choice, choice.read(answer.opening)) == "length"
    return "incomplete" if cut else "completed"


def _message_item(shell: Mapping[str, Any], reply: Reply, *, status: str) -> list[dict[str, Any]]:
    if not reply.text and reply.tool_calls:
        return []
    item = {"id": "msg_" + shell["id"][5:], "type": "message", "role": "assistant", "status": status}
    return [{**item, "content": [] if status == "in_progress" else [_part(reply.text)]}]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_items(shell: Mapping[str, Any], reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{shell['id'][5:]}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": as_text(call.arguments),
        }
        for index, call in enumerate(reply.tool_calls)
    ]


async def _events(answer: Answer, asked: ResponsesRequest, shell: Mapping[str, Any]) -> AsyncIterator[Event]:
    number = 0
    async for event in _unnumbered(answer, asked, shell):
        yield {**event, "sequence_number": number}
        number += 1


async def _unnumbered(
    answer: Answer, asked: ResponsesRequest, shell: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "response.created", "response": shell}
    yield {"type": "response.in_progress", "response": shell}
    deltas = Deltas(answer, answer.choices[0])
    item = _message_item(shell, Reply(""), status="in_progress")[0]
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = False
    async for _ in answer.changes():
        text = deltas.text()
        if not text and (begun or not answer.is_whole or deltas.reply().tool_calls):
            continue
        if not begun:
            begun = True
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **place, "part": _part("")}
        if text:
            yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
    reply = deltas.reply()
    if begun:
        yield {"type": "response.output_text.done", **place, "text": reply.text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": _part(reply.text)}
        yield {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": _message_item(shell, reply, status=_status(answer))[0],
        }
    for index, call in enumerate(_call_items(shell, reply), start=int(begun)):
        where = {"item_id": call["id"], "output_index": index}
        empty = {**call, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.function_call_arguments.delta", **where, "delta": call["arguments"]}
        done = {"arguments": call["arguments"], "name": call["name"]}
        yield {"type": "response.function_call_arguments.done", **where, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": call}
    ended = _ended(answer, shell)
    yield {"type": f"response.{ended['status']}", "response": ended}


def _stream_error(refused: Refused) -> dict[str, Any]:
    return {"type": "error", **openai_error(refused)["error"], "sequence_number": 0}
