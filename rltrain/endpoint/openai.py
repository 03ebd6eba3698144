"""OpenAI's chat completions: POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount, TokenId
from rltrain.data.chat_template import as_text
from rltrain.endpoint.answer import Answer, Choice, Deltas, Event, event_stream, finish_reason, token_logprobs
from rltrain.endpoint.opening import ChatOpening, Reply
from rltrain.endpoint.requests import AskedSampling, Refused, invalid, unsupported
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
from rltrain.endpoint.session import Asked

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024


class StreamOptions(Body):
    include_usage: bool = False


class DrawingFields(SamplingFields):
    """How turns are drawn."""

    model: str = ""
    n: TokenCount = 1
    max_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    """As vLLM has it, and the next one: these end a turn, beside the model's own unless those are ignored."""
    ignore_eos: bool = False
    return_token_ids: bool = False
    """As vLLM has it: answers carry the ids of their tokens, and of the prompt's."""
    response_format: Mapping[str, Any] | None = None

    def asked(self, service: Service, *, max_tokens: int | None = None) -> Asked:
        """Raises Refused for what would draw otherwise than an engine here does."""
        self.refuse_unknown(service.rules)
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "stream_options: got some without stream; expected stream: true beside them", "stream_options"
            )
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
    """Returns the tokens that end a turn: the model's `own` unless `ignore_eos`, and those of the request. Returns None
    where the request says nothing of them."""
    if given is None and not ignore_eos:
        return None
    return tuple(dict.fromkeys([*(() if ignore_eos else own), *(given or ())]))


def stop_strings_of(stop: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Raises Refused for an empty one, and for too many."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS or not all(strings):
        raise invalid(f"{param}: expected at most {MAX_STOP_STRINGS} strings, none of them empty", param)
    return strings


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt = sum(len(answer.choices[0].context) for answer in answers)
    drawn = sum(len(choice.tokens) for answer in answers for choice in answer.choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def head(prefix: str, kind: str, service: Service) -> dict[str, Any]:
    """What every answer and every piece of one begins with."""
    name = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": service.model}


ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def openai_error(refused: Refused) -> dict[str, Any]:
    """In the form that OpenAI's clients read."""
    kind = ERROR_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


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


MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(DrawingFields):
    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> Sequence[str | list[int]]:
        """Raises Refused."""
        if self.echo or self.suffix:
            raise unsupported("echo" if self.echo else "suffix", self.echo or self.suffix, "none")
        if not self.add_special_tokens:
            raise unsupported("add_special_tokens", False, "true, or token ids as prompt")
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", self.best_of, f"n = {self.n}")
        if self.logprobs not in (None, 0, 1):
            raise unsupported("logprobs", self.logprobs, "0 or 1: only drawn tokens' log-probs are known")
        given = self.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if len(prompts) > MAX_PROMPTS:
            raise invalid(f"prompt: got {len(prompts)} of them; expected at most {MAX_PROMPTS}", "prompt")
        if self.stream and len(prompts) > 1:
            raise unsupported("prompt", f"{len(prompts)} of them with stream", "one, or no stream")
        return prompts


async def completions(service: Service, request: Request) -> Response:
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
    deltas = [Deltas(answer, choice) for choice in answer.choices]
    finished = [False] * len(deltas)
    async for _ in answer.changes():
        for index, (choice, delta) in enumerate(zip(answer.choices, deltas, strict=True)):
            if finished[index]:
                continue
            text = delta.text()
            finished[index] = choice.is_done
            if not text and not choice.is_done:
                continue
            which = delta.new_tokens()
            reason = finish_reason(choice, delta.reply()) if choice.is_done else None
            piece = {"index": index, "text": text, "finish_reason": reason}
            piece["logprobs"] = _completion_logprobs(choice, which, asked, service)
            if asked.return_token_ids:
                piece["token_ids"] = choice.tokens[which]
            versions = choice.policy_versions[which]
            yield {**beginning, "choices": [piece], **service.weight_version(versions)}
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**beginning, "choices": [], "usage": usage([answer])}
    yield "[DONE]"
