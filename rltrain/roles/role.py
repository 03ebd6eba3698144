"""The base class of roles, and the job that they share."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from rltrain.checkpoint.run_files import Contents
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config, Offload
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset
from rltrain.exchange.exchange import Shipment
from rltrain.models import Architecture
from rltrain.models.flops import BACKWARD, forward_flops, vision_flops
from rltrain.models.vision import Grid as Images
from rltrain.models.vision import Vision
from rltrain.observability.run_logs import append_to
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.roles.inputs import JobRows
from rltrain.roles.prompt_images import ImageDecoder, hold_images
from rltrain.runtime.grid import Grid, job_leader
from rltrain.runtime.heartbeat import Heartbeat
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.job_store import POLL_S, JobStore, Waiter, poll
from rltrain.runtime.placement import Placement
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.world import World
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import device_roles, device_roles_if_offloaded
from rltrain.training.backend import ModelSite, training_backend

# Floating-point operations and tokens of this rank's models, counted as in models.flops.


class Begun(NamedTuple):
    operations: float = 0.0
    tokens: float = 0.0


class Operations:
    """This rank's share of the work of its replicas since the last `take`."""

    def __init__(self) -> None:
        self._begun = Begun()

    def add(
        self,
        architecture: Architecture,
        lengths: Sequence[int],
        num_ranks: int,
        *,
        before: Sequence[int] = (),
        backward: bool,
    ) -> None:
        """Adds a forward pass over sequences of these lengths on a replica of `num_ranks`, and with `backward` the
        backward pass. Of the sequences, beginnings of the lengths `before` are not computed."""
        cost = forward_flops(architecture)
        work = cost.training if backward else cost.forward
        operations, tokens = work(lengths) - work(before), sum(lengths) - sum(before)
        self._begun = Begun(self._begun.operations + operations / num_ranks, self._begun.tokens + tokens / num_ranks)

    def add_images(self, vision: Vision, grids: Iterable[Images], num_ranks: int, *, backward: bool) -> None:
        """Adds a pass of a vision tower over images of these grids, and with `backward` the backward pass. `num_ranks`
        of a replica encode the same images."""
        operations = vision_flops(vision, grids) * (1 + BACKWARD if backward else 1)
        self._begun = self._begun._replace(operations=self._begun.operations + operations / num_ranks)

    def take(self) -> Begun:
        begun, self._begun = self._begun, Begun()
        return begun


# Logs of samples for users: one JSON object per line, appended during the run.


