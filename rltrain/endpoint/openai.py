"""OpenAI's chat completions, completions and responses."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount, TokenId
from rltrain.data.chat_template import as_text
from rltrain.endpoint.answer import Answer, Choice, Deltas, Event, event_stream, finish_reason, pieces, token_logprobs
from rltrain.endpoint.opening import ChatOpening, Reply
from rltrain.endpoint.requests import AskedSampling, RequestRefused, invalid, object_in, text_in, unsupported
from rltrain.endpoint.service import (
    Body,
    SamplingFields,
    Service,
    answer_to,
    read_json,
    repetition,
    session_of,
    wait_for,
)
from rltrain.endpoint.session import Asked, Session

# Common fields of OpenAI's chat completions and completions.

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024


class StreamOptions(Body):
    """The field stream_options."""

    include_usage: bool = False


class DrawingFields(SamplingFields):
    """Fields for the generation of turns."""

    model: str = ""
    n: TokenCount = 1
    max_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    """vLLM's fields: further tokens that end a turn. `ignore_eos` disables the model's own ones."""
    ignore_eos: bool = False
    return_token_ids: bool = False
    """vLLM's field: whether answers include the token ids of prompt and response."""
    response_format: Mapping[str, Any] | None = None

    def asked(self, service: Service, *, max_tokens: int | None = None) -> Asked:
        """Returns the settings of the turns. Raises RequestRefused for unsupported wishes."""
        self.refuse_unknown(service.rules)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: got a value without stream; expected stream: true with it", "stream_options")
        if (self.response_format or {}).get("type", "text") != "text":
            raise invalid(
                f"response_format: got {self.response_format}; only type text is supported", "response_format"
            )
        sampling = AskedSampling(
            self.temperature,
            self.top_p,
            self.top_k,
            ends_of_turns(service.rules.own.stop_token_ids, self.stop_token_ids, ignore_eos=self.ignore_eos),
        )
        return Asked(
            service.rules.sampling_for(sampling),
            num_choices=self.n,
            max_tokens=max_tokens or self.max_tokens,
            stop=stop_strings_of(self.stop, "stop"),
            seed=self.seed,
            is_watched=self.stream,
        )


def ends_of_turns(own: Sequence[int], given: Sequence[int] | None, *, ignore_eos: bool) -> tuple[int, ...] | None:
    """Returns the tokens that end a turn: the request's, and the model's `own` unless `ignore_eos`. Returns None if the
    request has neither field."""
    if given is None and not ignore_eos:
        return None
    return tuple(dict.fromkeys([*(() if ignore_eos else own), *(given or ())]))


