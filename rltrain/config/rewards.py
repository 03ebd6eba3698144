"""The config sections of rewards."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.rollout import Sampling, Served
from rltrain.config.section import Count, HubName, NonNegativeInt, Positive, Section, Share, Temperature


class RewardPart(Section):
    """One of several reward functions."""

    function: str
    """The function, in the form of reward.function."""
    weight: float = 1.0
    """Weight in the sum."""
    name: str | None = None
    """Name in metrics: rollout/reward_<name>. `null`: the name of the function, or the host of a URL."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    score_key: str | None = None
    """The key of the reward, in the form of reward.score_key."""

    @property
    def title(self) -> str:
        """Returns `name`, or else the name of the function or the host of its URL."""
        if self.name is not None:
            return self.name
        host = re.match(r"https?://([^/:?#]*)", self.function)
        return re.sub(r"\W", "_", host[1]) if host else re.split(r"[:.]", self.function)[-1]


class Reward(Section):
    """The reward functions, and the handling of failures."""

    function: str = "exact_match"
    """exact_match, math, code, environment, a URL, or your own function: "file.py:function", "module:function" or
    "module.function". The names of its parameters decide its arguments: docs/rewards.md."""
    functions: tuple[RewardPart, ...] | None = Field(default=None, strict=False)
    """Several functions instead of `function`, a list of {function, weight, name, options}. The reward is their
    weighted sum. `[]`: no function, if a model gives the reward."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the reward function."""
    score_key: str | None = None
    """Key of the reward in a dict returned by the function. `null`: score."""
    timeout_s: Positive = 5.0
    """Time limit for one sample in seconds. A slower sample gets reward 0 and is counted. A batch has this limit times
    its samples. Each request to a URL has this limit. The start of a process and its first call, with all imports, have
    a separate limit of 120 s."""
    max_failures: Share = 0.5
    """Share of the samples of a step or an evaluation allowed to fail by an error or at the time limit. A failed sample
    gets reward 0. Above this share the job ends and reports the first failure. `1`: the job ends only if all of the
    first samples scored fail. The default tolerates the format errors of an untrained policy. It stops a run trained
    mostly on failures."""
    num_workers: Count = 4
    """Processes per rank for the function. exact_match and environment need none. For a URL: number of simultaneous
    requests."""
    calls_in_flight: Count = 32
    """Number of simultaneous calls of an asynchronous function (async def) in one process."""
    retries: NonNegativeInt = 3
    """Number of further requests to a URL after a failed connection, status 429 or status 5xx. Pauses between them are
    0.5 s, 1 s, 2 s, ..."""

    @property
    def names(self) -> tuple[str, ...]:
        """The functions in use."""
        return tuple(part.function for part in self.parts)

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """Returns `functions`, or `function` as the only part."""
        own = RewardPart(function=self.function, options=self.options, score_key=self.score_key)
        return (own,) if self.functions is None else self.functions

    def alone(self, part: RewardPart) -> "Reward":
        """Returns the section with the function of `part` as the only one."""
        own = {"function": part.function, "options": part.options, "score_key": part.score_key}
        return self.model_copy(update={**own, "functions": None})


class JudgeSampling(Sampling):
    """Sampling of the judge's answers."""

    temperature: Temperature = 0.0
    """Sampling temperature. `0`: greedy."""
    max_response_tokens: Count = 512
    """Most tokens of an answer."""


class Judge(Served):
    """A model that is asked to judge each response in words. The verdict is part of the reward."""

    path: Annotated[str | None, HubName("model")] = None
    """The Hugging Face checkpoint of the judge. It may have its own tokenizer and vocabulary."""
    weight: float = 1.0
    """Weight of the verdict in the reward."""
    name: str = "judge"
    """Name in metrics: rollout/reward_<name>."""
    prompt: str | None = None
    """The question for the judge, or a file with it. The text contains {response}, and optionally {prompt}, {label},
    {conversation} or a column of the row. Write {{name}} for a literal {name}."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto`: the chat template of the judge's tokenizer makes the question a user message, if there is a template.
    `never`: the question is plain text."""
    verdict: str = r"([-+]?\d+(?:\.\d+)?)\D*$"
    """Reads a number from the answer. A regular expression with one group, of which the last match counts. Or a
    function of the text, "file.py:function" or "module:function", with a number or None as result. Default: the last
    number of the answer."""
    sampling: JudgeSampling = JudgeSampling()