class SampleLog:
    """A JSONL file in <output_dir>. The first record creates the file and its folder.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, output_dir: str, name: str) -> None:
        self.name, self.path = name, Path(output_dir, name)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, *records: Mapping[str, Any]) -> None:
        """Appends the records. They are in the file when this returns."""
        append_to(self.path, "".join(json.dumps(record) + "\n" for record in records))


Metrics = dict[str, float]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Job:
    """The run as seen by the roles of this process."""

    config: Config
    world: World
    placement: Placement
    grids: Mapping[str, Grid]
    groups: ProcessGroups
    architectures: Mapping[str, Architecture]
    """Model architectures by role."""
    job_store: JobStore
    waiter: Waiter
    rows: JobRows
    pause: Callable[[str], None]
    """Makes all ranks save a checkpoint and end. The argument is the reason, a sentence for the user."""

    resumed: Resumed | None = None
    """The checkpoint to resume from, or None if the run starts at its first step."""

    images: ImageStore | None = None
    """The decoded images of this node, with model.vision."""

    operations: Operations = field(default_factory=Operations)
    """FLOPs and tokens of the current task."""

    @property
    def first_step(self) -> int:
        """The first training step of this process."""
        return self.resumed.step if self.resumed else 0

    @property
    def heartbeat(self) -> Heartbeat:
        return self.job_store.heartbeat

    def leader_of(self, role: str) -> int:
        """Returns the rank that reports the metrics of the whole role."""
        return self.grids[role].owner(0)

    @property
    def leader(self) -> int:
        """The rank that reports for the whole job."""
        return job_leader(self.grids)

    def offload_of(self, role: str) -> Offload:
        """Returns `<role>.offload`. "auto" means False on a CPU, because offloading would only copy
        within host memory."""
        offload: Offload = getattr(self.config, role).offload
        return False if offload == "auto" and self.world.device.type == "cpu" else offload

    @property
    def offloads(self) -> dict[str, Offload]:
        """The `offload` settings of this rank's roles with memory on its device."""
        on_device = device_roles() | {role for role in device_roles_if_offloaded() if self.offload_of(role)}
        hosted = self.placement.hosts(self.world.rank)
        return {role: self.offload_of(role) for role in hosted if role in on_device}

    @property
    def architecture(self) -> Architecture:
        """The policy's architecture."""
        return self.architectures["actor"]

    def model_site(self, role: str, checkpoint: str | None = None) -> ModelSite:
        """Returns the place in which the training backend builds the role's model.

        `checkpoint` selects one model of a role with several models.
        """
        return ModelSite(
            config=self.config,
            role=role,
            world=self.world,
            grid=self.grids[role],
            groups=self.groups,
            architecture=self.architectures[role],
            on_micro_batch=partial(self._begin_micro_batch, role),
            on_images=partial(self._begin_images, role),
            images=self.images,
            checkpoint=checkpoint,
        )

    def _begin_micro_batch(self, role: str, lengths: Sequence[int], before: Sequence[int], backward: bool) -> None:
        self.heartbeat.advance()
        self.waiter.meanwhile()
        grid = self.grids[role]
        num_ranks = len(grid.ranks) // grid.dp
        self.operations.add(self.architectures[role], lengths, num_ranks, before=before, backward=backward)

    def _begin_images(self, role: str, grids: Sequence[Images], backward: bool) -> None:
        vision, grid = self.architectures[role].vision, self.grids[role]
        assert vision is not None, "the model has a tower"
        self.operations.add_images(vision, grids, len(grid.ranks) // grid.dp // grid.pp, backward=backward)

    def training_layout(self, role: str) -> Layout:
        """Returns the layout of the role's model parameters. Every rank of the job can compute it."""
        return training_backend(self.config, role).layout(self.model_site(role))

    def adapters_layout(self) -> Layout:
        """Returns the layout of the actor's low-rank adapters. Every rank of the job can compute it."""
        return training_backend(self.config, "actor").adapters_layout(self.model_site("actor"))

    @cached_property
    def shape(self) -> RunShape:
        return RunShape.of(self.config)

    @cached_property
    def decoder(self) -> ImageDecoder | None:
        """Decodes images of rows, with model.vision."""
        if self.images is None or self.rows.images is None:
            return None
        return ImageDecoder(self.images, self.rows.images, self.heartbeat.advance)

    def hold_images(self, experience: Experience, step: int, rows: PromptDataset | None = None) -> None:
        """Holds the images of samples for this rank until the end of `step`. Decodes those that the node lacks.

        The samples are from `rows`, by default the prompts of training. Has no effect without model.vision.
        """
        if self.decoder is not None and experience.has("image_keys"):
            hold_images(self.decoder, self.rows.prompts.train if rows is None else rows, experience, step)

    def hold_received_images(self, transfer: str, step: int, chunk: int, experience: Experience) -> None:
        """Holds the images of the experience of a transfer, as `hold_images` does."""
        if experience.has("image_keys"):  # other jobs may have no prompts
            evaluated = transfer == "evaluation_samples"
            self.hold_images(experience, step, self.rows.prompts.evaluations[chunk] if evaluated else None)


class Role:
    """A part in the run, executed by the ranks of its grid. Its tasks are methods `task(step, chunk) -> Metrics |
    None`.

    `shipments` maps (transfer, step, chunk) to experience: received for a task, or left by a task to be sent.
    """

    name: ClassVar[str]

    parts: Mapping[str, MemoryPart]
    """The role's memory on the device, by the part names of tasks.roles. Set only if the role is declared to have a
    model."""

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, "Role"]) -> "Role":
        """Builds the role on this rank, after the roles in `hosted`. Collective over: the role's ranks."""
        return cls(job)

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.grid = job.grids[self.name]
        self.shipments: dict[tuple[str, int, int], Shipment] = {}
        self.logs: list[SampleLog] = []
        """Log files of the role that this rank appends to."""
        self.serve: Callable[[], None] | None = None
        """Joins due weight syncs while this rank waits for others. None if it joins none. Set before the first task."""

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
        """Calls `come` every `every_s` seconds until it returns a value other than None, and returns the value.

        This rank serves others meanwhile. `what` and `ranks` name the value and the ranks responsible for it in
        messages.
        """
        return poll(self.job.waiter, come, what, ranks, self.serve, every_s)

    def save_state(self) -> Mapping[str, Contents]:
        """Returns this rank's part of the role's checkpoint, as files by name. It stays unchanged until the next call,
        so a thread can write it.

        Called between two steps. Collective over: the role's ranks.
        """
        return {}

    def take_copying_s(self) -> float:
        """Returns the seconds since the last call that this rank's tasks waited for copies of `save_state`."""
        return 0.0

    def close(self) -> None:
        """Releases resources outside this process. Called once, after the last task."""
