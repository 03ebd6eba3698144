"""Roles that evaluate samples with a policy: the reference, inference and the teacher."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.algorithms.registry import algorithm_of
from rltrain.checkpoint.run_files import AnyFile, Contents
from rltrain.checkpoint.saved_state import Counts, Destination, SavedState, contents, flat_name
from rltrain.data.columns import teachers_of_rows
from rltrain.data.demonstrations import Preferences
from rltrain.data.experience import Experience
from rltrain.exchange.exchange import Shipment
from rltrain.models.of_roles import reference_is_actors_base, reference_uses_actor_modules
from rltrain.offload.host_memory import HostTensors, NodeCopy
from rltrain.offload.memory_parts import MemoryPart, OverlayPart
from rltrain.reshard.layout import Layout
from rltrain.roles.actor import ActorRole
from rltrain.roles.role import Job, Role
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S
from rltrain.training.backend import training_backend
from rltrain.training.shards import answered_for, replica_of
from rltrain.training.trainable import RoleModel

# Role inference: the actor's log-probs before an update, on other ranks, while the actor trains.


class InferenceRole(Role):
    """A model with the actor's weights of the last weight sync. Its layout may differ from the actor's."""

    name = "inference"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model = training_backend(job.config, self.name).frozen_model(job.model_site(self.name))
        self.parts = self.model.parts
        self.temperature = algorithm_of(job.config).temperature()

    def inference_logprobs(self, step: int, chunk: int) -> None:
        """Computes the log-probs of the sampled tokens under the present weights. Collective over: this replica."""
        scored = self.shipments.pop(("scored", step, chunk))
        logprobs = self.model.evaluate(
            scored.experience,
            max_tokens=self.config.inference.micro_batch_limit,
            temperature=self.temperature,
        )
        self.shipments["inference_logprobs", step, chunk] = scored.with_fields(actor_logprobs=logprobs)


# The teacher: a frozen policy. The actor learns to imitate it on the actor's samples. Kinds of rows may have different
# teachers.


class TeacherRole(Role):
    """The policy of one teacher or several. Several have the same architecture and layout, and a column selects a row's
    teacher."""

    name = "teacher"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.settings = job.config.teacher
        self.temperature = algorithm_of(job.config).temperature()
        checkpoints = self.settings.checkpoints
        sites = [job.model_site(self.name, checkpoint) for checkpoint in checkpoints.values()]
        self.models: list[RoleModel] = [training_backend(job.config, self.name).frozen_model(site) for site in sites]
        self.parts = {"weights": MemoryPart(self._weights)}
        self.teacher_of_row: Tensor | None = None
        """Number of each row's teacher, shape [rows of data.train]. None if there is only one teacher."""
        if len(checkpoints) > 1:
            train, column = job.config.data.train, self.settings.column
            assigned = teachers_of_rows(job.rows.prompts.train, train, column, [*checkpoints])
            self.teacher_of_row = torch.tensor(assigned, dtype=torch.int16)
        vocabulary = job.architectures[self.name].vocab_size
        self.count = vocabulary if self.settings.top_k == "full" else self.settings.top_k

    def teacher_logprobs(self, step: int, chunk: int) -> None:
        """Computes the teachers' log-probs of the sampled tokens, and of the `teacher.top_k` likeliest tokens if set.

        Collective over: this replica.
        """
        scored = self.shipments.pop(("scored", step, chunk))
        experience = scored.experience
        logprobs = torch.zeros(experience.num_tokens)
        ids = torch.zeros(experience.num_tokens, self.count, dtype=torch.int64)
        top = torch.zeros(experience.num_tokens, self.count)
        for number, model in enumerate(self.models):
            mine = self._samples_of(number, experience)
            at = torch.nonzero(torch.repeat_interleave(mine, experience.lengths)).flatten()
            found = model.log_probs(
                experience.select(torch.nonzero(mine).flatten()),
                count=self.count,
                max_tokens=self.settings.micro_batch_limit,
                temperature=self.temperature,
            )
            for result, values in zip((logprobs, ids, top), found, strict=True):
                result[at] = values
        self.shipments["teacher_logprobs", step, chunk] = scored.with_fields(
            teacher_logprobs=logprobs, teacher_top_ids=ids, teacher_top_logprobs=top
        )

    def _samples_of(self, number: int, experience: Experience) -> Tensor:
        """Returns whether each sample belongs to teacher `number`, shape [samples]."""
        if self.teacher_of_row is None:
            return torch.ones(experience.num_samples, dtype=torch.bool)
        return self.teacher_of_row[experience.prompt_ids] == number

    def _weights(self) -> list[Tensor]:
        return [parameter for model in self.models for parameter in model.parameters.values()]


