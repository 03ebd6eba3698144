"""Refusals. Each names the keys, the values given and what would be accepted; all of a check come in one message."""

from collections.abc import Iterable

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.evaluation import SHORT_FORM, EvaluationPlan
from rltrain.config.schema import Config
from rltrain.errors import ConfigError


def refuse(
    problems: Iterable[str], error: type[ConfigError] = ConfigError, several: str = "mistakes in the config"
) -> None:
    """Raise `error` with all of `problems`, under a heading where there are `several`; nothing where there is none."""
    messages = list(dict.fromkeys(problems))
    if len(messages) == 1:
        raise error(messages[0])
    if messages:
        raise error(f"{len(messages)} {several}:\n" + "\n".join(f"  {message}" for message in messages))


def longest_text(config: Config) -> tuple[int, str]:
    """(tokens, the sum in words) of the longest prompt and response together that are trained on."""
    prompt = config.data.max_prompt_tokens
    if algorithm_of(config).reads_responses:
        limit = config.data.max_response_tokens
        at_least = f"data.max_response_tokens {limit}" if limit else "1 token of a response"
        total = prompt + (limit or 1)
        return total, f"data.max_prompt_tokens {prompt} + {at_least} = {total}"
    response = config.rollout.sampling.max_response_tokens
    words = f"data.max_prompt_tokens {prompt} + rollout.sampling.max_response_tokens {response} = {prompt + response}"
    return prompt + response, words


def evaluated_text(config: Config, plan: EvaluationPlan) -> tuple[int, str]:
    """As `longest_text`, of an evaluation."""
    prompt, response = config.data.max_prompt_tokens, plan.sampling.max_response_tokens
    section = "rollout." if plan.name == SHORT_FORM else plan.config_key.removesuffix("data")
    words = f"data.max_prompt_tokens {prompt} + {section}sampling.max_response_tokens {response} = {prompt + response}"
    return prompt + response, words
