"""Batches of episodes in one environment, and the description of a job's environment."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rltrain.environments.encoding import Json, decode_action, encode_action
from rltrain.environments.interface import Action, Observation, Row, Trajectory

# Batches of episodes, as the host sees them.

FailureKind = Literal["error", "step_time", "episode_time", "process", "neighbour"]
"""error: the environment raised, or returned a wrong value. step_time, episode_time: over a limit. process: its process
ended by itself. neighbour: its process was ended because of another episode."""
FAILURE_KINDS: tuple[FailureKind, ...] = ("error", "step_time", "episode_time", "process", "neighbour")


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode. The engine has the limits on tokens."""

    step_s: float = 60.0
    """Seconds of one call. A process over this limit is killed."""
    episode_s: float | None = None
    """Seconds of all calls of an episode together."""
    turns: int | None = None
    """Maximal number of turns. The episode then ends, even if its environment would continue."""
    start_s: float = 120.0
    """Seconds for a process to start and build an environment. Also the limit of a reset with a new environment, and of
    the first calls of a process, because they import modules. It halves after each consecutive hang."""


DIFFERING = re.compile(r"[\d/\\_]")
"""Characters of words that differ between similar failures."""


@dataclass(frozen=True)
class EpisodeFailure:
    """The reason why an episode failed."""

    kind: FailureKind
    description: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.traceback or self.description

    @property
    def alike(self) -> str:
        """A key of similar failures. It is equal if only numbers, paths or names of temporary files differ."""
        words = self.description.split()
        return " ".join([self.kind, *(word for word in words if not DIFFERING.search(word))])


@dataclass(frozen=True)
class EpisodeEvent:
    """The result of `begin` or of an action. Each gets exactly one, unless its episode is abandoned."""

    episode: int
    observation: Observation | None
    """The next input of the model. None after `begin` means the row's own prompt. None if `done`, except at the limit
    of turns."""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of the environment's call, for the whole batch."""
    failure: EpisodeFailure | None = None
    """The reason of a failed episode, or None. A failed episode is `done`."""
    truncated: bool = False
    """True if the limit of turns ended the episode."""
    trajectories: tuple[Trajectory, ...] = ()


SavedBatch = Mapping[str, Json]
"""A batch as JSON: its episodes and the state to continue them."""


@dataclass(eq=False)
class EpisodeBatch:
    """The episodes of one environment. `environment` is its number in the worker `place`. Both are -1 before a worker
    is chosen."""

    episodes: Sequence[int]
    rows: Sequence[Row]
    seeds: Sequence[int]
    live: set[int]
    """Episodes that are neither done nor abandoned."""
    place: int = -1
    environment: int = -1
    builds: bool = False
    """True if the environment must still be built."""
    is_called: bool = False
    """True during a call to the environment."""
    actions: dict[int, Action] = field(default_factory=dict)
    """Actions of live episodes for the next step."""
    turns: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, begun: Sequence[tuple[int, Row, int]]) -> "EpisodeBatch":
        episodes, rows, seeds = zip(*begun, strict=True)
        return cls(episodes, rows, seeds, set(episodes))

    @property
    def can_step(self) -> bool:
        return bool(self.live) and not self.is_called and self.live <= self.actions.keys()

    def take_actions(self) -> list[Json]:
        """Removes and returns the actions of all episodes, in order. They are None for episodes that are not live."""
        taken = [
            encode_action(self.actions.get(episode)) if episode in self.live else None for episode in self.episodes
        ]
        self.actions.clear()
        return taken

    def save(self, state: Json) -> SavedBatch:
        return {
            "episodes": list(self.episodes),
            "live": sorted(self.live),
            "actions": [[episode, encode_action(action)] for episode, action in self.actions.items()],
            "turns": self.turns,
            "seconds": self.seconds,
            "state": state,
        }

    @classmethod
    def load(cls, saved: SavedBatch) -> "EpisodeBatch":
        """Returns a saved batch without its rows and seeds. The environment's state replaces them."""
        actions = {episode: action for episode, message in saved["actions"] if (action := decode_action(message))}
        return cls(
            tuple(saved["episodes"]),
            rows=(),
            seeds=(),
            live=set(saved["live"]),
            actions=actions,
            turns=saved["turns"],
            seconds=saved["seconds"],
        )


# The job's environment, described without importing it.


@dataclass(frozen=True)
class EnvironmentFactory:
    """The parameters of a worker to build environments. Adapters of other frameworks use all fields, other environments
    only the first two."""

    function: str
    """env.function, as in the config. `worker.load_environment` resolves it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """env.options: keyword arguments."""
    prompt_key: str = "prompt"
    """data.train.prompt_key: the column with the prompt."""
    label_key: str = "label"
    model_path: str | None = None
    """The folder of a checkpoint with the model's tokenizer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The run's sampling parameters, in SGLang's names."""
    batch_size: int = 1
    """env.batch_size: most episodes of a batch."""
    gpus: Sequence[str] = ()
    """The GPUs for CUDA_VISIBLE_DEVICES of the processes. Empty leaves it as it is."""

    def as_message(self) -> dict[str, Any]:
        return asdict(self)