# Weights without optimizer state, saved and loaded through layouts. For models that change without training.

WEIGHTS = "weights"


def save_weights(layout: Layout, rank: int, read: Callable[[str], Tensor]) -> Contents:
    """Returns the parameters to be saved by `rank`. Of ranks with equal parameters, the first one saves them.

    `read` returns a parameter by its name, flat and on the host.
    """
    names = [name for name, _ in layout.on(rank).parameters]
    pieces = answered_for(layout, rank)
    if replica_of(layout, rank)[0]:
        pieces = pieces[:0]
    flats = {flat_name(WEIGHTS, names[number]): read(names[number]) for number in sorted({*pieces["parameter"]})}
    return contents(layout.tensors, names, pieces, flats, Counts(0, 0))


def load_weights(layout: Layout, rank: int, files: Sequence[AnyFile], parameters: Mapping[str, Tensor]) -> None:
    """Fills `parameters`, those of `rank` in `layout`, from the files of all ranks that saved. These may have another
    layout.

    Raises CheckpointError like `SavedState`. Not collective.
    """
    mine = layout.on(rank)
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    SavedState(files, layout.tensors).read([Destination(WEIGHTS, mine.pieces, flats)])


# The reference: the policy that a KL penalty or metric compares the actor with. It is frozen, or refreshed at
# intervals.


def uses_actor_modules(job: Job) -> bool:
    """Returns whether the reference uses the actor's modules instead of a separate model.

    On a CPU it does so only if reference.offload is true. There the actor's weights, moved out of the way, would take
    as much memory as a second model.
    """
    has_device = job.world.device.type != "cpu"
    takes_turns = has_device or job.config.reference.offload is True
    return takes_turns and reference_uses_actor_modules(job.config, job.grids, job.architectures)


def is_actors_base(job: Job) -> bool:
    """Returns whether the reference is the actor without its adapters. It then takes no memory."""
    return reference_is_actors_base(job.config, job.grids, job.architectures)


