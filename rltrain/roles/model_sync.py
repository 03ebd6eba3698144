"""The actor's weights for another role whose model is the training backend's. A task that both roles' ranks join."""

from rltrain.roles.actor import Actor
from rltrain.roles.inference import Inference
from rltrain.roles.merged_resharding import MergedResharding, merged_into_model
from rltrain.roles.reference import Reference, uses_actor_modules
from rltrain.roles.role import Job, Role
from rltrain.roles.role_resharding import RoleResharding
from rltrain.training.backend import published_weights


class ModelSync:
    """Built on every rank that hosts the actor or `follower`'s role; None where this rank has it not.

    Building and calling it are collective over: the union of both roles' ranks.
    """

    def __init__(self, job: Job, role: str, actor: Role | None, follower: Role | None) -> None:
        self.actor = actor if isinstance(actor, Actor) else None
        self.follower = follower if isinstance(follower, Inference | Reference) else None
        self.resharding: RoleResharding | MergedResharding | None = None
        if job.config.makes_actor_weights:
            self.resharding = merged_into_model(job, role)
        elif not (role == Reference.name and uses_actor_modules(job)):
            self.resharding = RoleResharding(job, role, job.training_layout("actor"), job.training_layout(role))

    def __call__(self, step: int, chunk: int) -> None:
        """The follower has the actor's weights afterwards."""
        if self.resharding is None:
            assert isinstance(self.follower, Reference), "it has the actor's ranks"
            self.follower.keep_actor_weights()
            return
        source = published_weights(self.actor.model) if self.actor else None
        self.resharding.run(source, self.follower.model.parameters if self.follower else None)
