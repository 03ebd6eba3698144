"""The reference: the frozen policy that a KL penalty or metric compares the actor with."""

from collections.abc import Mapping

import torch

from rltrain.models.of_roles import reference_uses_actor_modules
from rltrain.residency.memory_parts import MemoryPart, Overlay
from rltrain.roles.actor import Actor
from rltrain.roles.role import Job, Role
from rltrain.training.backend import Model
from rltrain.training.build import training_backend


def uses_actor_modules(job: Job) -> bool:
    """Whether the reference needs no model of its own.

    Where the device is the host it has one unless reference.offload is true: the actor's weights that would make room
    for the reference's would take as much memory there as a second model.
    """
    has_device = job.world.device.type != "cpu"
    takes_turns = has_device or job.config.reference.offload is True
    return takes_turns and reference_uses_actor_modules(job.config, job.grids, job.architectures)


class Reference(Role):
    """With the actor's ranks and layout its weights lie on the host, and take the place of the actor's for its task.

    `actor` is this rank's, None where it has none.
    """

    name = "reference"

    @classmethod
    def beside(cls, job: Job, hosted: Mapping[str, Role]) -> "Reference":
        actor = hosted.get(Actor.name)
        return cls(job, actor if isinstance(actor, Actor) else None)

    def __init__(self, job: Job, actor: Actor | None) -> None:
        super().__init__(job)
        self.model: Model
        self.parts: Mapping[str, MemoryPart]
        if actor is not None and uses_actor_modules(job):
            self.model, self.parts = actor.model, {"weights": self._weights_over(actor.model)}
        else:
            self.model = training_backend().frozen_model(job.model_site(self.name))
            self.parts = self.model.parts

    def _weights_over(self, actor: Model) -> Overlay:
        pinned = self.job.world.device.type == "cuda"
        host = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=pinned)
            for name, parameter in actor.parameters.items()
        }
        self.job.model_site(self.name).load_weights(actor.layout, host)
        return Overlay(actor.parts["weights"], list(actor.parameters.values()), list(host.values()))

    def reference_logprobs(self, step: int, chunk: int) -> None:
        """Log-probs of the drawn tokens under the reference. Collective over: this replica."""
        scored = self.shipments.pop(("scored", step, chunk))
        logprobs = self.model.evaluate(
            scored.experience,
            max_tokens=self.config.reference.micro_batch_tokens,
            temperature=self.config.rollout.sampling.temperature,
        )
        self.shipments["reference_logprobs", step, chunk] = scored.with_fields(reference_logprobs=logprobs)
