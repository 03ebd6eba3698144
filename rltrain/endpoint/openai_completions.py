"""OpenAI's completions: POST /v1/completions, of texts or token ids."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.endpoint.answer import Answer, Choice
from rltrain.endpoint.deltas import Deltas, finish_reason
from rltrain.endpoint.event_stream import Event, event_stream
from rltrain.endpoint.http_request import answer_to, read_json, repetition, session_of, wait_for
from rltrain.endpoint.openai_fields import DrawingFields, head, openai_error, usage
from rltrain.endpoint.refused import invalid, unsupported
from rltrain.endpoint.service import Service

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
        return event_stream(answers[0], _chunks(answers[0], asked, service), openai_error)
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
        "logprobs": _logprobs(choice, slice(None), asked, service),
        **ids,
    }


def _logprobs(choice: Choice, which: slice, asked: CompletionRequest, service: Service) -> dict[str, Any] | None:
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


async def _chunks(answer: Answer, asked: CompletionRequest, service: Service) -> AsyncIterator[Event]:
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
            piece["logprobs"] = _logprobs(choice, which, asked, service)
            if asked.return_token_ids:
                piece["token_ids"] = choice.tokens[which]
            versions = choice.policy_versions[which]
            yield {**beginning, "choices": [piece], **service.weight_version(versions)}
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield {**beginning, "choices": [], "usage": usage([answer])}
    yield "[DONE]"
