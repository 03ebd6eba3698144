"""What an environment is: it sets tasks, and answers what the model said until an episode is done. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Row = Mapping[str, Any]
"""A row of the prompt file, with all its columns."""
Message = Mapping[str, Any]
"""A chat message as OpenAI writes it: role and content, and where they apply tool_calls, tool_call_id and name."""


@dataclass(frozen=True)
class TokenIds:
    """A turn that an environment asks for in token ids, as those do that have a tokenizer of their own."""

    ids: tuple[int, ...]
    """The whole context of the turn. Where it goes on from what the engine has drawn and seen of the episode, the
    trajectory does; any other context begins another trajectory of the episode."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """For this turn, in SGLang's names (max_new_tokens, temperature, stop, ...); what is not there is the run's."""


Observation = str | Sequence[Message] | TokenIds
"""What the model is shown next. A text is a message of the user; before the first turn, or without a chat template,
it is the text itself."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, as the chat template's parser understood it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Action:
    """What the model drew in one turn."""

    text: str
    """Without special tokens and, where it wrote tool calls, as it stands before them."""
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    """Whether the turn was cut by a limit on tokens rather than ended by the model."""
    ids: tuple[int, ...] = ()
    """All that was drawn, for an environment that asked in token ids. Others get none."""
    logprobs: tuple[float, ...] = ()
    """One per id."""
    policy_version: int = 0
    """The engine's when it drew the last token."""


@dataclass(frozen=True)
class Trajectory:
    """What an environment says of one sequence of tokens, where it says more than rewards and the end.

    One whose tokens the engine has drawn turn by turn, through TokenIds, is recorded by the engine: of that `loss_mask`
    and `reward` are taken. Any other, such as one drawn by HTTP from elsewhere, is taken as it is and needs `logprobs`.
    """

    ids: tuple[int, ...]
    """Prompt and response."""
    num_response_tokens: int
    reward: float | None
    """None: as the reward function says."""
    loss_mask: tuple[bool, ...] | None = None
    """Of the response's tokens; None: those that the model drew."""
    logprobs: tuple[float, ...] | None = None
    """Of the response's tokens."""
    status: Literal["completed", "truncated", "aborted", "failed"] = "completed"
    trained_on: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one action."""

    observation: Observation = ""
    """Nobody reads it when `done`."""
    reward: float = 0.0
    """Of this turn; an episode's reward is the sum of its turns'."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its numbers are averaged over episodes, by their last turn, and logged as env/<name>."""
    trajectories: tuple[Trajectory, ...] = ()
    """Of an episode that is done: where there are any, only those are trained on, and their rewards count."""


Opening = Observation | StepResult | None
"""How an episode begins: with its prompt; None: the row's own prompt is; a StepResult: it was over at once."""


class Environment(Protocol):
    """A batch of episodes that go on together. One that is written for a single episode gets a batch of one.

    Built by `factory(**env.options)` in a worker process, beside others of its kind, one of which is called at a time:
    it may block, and what it prints goes to standard error. An exception costs the episodes of its batch, is counted,
    and the environment is built anew. Where `step` is a coroutine function, so is `reset`, and those of a process are
    awaited beside each other.

    It may have besides: `get_state()`, which returns the state of the whole batch such that JSON can write it, and
    `load_state(state)`, in the place of `reset`, where its episodes can be saved with a checkpoint and go on elsewhere;
    `offload()` and `onload()`, where it holds memory of a device which other roles need between its turns; and `tools`,
    of which the chat template tells the model, as OpenAI writes them: {"type": "function", "function": {"name",
    "description", "parameters"}}.
    """

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        """Begin an episode for each row. Also called again, for others: when all are done, or nobody wants those that
        are not."""
        ...

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        """One turn of every episode, in the order of the rows; None for those that are done or no longer wanted."""
        ...

    def close(self) -> None:
        """Called once, after the last step, unless the process is killed. May be missing."""
        ...
