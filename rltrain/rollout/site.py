"""What an engine is built of, and what it is to the rest of the job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rltrain.cluster.grid import Grid
from rltrain.cluster.process_groups import ProcessGroups
from rltrain.cluster.world import World
from rltrain.config.engines import Served
from rltrain.config.schema import Config
from rltrain.liveness.job_store import JobStore
from rltrain.models import Architecture
from rltrain.residency.memory_parts import MemoryPart
from rltrain.rollout.engine import Engine
from rltrain.rollout.stop_strings import Tokenizer


@dataclass(frozen=True)
class EngineSite:
    """This rank's place for an engine of a `role` on `ranks`, of those of the role's `grid`."""

    role: str
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

    @property
    def settings(self) -> Served:
        """The role's config section."""
        settings: Served = getattr(self.config, self.role)
        return settings

    @property
    def num_nodes(self) -> int:
        return len({rank // self.world.ranks_per_node for rank in self.ranks})


@dataclass(frozen=True)
class HostedEngine:
    """`parts` are "weights" and "kv_cache", as tasks.roles names them."""

    engine: Engine
    parts: Mapping[str, MemoryPart]
    metrics: Callable[[], dict[str, float]] = dict
    """Of what it did since the last call."""
