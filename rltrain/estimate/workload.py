"""How long the texts of a run are taken to be, on which its seconds depend."""

from dataclasses import dataclass

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.schedule.shape import RunShape

MEAN_OF_LONGEST = 0.5
"""What a mean length is taken to be of the longest one allowed, where nobody says more."""


def longest_response(config: Config) -> int:
    """Returns how many tokens the longest response has that is trained on. Where the config has no limit these are what
    a prompt, or a pair of them, leaves of a micro-batch."""
    shape = RunShape.of(config)
    at_once = config.actor.micro_batch_tokens // (2 if shape.from_pairs else 1)
    return shape.longest_response or max(at_once - config.data.max_prompt_tokens, 1)


@dataclass(frozen=True)
class Workload:
    """Tokens: means over the samples of a step, and the longest response among them."""

    prompt: float
    response: float
    longest_response: float

    @property
    def sample(self) -> float:
        return self.prompt + self.response

    @classmethod
    def of(cls, config: Config, prompt: float | None = None, response: float | None = None) -> "Workload":
        """What is given, and half of what the config allows where nothing is. ConfigError where that is exceeded."""
        longest = longest_response(config)
        return cls(
            prompt=_mean("--prompt-tokens", prompt, config.data.max_prompt_tokens),
            response=_mean("--response-tokens", response, longest),
            longest_response=longest,
        )


def _mean(option: str, given: float | None, limit: int) -> float:
    if given is not None and not 0 < given <= limit:
        raise ConfigError(f"option {option}: got {given:g}; expected more than 0 and at most the limit {limit}")
    return limit * MEAN_OF_LONGEST if given is None else given
