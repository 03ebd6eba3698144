"""Token ids in and out: POST /generate, with the fields of SGLang's server that users' generate functions read."""

import secrets
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import TokenCount, TokenId
from rltrain.endpoint.answer import Answer, Choice
from rltrain.endpoint.http_request import (
    DrawingBody,
    SamplingFields,
    answer_to,
    read_json,
    repetition,
    session_of,
    wait_for,
)
from rltrain.endpoint.openai_fields import MAX_STOP_TOKENS, ends_of_turns, stop_strings_of
from rltrain.endpoint.refused import invalid, unsupported
from rltrain.endpoint.sampling_rules import AskedSampling
from rltrain.endpoint.service import Service
from rltrain.endpoint.session import Asked

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""


class GenerateSampling(SamplingFields):
    max_new_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: TokenCount = 1


class GenerateRequest(DrawingBody):
    input_ids: Annotated[list[int], Field(min_length=1)] | None = None
    text: str | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool = False
    stream: bool = False

    def prompt(self) -> str | list[int]:
        """Raises Refused."""
        if self.stream:
            raise unsupported("stream", True, "false")
        if (self.input_ids is None) == (self.text is None):
            raise invalid("expected either input_ids or text", "input_ids")
        return self.input_ids if self.input_ids is not None else self.text or ""

    def asked(self, service: Service) -> Asked:
        """Raises Refused."""
        params, rules = self.sampling_params, service.rules
        self.refuse_unknown(rules)
        params.refuse_unknown(rules, "sampling_params.")
        ends = ends_of_turns(rules.own.stop_token_ids, params.stop_token_ids, ignore_eos=params.ignore_eos)
        return Asked(
            rules.sampling_for(AskedSampling(params.temperature, params.top_p, params.top_k, ends)),
            num_choices=params.n,
            max_tokens=params.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            stop=stop_strings_of(params.stop, "sampling_params.stop"),
            seed=params.sampling_seed,
        )


async def generate(service: Service, request: Request) -> Response:
    session = session_of(service, request)
    asked, body = await read_json(request, GenerateRequest, service.limits.max_body_bytes)
    answer = await answer_to(session, service.prompt(asked.prompt()), asked.asked(service), repetition(request, body))
    with answer.attached():
        await wait_for(request, [answer])
    results = [_result(answer, choice, asked, service) for choice in answer.choices]
    return JSONResponse(results[0] if asked.sampling_params.n == 1 else results)


def _result(answer: Answer, choice: Choice, asked: GenerateRequest, service: Service) -> dict[str, Any]:
    reply = choice.read(answer.opening)
    truncated = choice.sample.status.name == "TRUNCATED"
    versions = choice.sample.policy_versions[choice.start :]
    meta: dict[str, Any] = {
        "id": secrets.token_hex(12),
        "finish_reason": {"type": "length" if truncated else "stop", "matched": reply.stop},
        "prompt_tokens": len(choice.context),
        "completion_tokens": len(choice.tokens),
        "cached_tokens": 0,
        "weight_version": str(versions[-1]) if versions else None,
        "weight_versions": versions,
        **service.weight_version(versions[-1:]),
    }
    if asked.return_logprob:
        pairs = zip(choice.logprobs, choice.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": reply.text, "output_ids": choice.tokens, "meta_info": meta}