class ReferenceRole(Role):
    """The reference policy.

    With the actor's ranks and layout, its weights are kept on the host and replace the actor's during its task. If the
    actor has adapters, the reference is their base and shares the actor's weights. `actor` is this rank's actor, or
    None.
    """

    name = "reference"

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, Role]) -> "ReferenceRole":
        actor = hosted.get(ActorRole.name)
        return cls(job, actor if isinstance(actor, ActorRole) else None)

    def __init__(self, job: Job, actor: ActorRole | None) -> None:
        super().__init__(job)
        self.training_data = job.rows.training_data
        self.temperature = algorithm_of(job.config).temperature()
        self.model: RoleModel
        self.parts: Mapping[str, MemoryPart]
        self.host: HostTensors | None = None
        if actor is not None and is_actors_base(job):
            assert actor.model.adapted, "only the base of adapters is the actor's"
            self.model, self.parts = actor.model.adapted.base, {}
        elif actor is not None and uses_actor_modules(job):
            self.model, self.host = actor.model, self._host_weights(actor.model)
            self.parts = {"weights": self._weights_over(actor.model, self.host)}
        else:
            self.model = training_backend(job.config, self.name).frozen_model(job.model_site(self.name))
            self.parts = self.model.parts
            self._load_refreshed(self.model.parameters)

    def _weights_over(self, actor: RoleModel, host: HostTensors) -> OverlayPart:
        return OverlayPart(
            actor.parts["weights"],
            list(actor.parameters.values()),
            list(host.tensors.values()),
            is_own=host.is_own,
        )

    def _host_weights(self, actor: RoleModel) -> HostTensors:
        """Returns the reference's weights on the host. Of a node's ranks with the same share, the first reads it and
        the others map its memory."""

        def read(host: HostTensors) -> None:
            self.job.model_site(self.name).load_weights(actor.layout, host.tensors)
            self._load_refreshed(host.tensors, actor.layout)

        copy = NodeCopy.among(self.job.job_store, "the reference's weights", actor.layout.ranks, actor.layout.parts)
        return copy.tensors(actor.parameters, read)

    def _load_refreshed(self, parameters: Mapping[str, Tensor], layout: Layout | None = None) -> None:
        """Loads the reference of the last refresh in a resumed run."""
        if self.job.resumed and self.config.reference.refresh_every:
            files = self.job.resumed.files(self.name)
            load_weights(layout or self.model.layout, self.job.world.rank, files, parameters)

    def keep_actor_weights(self) -> None:
        """Copies the actor's present weights into the reference, if it uses the actor's modules. Collective over: its
        ranks."""
        assert self.host is not None, "its weights lie on the host"
        if self.host.is_own:
            for name, tensor in self.model.parameters.items():
                self.host.tensors[name].copy_(tensor.detach())
        with self.job.heartbeat.task_clock.waiting("the others to refresh the reference"):
            cpu_group = self.job.groups.cpu[self.grid.ranks]
            dist.monitored_barrier(cpu_group, timeout=timedelta(seconds=TRANSPORT_TIMEOUT_S))

    def save_state(self) -> Mapping[str, Contents]:
        """Returns the weights if they are ever refreshed."""
        if not self.config.reference.refresh_every:
            return {}
        rank = self.job.world.rank
        return {f"rank_{rank:05d}.safetensors": save_weights(self.model.layout, rank, self._read)}

    def _read(self, name: str) -> Tensor:
        if self.host is not None:
            return self.host.tensors[name].detach().reshape(-1).clone()
        return self.parts["weights"].read(self.model.parameters[name])

    def reference_logprobs(self, step: int, chunk: int) -> None:
        """Computes the log-probs of the sampled tokens under the reference. Collective over: this replica.

        Preference pairs are read here instead of received, so a reference on other ranks does not wait for the actor.
        """
        if isinstance(self.training_data, Preferences):
            pairs = self.training_data.for_step(step, part=self.dp, num_parts=self.grid.dp)
            self.job.hold_images(pairs, step, self.training_data.train)
            sizes = self.training_data.group_sizes(step)
            samples = Shipment(pairs, sizes, self.training_data.holders(sizes, self.grid.dp))
        else:
            samples = self.shipments.pop(("scored", step, chunk))
        self.shipments["reference_logprobs", step, chunk] = self._with_logprobs(samples)

    def evaluation_logprobs(self, step: int, chunk: int) -> None:
        """Computes the log-probs of the held-out pairs under the reference. Collective over: this replica."""
        assert isinstance(self.training_data, Preferences), "only an algorithm that learns from pairs has this task"
        pairs = self.training_data.held_out(part=self.dp, num_parts=self.grid.dp)
        self.job.hold_images(pairs, step, self.training_data.datasets["data.eval"])
        sizes = self.training_data.held_out_sizes()
        held_out = Shipment(pairs, sizes, self.training_data.holders(sizes, self.grid.dp))
        self.shipments["evaluation_logprobs", step, chunk] = self._with_logprobs(held_out)

    def _with_logprobs(self, samples: Shipment) -> Shipment:
        logprobs, ids, of_ids = self.model.log_probs(
            samples.experience,
            count=self.job.architectures[self.name].vocab_size if self.config.loss.kl.estimator == "full" else 0,
            max_tokens=self.config.reference.micro_batch_limit,
            temperature=self.temperature,
        )
        return samples.with_fields(reference_logprobs=logprobs, reference_top_ids=ids, reference_top_logprobs=of_ids)
