"""Episodes that go on together in one environment, and which environment a job has."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rltrain.environments.encoding import Json, decode_action, encode_action
from rltrain.environments.interface import Action, Observation, Row, Trajectory

# Episodes that go on together in one environment, as the rank that owns them sees them; and what it learns of each.

FailureKind = Literal["error", "step_time", "episode_time", "process", "neighbour"]
"""error: the environment raised, or returned what it should not. step_time, episode_time: over a limit. process: its
process ended by itself. neighbour: its process was ended because of another episode."""
FAILURE_KINDS: tuple[FailureKind, ...] = ("error", "step_time", "episode_time", "process", "neighbour")


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode may take of its environment. Limits on tokens are those of whoever draws them."""

    step_s: float = 60.0
    """One call; the process of one that takes longer is killed."""
    episode_s: float | None = None
    """All calls of an episode together."""
    turns: int | None = None
    """An episode with so many is over, whatever its environment says."""
    start_s: float = 120.0
    """For a process to start and build an environment, for a reset for which one is built, and for the first calls of
    a process, which import what they need. Half of it after each of them in a row that does not return."""


DIFFERING = re.compile(r"[\d/\\_]")
"""What a word has that differs between failures of one kind."""


@dataclass(frozen=True)
class EpisodeFailure:
    """Why an episode could not go on."""

    kind: FailureKind
    description: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.traceback or self.description

    @property
    def alike(self) -> str:
        """Equal for failures that differ in numbers, paths and names of temporary files alone."""
        words = self.description.split()
        return " ".join([self.kind, *(word for word in words if not DIFFERING.search(word))])


@dataclass(frozen=True)
class EpisodeEvent:
    """What came of `begin`, or of an action: exactly one for each, but for episodes that were abandoned."""

    episode: int
    observation: Observation | None
    """None of `begin`: the row's own prompt. None where `done`, but for an episode that its limit of turns ended."""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """That the environment's call took, of the whole batch."""
    failure: EpisodeFailure | None = None
    """Then done."""
    truncated: bool = False
    """Done by the limit of turns."""
    trajectories: tuple[Trajectory, ...] = ()


SavedBatch = Mapping[str, Json]
"""A batch as JSON writes it: its episodes and what is needed to go on with them."""


@dataclass(eq=False)
class EpisodeBatch:
    """`environment` is its number in the worker `place`, the two ways to it; -1 before there is one."""

    episodes: Sequence[int]
    rows: Sequence[Row]
    seeds: Sequence[int]
    live: set[int]
    """Those that are not done and that somebody wants."""
    place: int = -1
    environment: int = -1
    builds: bool = False
    """The environment has still to be built."""
    is_called: bool = False
    """A call of it is under way."""
    actions: dict[int, Action] = field(default_factory=dict)
    """Of live episodes, for the next step."""
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
        """Of all episodes, in order, None for those that are not live; they are no longer kept here."""
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
        """Without its rows and seeds, which its environment's state has in their place."""
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


# Which environment a job has, as a rank knows it: nothing of it is imported there.


@dataclass(frozen=True)
class EnvironmentFactory:
    """What a worker needs to build environments. All but the first two is for those of other frameworks, which are told
    of it in their own ways."""

    function: str
    """env.function, as in the config: see registry.py."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """env.options: keyword arguments."""
    prompt_key: str = "prompt"
    """data.train.prompt_key: the column of rows that has the prompt."""
    label_key: str = "label"
    model_path: str | None = None
    """The folder of a checkpoint with the model's tokenizer."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The run's, in SGLang's names."""

    def as_message(self) -> dict[str, Any]:
        return asdict(self)
