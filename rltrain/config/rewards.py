"""What the config says of rewards."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from rltrain.config.rollout import Sampling, Served
from rltrain.config.section import Count, HubName, NonNegativeInt, Positive, Section, Share, Temperature


class RewardPart(Section):
    """One of several reward functions."""

    function: str
    """As reward.function."""
    weight: float = 1.0
    name: str | None = None
    """What its metrics are called by: rollout/reward_<name>. null: the function's own name, or an URL's host."""
    options: dict[str, Any] = Field(default_factory=dict)
    score_key: str | None = None
    """As reward.score_key."""

    @property
    def title(self) -> str:
        """`name`, or what it is by default."""
        if self.name is not None:
            return self.name
        host = re.match(r"https?://([^/:?#]*)", self.function)
        return re.sub(r"\W", "_", host[1]) if host else re.split(r"[:.]", self.function)[-1]


class Reward(Section):
    function: str = "exact_match"
    """exact_match, math, code, environment, an URL, or a user's own "file.py:function", "module:function" or
    "module.function". Its parameters' names decide how it is called: docs/rewards.md."""
    functions: tuple[RewardPart, ...] | None = Field(default=None, strict=False)
    """In the place of `function` several, a list of {function, weight, name, options}: the reward is the weighted
    sum. []: none, where a model tells what responses are worth."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the reward function."""
    score_key: str | None = None
    """Of a dict that the function returns, the key of the reward. null: score."""
    timeout_s: Positive = 5.0
    """Limit for one sample; past it the sample's reward is 0 and it is counted. A batch has as much for each of its
    samples, each request to an URL as much. A process's start and first call, which import what the function needs,
    have a limit of their own (120 s)."""
    max_failures: Share = 0.5
    """Share of the samples of a step, or of an evaluation, that may fail, by an error or at the time limit; each then
    has reward 0. With more the job ends, and says how the first one failed. 1: only where all of the first ones fail.
    The default lets a policy that has yet to learn the answers' form trip a function up, and ends a run that would
    learn from failures more than from rewards."""
    num_workers: Count = 4
    """Processes per rank that run the function; exact_match and environment need none. Of an URL, requests at once."""
    calls_in_flight: Count = 32
    """Calls of an asynchronous function (async def) that a process awaits at once."""
    retries: NonNegativeInt = 3
    """Further requests to an URL that cannot be reached, or answers 429 or 5xx, after pauses of 0.5 s, 1 s, 2 s, ..."""

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that are in use."""
        return tuple(part.function for part in self.parts)

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """`functions`, or the only one, `function`."""
        own = RewardPart(function=self.function, options=self.options, score_key=self.score_key)
        return (own,) if self.functions is None else self.functions

    def alone(self, part: RewardPart) -> "Reward":
        """With the function of `part` as the only one."""
        own = {"function": part.function, "options": part.options, "score_key": part.score_key}
        return self.model_copy(update={**own, "functions": None})


class JudgeSampling(Sampling):
    temperature: Temperature = 0.0
    max_response_tokens: Count = 512


class Judge(Served):
    """A model that is asked what each response is worth, and answers in words: part of the reward."""

    path: Annotated[str | None, HubName("model")] = None
    """Its Hugging Face checkpoint, with a tokenizer and vocabulary of its own."""
    weight: float = 1.0
    """Of its verdicts in the reward."""
    name: str = "judge"
    """What its metrics are called by: rollout/reward_<name>."""
    prompt: str | None = None
    """What it is asked, or a file that has it: a text with {response}, and as wanted {prompt}, {label}, {conversation}
    or a column of the row. {{name}} stands for {name}."""
    chat_template: Literal["auto", "never"] = "auto"
    """auto: its tokenizer's template, where it has one, makes the question a message of the user."""
    verdict: str = r"([-+]?\d+(?:\.\d+)?)\D*$"
    """How a number is read from the answer: a regular expression with one group, whose last match counts, or a function
    of the text, "file.py:function" or "module:function", that returns a number or None. By default the last number."""
    sampling: JudgeSampling = JudgeSampling()
