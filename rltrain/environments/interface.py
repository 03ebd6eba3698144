"""The interface of environments. An environment sets tasks and answers the model until an episode is done. Loads no
torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Row = Mapping[str, Any]
"""A row of the prompt file, with all its columns."""
Message = Mapping[str, Any]
"""A chat message in OpenAI's form: role and content. It can also have tool_calls, tool_call_id and name."""


@dataclass(frozen=True)
class TokenIds:
    """A request for a turn in token ids, made by an environment with its own tokenizer."""

    ids: tuple[int, ...]
    """The whole context of the turn. If it continues the tokens of the episode so far, the trajectory continues. Any
    other context begins another trajectory of the episode."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of this turn, in SGLang's names (max_new_tokens, temperature, stop, ...). Missing ones are
    the run's."""


Observation = str | Sequence[Message] | TokenIds
"""The next input of the model. A text is a message of the user. Before the first turn, or without a chat template, it
is the text itself."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model, parsed by the parser of the chat template."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Action:
    """The model's output in one turn."""

    text: str
    """The text without special tokens. If the model wrote tool calls, only the text before them."""
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    """True if a limit on tokens cut the turn. False if the model ended it."""
    ids: tuple[int, ...] = ()
    """All token ids of the turn. Empty unless the environment asked in token ids."""
    logprobs: tuple[float, ...] = ()
    """Log-probs of the ids, one per id."""
    policy_version: int = 0
    """The engine's policy version at the last token."""


@dataclass(frozen=True)
class Trajectory:
    """One sequence of tokens with its training data, for environments with more to report than rewards and the end.

    If the engine sampled the tokens turn by turn, through TokenIds, it has recorded them. Then only `loss_mask` and
    `reward` are used. Any other trajectory, such as one sampled elsewhere over HTTP, is used unchanged and needs
    `logprobs`.
    """

    ids: tuple[int, ...]
    """Token ids of prompt and response."""
    num_response_tokens: int
    reward: float | None
    """The reward, or None to use the reward function."""
    loss_mask: tuple[bool, ...] | None = None
    """Mask over the response's tokens. None selects the tokens that the model sampled."""
    logprobs: tuple[float, ...] | None = None
    """Log-probs of the response's tokens."""
    status: Literal["completed", "truncated", "aborted", "failed"] = "completed"
    trained_on: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one action."""

    observation: Observation = ""
    """The next input of the model. Ignored if `done`."""
    reward: float = 0.0
    """The reward of this turn. An episode's reward is the sum over its turns."""
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """Details to log. Numbers of an episode's last turn are averaged over episodes and logged as env/<name>."""
    trajectories: tuple[Trajectory, ...] = ()
    """The trajectories of a finished episode. If there are any, only they are trained on, with their own rewards."""


Opening = Observation | StepResult | None
"""The beginning of an episode: its prompt, or None for the row's own prompt. A StepResult can end it at once."""


class Environment(Protocol):
    """A batch of episodes that step together. Environments for a single episode are wrapped (see one_by_one.py).

    A worker process builds it by `factory(**env.options)`. A process can hold several environments, but calls one at a
    time. So an environment may block. Its prints go to standard error. An exception fails the episodes of its batch and
    is counted. The environment is then built again. If `step` is a coroutine function, `reset` must be one too, and the
    environments of a process are awaited concurrently.

    Optional methods and attributes:

    - `get_state()` returns the state of the whole batch as JSON values, and `load_state(state)` replaces `reset`. With
      both, episodes are saved with a checkpoint and can continue in another process.
    - `offload()` and `onload()` release and restore device memory, so that other roles can use it between turns.
    - `tools` lists the tools for the chat template, in OpenAI's form: {"type": "function", "function": {"name",
      "description", "parameters"}}.
    """

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        """Begins an episode for each row. A later call begins other episodes, once all are done or the unfinished ones
        are no longer needed."""
        ...

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        """Plays one turn of every episode, in the order of the rows. An action is None if its episode is done or no
        longer needed."""
        ...

    def close(self) -> None:
        """Releases resources. Called once after the last step, unless the process is killed. Optional."""
        ...
