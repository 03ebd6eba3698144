"""What every role is made of."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from rltrain.checkpoint.run_files import Contents
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config, Offload
from rltrain.exchange.exchange import Shipment
from rltrain.models import Architecture
from rltrain.models.flops import forward_flops
from rltrain.observability.run_logs import append_to
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.roles.inputs import JobRows
from rltrain.runtime.grid import Grid, job_leader
from rltrain.runtime.heartbeat import Heartbeat
from rltrain.runtime.job_store import POLL_S, JobStore, Waiter, poll
from rltrain.runtime.placement import Placement
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import device_roles, device_roles_if_offloaded
from rltrain.training.backend import ModelSite, training_backend

# The floating-point operations that models of this rank do, as models.flops counts them, and the tokens.


class Begun(NamedTuple):
    operations: float = 0.0
    tokens: float = 0.0


class Operations:
    """This rank's share of those that its replicas have begun since they were last taken."""

    def __init__(self) -> None:
        self._begun = Begun()

    def add(self, architecture: Architecture, lengths: Sequence[int], num_ranks: int, *, backward: bool) -> None:
        """Of sequences of these lengths, forward and perhaps `backward`, on a replica of `num_ranks`."""
        cost = forward_flops(architecture)
        operations = cost.training(lengths) if backward else cost.forward(lengths)
        self._begun = Begun(
            self._begun.operations + operations / num_ranks, self._begun.tokens + sum(lengths) / num_ranks
        )

    def take(self) -> Begun:
        begun, self._begun = self._begun, Begun()
        return begun


# Records of samples for people: one JSON object per line, appended while the run goes on.


class SampleLog:
    """A file of <output_dir>, made with its folder at the first record. ConfigError where it cannot be written."""

    def __init__(self, output_dir: str, name: str) -> None:
        self.name, self.path = name, Path(output_dir, name)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, *records: Mapping[str, Any]) -> None:
        """On disk when this returns."""
        append_to(self.path, "".join(json.dumps(record) + "\n" for record in records))


Metrics = dict[str, float]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Job:
    """What the roles of this process read of the run."""

    config: Config
    world: World
    placement: Placement
    grids: Mapping[str, Grid]
    groups: ProcessGroups
    architectures: Mapping[str, Architecture]
    """By role."""
    job_store: JobStore
    waiter: Waiter
    rows: JobRows
    pause: Callable[[str], None]
    """Have all ranks save and end for a person to look, with this sentence."""

    resumed: Resumed | None = None
    """The checkpoint that the run goes on from; None: it starts at the first step."""

    operations: Operations = field(default_factory=Operations)
    """Of the task that is under way."""

    @property
    def first_step(self) -> int:
        """The first training step of this process."""
        return self.resumed.step if self.resumed else 0

    @property
    def heartbeat(self) -> Heartbeat:
        return self.job_store.heartbeat

    def leader_of(self, role: str) -> int:
        """The rank that reports for a role: its metrics are those of the whole role."""
        return self.grids[role].owner(0)

    @property
    def leader(self) -> int:
        """The rank that reports what concerns the whole job."""
        return job_leader(self.grids)

    def offload_of(self, role: str) -> Offload:
        """`<role>.offload`, where auto is no on a device that is the host: moves would only copy memory within it."""
        offload: Offload = getattr(self.config, role).offload
        return False if offload == "auto" and self.world.device.type == "cpu" else offload

    @property
    def offloads(self) -> dict[str, Offload]:
        """Of this rank's roles that have something on its device, whether they leave it."""
        on_device = device_roles() | {role for role in device_roles_if_offloaded() if self.offload_of(role)}
        hosted = self.placement.hosts(self.world.rank)
        return {role: self.offload_of(role) for role in hosted if role in on_device}

    @property
    def architecture(self) -> Architecture:
        """Of the policy."""
        return self.architectures["actor"]

    def model_site(self, role: str, checkpoint: str | None = None) -> ModelSite:
        """Where the training backend builds the role's model, or one of several: that of another `checkpoint`."""
        return ModelSite(
            config=self.config,
            role=role,
            world=self.world,
            grid=self.grids[role],
            groups=self.groups,
            architecture=self.architectures[role],
            on_micro_batch=partial(self._begin_micro_batch, role),
            checkpoint=checkpoint,
        )

    def _begin_micro_batch(self, role: str, lengths: Sequence[int], backward: bool) -> None:
        self.heartbeat.advance()
        self.waiter.meanwhile()
        grid = self.grids[role]
        self.operations.add(self.architectures[role], lengths, len(grid.ranks) // grid.dp, backward=backward)

    def training_layout(self, role: str) -> Layout:
        """Where the parameters of the role's model lie; every rank of the job can tell."""
        return training_backend(self.config, role).layout(self.model_site(role))

    def adapters_layout(self) -> Layout:
        """Where the actor's low-rank adapters lie; every rank of the job can tell."""
        return training_backend(self.config, "actor").adapters_layout(self.model_site("actor"))

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(self.config)


class Role:
    """A part in the run, played by the ranks of its grid. Its tasks are methods `task(step, chunk) -> Metrics | None`.

    `shipments` holds, by transfer, step and chunk, what was received for a task and what a task leaves to be sent.
    """

    name: ClassVar[str]

    parts: Mapping[str, MemoryPart]
    """What it holds on the device, by the names of tasks.roles; only where it is declared to have a model."""

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, "Role"]) -> "Role":
        """The role on this rank, which has built `hosted` already. Collective over: the role's ranks."""
        return cls(job)

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.grid = job.grids[self.name]
        self.shipments: dict[tuple[str, int, int], Shipment] = {}
        self.logs: list[SampleLog] = []
        """Files that this rank appends to for the role."""
        self.serve: Callable[[], None] | None = None
        """What this rank does for others while it waits, if anything; set before the first task."""

    @property
    def leader(self) -> int:
        """The rank that reports for the role."""
        return self.job.leader_of(self.name)

    @property
    def dp(self) -> int:
        """This rank's data-parallel index."""
        return self.grid.coordinates(self.job.world.rank).dp

    def wait_for(
        self, come: Callable[[], Found | None], what: str, ranks: Sequence[int], every_s: float = POLL_S
    ) -> Found:
        """Returns what `come` gives once it is there, for which `ranks` care. This rank serves others meanwhile."""
        return poll(self.job.waiter, come, what, ranks, self.serve, every_s)

    def save_state(self) -> Mapping[str, Contents]:
        """What this rank keeps of the role for a run that goes on from here: files by name, safe to be written until
        the next call.

        Called between two steps. Collective over: the role's ranks.
        """
        return {}

    def take_copying_s(self) -> float:
        """Seconds since the last call that a task of this rank waited for what `save_state` left to be copied."""
        return 0.0

    def close(self) -> None:
        """Called once after the last task."""
