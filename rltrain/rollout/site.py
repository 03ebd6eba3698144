"""What an engine is built of, and what it is to the rest of the job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rltrain.config.schema import Config, Served
from rltrain.models import Architecture
from rltrain.offload.memory_parts import MemoryPart
from rltrain.rollout.engine import Engine
from rltrain.rollout.stop_strings import Tokenizer
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World


@dataclass(frozen=True)
class EngineSite:
    """This rank's place for an engine on `ranks`, of those of the role's `grid`."""

    config: Config
    world: World
    ranks: tuple[int, ...]
    grid: Grid
    groups: ProcessGroups
    architecture: Architecture
    tokenizer: Tokenizer
    job_store: JobStore
    leaves: bool
    """Whether it gives its device memory up between its tasks."""
    draws_during_syncs: bool
    """Whether weights may come while it has responses under way."""
    others: tuple[str, ...] = ()
    """Other roles with something on this rank's device."""
    role: str = "rollout"
    """The config section that describes it."""
    updates_together: bool = False
    """Whether all engines of the role get an update before any gets the next one: those of a node then keep one copy of
    the weights."""

    weights_change: bool = True
    """Whether syncs bring weights, or the role's checkpoint is served as it is."""

    @property
    def settings(self) -> Served:
        return self.config.served(self.role)

    @property
    def num_nodes(self) -> int:
        return len({rank // self.world.ranks_per_node for rank in self.ranks})


@dataclass(frozen=True)
class HostedEngine:
    """`parts` are "weights" and "kv_cache", as tasks.roles names them, and "base" where it has adapters apart."""

    engine: Engine
    parts: Mapping[str, MemoryPart]
    metrics: Callable[[], dict[str, float]] = dict
    """Of what it did since the last call."""