def stop_strings_of(stop: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Returns the stop strings as a tuple. Raises RequestRefused if one is empty, or if there are too many."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS or not all(strings):
        raise invalid(f"{param}: expected at most {MAX_STOP_STRINGS} strings, none of them empty", param)
    return strings


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Returns the numbers of prompt and response tokens in OpenAI's form."""
    prompt = sum(len(answer.choices[0].context) for answer in answers)
    drawn = sum(len(choice.tokens) for answer in answers for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def head(prefix: str, kind: str, service: Service) -> dict[str, Any]:
    """Returns the common first fields of answers and of their pieces."""
    name = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": service.model}


ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def openai_error(refused: RequestRefused) -> dict[str, Any]:
    """Returns the error in OpenAI's form."""
    kind = ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


# OpenAI's chat completions: POST /v1/chat/completions.


class ChatRequest(DrawingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, as in vLLM and SGLang."""

    def opening(self, service: Service) -> ChatOpening:
        """Returns the chat as a prompt. Raises RequestRefused."""
        if self.functions:
            raise unsupported("functions", "a list", "tools")
        if self.top_logprobs:
            raise unsupported("top_logprobs", self.top_logprobs, "0: only the sampled tokens' log-probs are known")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", self.modalities, '["text"]')
        return service.chat(self.messages, offered(self.tools, self.tool_choice, service), self.chat_template_kwargs)


def offered(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, service: Service
) -> list[dict[str, Any]]:
    """Returns the tools shown to the model.

    No engine can force a tool call. Raises RequestRefused if `choice` asks for one, unless the run's sampling overrides
    requests. Raises RequestRefused if a tool is not a function with a name.
    """
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
    """POST /v1/chat/completions: answers a chat, whole or as a stream."""
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
    """Returns the assistant's message in OpenAI's form."""
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
    prompt = {"prompt_token_ids": answer.choices[0].context} if asked.return_token_ids else {}
    for index in range(len(answer.choices)):
        yield {**beginning, **prompt, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
    async for piece in pieces(answer):
        which = piece.deltas.new_tokens()
        extra: dict[str, Any] = {"logprobs": _logprobs(piece.choice, which, asked, service)}
        if asked.return_token_ids:
            extra["token_ids"] = piece.choice.tokens[which]
        yield {**beginning, "choices": [_delta(piece.index, {"content": piece.text}) | extra]}
        for last in _last(piece.index, piece.choice, piece.deltas.reply()) if piece.is_last else ():
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


# OpenAI's completions of texts or token ids: POST /v1/completions.

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(DrawingFields):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> Sequence[str | list[int]]:
        """Returns the prompts, one per answer. Raises RequestRefused."""
        if self.echo or self.suffix:
            raise unsupported("echo" if self.echo else "suffix", self.echo or self.suffix, "none")
        if not self.add_special_tokens:
            raise unsupported("add_special_tokens", False, "true, or token ids as prompt")
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", self.best_of, f"n = {self.n}")
        if self.logprobs not in (None, 0, 1):
            raise unsupported("logprobs", self.logprobs, "0 or 1: only the sampled tokens' log-probs are known")
        given = self.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if len(prompts) > MAX_PROMPTS:
            raise invalid(f"prompt: got {len(prompts)} of them; expected at most {MAX_PROMPTS}", "prompt")
        if self.stream and len(prompts) > 1:
            raise unsupported("prompt", f"{len(prompts)} of them with stream", "one, or no stream")
        return prompts


async def completions(service: Service, request: Request) -> Response:
    """POST /v1/completions: answers each prompt, whole or, for a single prompt, as a stream."""
    session = session_of(service, request)
    asked, body = await read_json(request, CompletionRequest, service.limits.max_body_bytes)
    wanted = asked.asked(service, max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS)
    openings = [service.prompt(prompt) for prompt in asked.prompts()]
    answers = [
        await answer_to(session, opening, wanted, repetition(request, body, part))
        for part, opening in enumerate(openings)
    ]
    if asked.stream:
        return event_stream(answers[0], _completion_chunks(answers[0], asked, service), openai_error)
    with ExitStack() as attached:
        for answer in answers:
            attached.enter_context(answer.attached())
        await wait_for(request, answers)
    choices = [(answer, choice) for answer in answers for choice in answer.choices]
    body_choices = [_choice(index, *pair, asked, service) for index, pair in enumerate(choices)]
    versions = [version for _, choice in choices for version in choice.policy_versions]
    body_of_all = {"choices": body_choices, "usage": usage(answers), **service.weight_version(versions)}
    return JSONResponse({**head("cmpl", "text_completion", service), **body_of_all})


def _choice(index: int, answer: Answer, choice: Choice, asked: CompletionRequest, service: Service) -> dict[str, Any]:
    reply = choice.read(answer.opening)
    ids = {"token_ids": choice.tokens, "prompt_token_ids": choice.context} if asked.return_token_ids else {}
    return {
        "index": index,
        "text": reply.text,
        "finish_reason": finish_reason(choice, reply),
        "logprobs": _completion_logprobs(choice, slice(None), asked, service),
        **ids,
    }


def _completion_logprobs(
    choice: Choice, which: slice, asked: CompletionRequest, service: Service
) -> dict[str, Any] | None:
    if asked.logprobs is None:
        return None
    texts = [service.tokens.spelling(token) for token in choice.tokens]
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    return {
        "tokens": texts[which],
        "token_logprobs": choice.logprobs[which],
        "text_offset": starts[:-1][which],
        "top_logprobs": None,
    }


async def _completion_chunks(answer: Answer, asked: CompletionRequest, service: Service) -> AsyncIterator[Event]:
    beginning = head("cmpl", "text_completion", service)
    async for piece in pieces(answer):
        choice, which = piece.choice, piece.deltas.new_tokens()
        reason = finish_reason(choice, piece.deltas.reply()) if piece.is_last else None
        told: dict[str, Any] = {"index": piece.index, "text": piece.text, "finish_reason": reason}
        told["logprobs"] = _completion_logprobs(choice, which, asked, service)
        if asked.return_token_ids:
            told["token_ids"] = choice.tokens[which]
        yield {**beginning, "choices": [told], **service.weight_version(choice.policy_versions[which])}
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**beginning, "choices": [], "usage": usage([answer])}
    yield "[DONE]"


# A subset of OpenAI's responses: POST /v1/responses with text, messages and functions, and with previous_response_id
# within a session.

MESSAGE_PARTS = ("input_text", "output_text", "text")
IMAGE_PART = "input_image"


class ResponsesRequest(SamplingFields):
    """The body of POST /v1/responses."""

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
        """Returns the settings of the turn. Raises RequestRefused."""
        self.refuse_unknown(service.rules)
        for included in self.include or ():
            if "logprobs" in included:
                raise unsupported("include", included, "no log-probs; /v1/chat/completions returns them")
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
        """Returns the chat as a prompt. Raises RequestRefused."""
        before: Sequence[Mapping[str, Any]] = ()
        if self.previous_response_id is not None:
            before = _messages_until(session, self.previous_response_id)
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if system:  # as in OpenAI's API, they replace the earlier response's instructions
            before = [message for message in before if message["role"] != "system"]
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        tools = offered([_function(tool) for tool in self.tools or ()], self.tool_choice, service)
        return service.chat([*system, *before, *given], tools, {})


def _messages_until(session: Session, name: str) -> list[Mapping[str, Any]]:
    answer = session.responses.get(name)
    if answer is None or not isinstance(answer.opening, ChatOpening):
        raise RequestRefused(
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
    """Returns input items as chat messages. Raises RequestRefused."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content_of(item.get("content"))})
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


def _content_of(content: object) -> str | list[dict[str, Any]]:
    """Returns the content of a chat message: a text, or parts if there are images."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in (object_in(part, "input") for part in (content if isinstance(content, list) else ())):
        if part.get("type") == IMAGE_PART:
            parts.append({**part})
        elif part.get("type") in MESSAGE_PARTS:
            parts.append({"type": "text", "text": text_in(part, "input")})
        else:
            raise unsupported("input", part.get("type"), f"parts of text or {IMAGE_PART}")
    if any(part["type"] == IMAGE_PART for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _output_of(output: object) -> str | list[dict[str, Any]]:
    return (
        _content_of(output) if isinstance(output, list) else output if isinstance(output, str) else json.dumps(output)
    )


async def responses(service: Service, request: Request) -> Response:
    """POST /v1/responses: answers a chat, whole or as a stream, and keeps the response in the session."""
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
    """Returns a response object without output."""
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


def _stream_error(refused: RequestRefused) -> dict[str, Any]:
    return {"type": "error", **openai_error(refused)["error"], "sequence_number": 0}
