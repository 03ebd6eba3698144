"""Fields of requests that this server does not know: harmless ones are taken, all others are refused by name."""

from collections.abc import Mapping
from typing import Any

from rltrain.endpoint.refused import unsupported
from rltrain.endpoint.sampling_rules import SamplingRules

HARMLESS = frozenset({
    "cache_control", "cache_salt", "client_metadata", "inference_geo", "log_metrics", "max_tool_calls", "metadata",
    "moderation", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "rid", "safety_identifier", "service_tier", "speed", "store",
    "stream_interval", "stream_options", "user", "user_profile_id",
})  # fmt: skip
"""These change neither what is drawn nor what an answer says."""
WISHES = frozenset({
    "allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params", "frequency_penalty",
    "length_penalty", "logit_bias", "logits_processors", "min_new_tokens", "min_p", "min_tokens", "presence_penalty",
    "reasoning", "reasoning_effort", "repetition_penalty", "thinking_token_budget", "use_beam_search", "verbosity",
})  # fmt: skip
"""These say how tokens are drawn. Where the run's own way of drawing overrides requests, they are passed over."""
TRUE_BY_DEFAULT = frozenset({
    "add_generation_prompt", "detokenize", "include_reasoning", "separate_reasoning", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_reasoning",
})  # fmt: skip
NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "chat_template_content_format": "auto",
    "frequency_penalty": 0,
    "function_call": "auto",
    "length_penalty": 1,
    "logprob_start_len": -1,
    "min_new_tokens": 0,
    "min_p": 0,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "top_logprobs": 0,
    "top_logprobs_num": 0,
    "truncation": "disabled",
}
"""The values that ask for what every engine here does."""


def refuse_unknown(fields: Mapping[str, Any], rules: SamplingRules, where: str = "") -> None:
    """Refuses the first field that would change what is drawn or answered; `where` precedes its name. Raises Refused.

    Null, false and empty values ask for nothing, except those of TRUE_BY_DEFAULT.
    """
    for name, value in fields.items():
        if name in HARMLESS or _asks_for_nothing(name, value):
            continue
        expected = f"{NEUTRAL[name]!r}" if name in NEUTRAL else "true" if name in TRUE_BY_DEFAULT else "none"
        if name in WISHES:
            rules.refuse_unless_overridden(where + name, value, expected)
        else:
            raise unsupported(where + name, value, expected)


def _asks_for_nothing(name: str, value: object) -> bool:
    if name in TRUE_BY_DEFAULT:
        return value is None or value is True
    if name in NEUTRAL and value == NEUTRAL[name] and not isinstance(value, bool):
        return True
    return value is None or value is False or value == "" or value == [] or value == {}
