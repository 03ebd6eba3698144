"""Fields that OpenAI's chat completions and completions have in common, and what is made of them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rltrain.config.section import TokenCount, TokenId
from rltrain.endpoint.answer import Answer
from rltrain.endpoint.http_request import Body, SamplingFields
from rltrain.endpoint.refused import Refused, invalid
from rltrain.endpoint.sampling_rules import AskedSampling
from rltrain.endpoint.service import Service
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
