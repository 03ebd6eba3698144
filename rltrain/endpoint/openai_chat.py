"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount
from rltrain.data.chat_template import as_text
from rltrain.endpoint.answer import Answer, Choice
from rltrain.endpoint.deltas import Deltas, finish_reason, token_logprobs
from rltrain.endpoint.event_stream import Event, event_stream
from rltrain.endpoint.http_request import answer_to, read_json, repetition, session_of, wait_for
from rltrain.endpoint.openai_fields import DrawingFields, head, openai_error, usage
from rltrain.endpoint.opening import ChatOpening, Reply
from rltrain.endpoint.refused import invalid, unsupported
from rltrain.endpoint.service import Service


class ChatRequest(DrawingFields):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, as vLLM and SGLang take them."""

    def opening(self, service: Service) -> ChatOpening:
        """Raises Refused."""
        if self.functions:
            raise unsupported("functions", "a list", "tools")
        if self.top_logprobs:
            raise unsupported("top_logprobs", self.top_logprobs, "0: only drawn tokens' log-probs are known")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", self.modalities, '["text"]')
        return service.chat(self.messages, offered(self.tools, self.tool_choice, service), self.chat_template_kwargs)


def offered(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, service: Service
) -> list[dict[str, Any]]:
    """The tools that the model is told of. Nothing makes it call one: where that is asked for, Refused unless the run's
    own way of drawing overrides requests. Raises Refused too for a tool that is no function with a name."""
    for tool in tools or ():
        function = tool.get("function")
        if tool.get("type", "function") != "function":
            raise unsupported("tools", tool.get("type"), "tools of type function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"tools: got {str(tool)[:80]}; expected a function with a name", "tools")
    if choice not in (None, "auto", "none"):
        service.rules.refuse_unless_overridden("tool_choice", choice, '"auto" or "none"')
    return [] if choice == "none" else tools or []


async def chat_completions(service: Service, request: Request) -> Response:
    session = session_of(service, request)
    asked, body = await read_json(request, ChatRequest, service.limits.max_body_bytes)
    wanted = asked.asked(service, max_tokens=asked.max_completion_tokens)
    answer = await answer_to(session, asked.opening(service), wanted, repetition(request, body))
    if asked.stream:
        return event_stream(answer, _chunks(answer, asked, service), openai_error)
    with answer.attached():
        await wait_for(request, [answer])
    return JSONResponse(_completion(answer, asked, service))


def _completion(answer: Answer, asked: ChatRequest, service: Service) -> dict[str, Any]:
    choices = []
    for index, choice in enumerate(answer.choices):
        reply = choice.read(answer.opening)
        body: dict[str, Any] = {
            "index": index,
            "message": message_of(reply),
            "finish_reason": finish_reason(choice, reply),
            "logprobs": _logprobs(choice, slice(None), asked, service),
        }
        choices.append(body | ({"token_ids": choice.tokens} if asked.return_token_ids else {}))
    prompt = {"prompt_token_ids": answer.choices[0].context} if asked.return_token_ids else {}
    return {**head("chatcmpl", "chat.completion", service), "choices": choices, "usage": usage([answer]), **prompt}


def message_of(reply: Reply) -> dict[str, Any]:
    """The assistant's, as OpenAI writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = _calls(reply)
    return message


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": as_text(call.arguments)}}
        for call in reply.tool_calls
    ]


def _logprobs(choice: Choice, which: slice, asked: ChatRequest, service: Service) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    return {"content": token_logprobs(choice, which, service.tokens), "refusal": None}


async def _chunks(answer: Answer, asked: ChatRequest, service: Service) -> AsyncIterator[Event]:
    beginning = head("chatcmpl", "chat.completion.chunk", service)
    deltas = [Deltas(answer, choice) for choice in answer.choices]
    finished = [False] * len(deltas)
    prompt = {"prompt_token_ids": answer.choices[0].context} if asked.return_token_ids else {}
    for index in range(len(deltas)):
        yield {**beginning, **prompt, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
    async for _ in answer.changes():
        for index, (choice, delta) in enumerate(zip(answer.choices, deltas, strict=True)):
            if finished[index]:
                continue
            text = delta.text()
            if text or choice.is_done:
                which = delta.new_tokens()
                extra: dict[str, Any] = {"logprobs": _logprobs(choice, which, asked, service)}
                if asked.return_token_ids:
                    extra["token_ids"] = choice.tokens[which]
                yield {**beginning, "choices": [_delta(index, {"content": text}) | extra]}
            if choice.is_done:
                finished[index] = True
                for last in _last(index, choice, delta.reply()):
                    yield {**beginning, "choices": [last]}
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**beginning, "choices": [], "usage": usage([answer])}
    yield "[DONE]"


def _last(index: int, choice: Choice, reply: Reply) -> list[dict[str, Any]]:
    thought = [_delta(index, {"reasoning_content": reply.reasoning})] if reply.reasoning else []
    calls = [_delta(index, {"tool_calls": [{"index": i, **call}]}) for i, call in enumerate(_calls(reply))]
    return [*thought, *calls, _delta(index, {}) | {"finish_reason": finish_reason(choice, reply)}]


def _delta(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
