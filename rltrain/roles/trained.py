"""What the roles that learn have in common: a model with its optimizer, and how both go into checkpoints of the run."""

import logging
from collections.abc import Mapping, Sequence

from rltrain.checkpoint.run_files import Contents
from rltrain.config import schema
from rltrain.roles.replica_check import ReplicaCheck
from rltrain.roles.role import Job, Role
from rltrain.training.backend import LOSS_SCALE, OVERFLOWED, SKIPPED
from rltrain.training.build import training_backend

logger = logging.getLogger(__name__)


class TrainedRole(Role):
    """`model` starts from the role's checkpoint, or in a run that goes on from the training state that was saved."""

    def __init__(self, job: Job, settings: schema.Trained, *, total_updates: int) -> None:
        """Collective over: the role's ranks."""
        super().__init__(job)
        state = job.resumed.files(self.name) if job.resumed else None
        self.model = training_backend(job.config, self.name).trained_model(
            job.model_site(self.name), settings, total_updates=total_updates, state=state
        )
        self.parts = self.model.parts
        group = job.groups.cpu[self.grid.ranks]
        self.replicas = ReplicaCheck(job.config.checks.replicas, self.name, job.world.rank, group)

    def warn_of_skipped(self, step: int, updates: Sequence[Mapping[str, float]]) -> None:
        """On the role's leader, where optimizer steps have changed nothing."""
        if self.job.world.rank != self.leader:
            return
        overflowed = sum(bool(update.get(OVERFLOWED)) for update in updates)
        if overflowed:
            logger.warning(
                "step %d: gradients of %d of the %s's %d optimizer steps overflowed in float16; they changed nothing "
                "but the loss scale, which is %g now (%s.optimizer.loss_scale)",
                step,
                overflowed,
                self.name,
                len(updates),
                updates[-1][LOSS_SCALE],
                self.name,
            )
        skipped = sum(bool(update[SKIPPED]) for update in updates) - overflowed
        if skipped:
            logger.warning(
                "step %d: %d of the %s's %d optimizer steps had a loss or a gradient norm that was not finite, and "
                "changed nothing (on_divergence.max_skipped %d)",
                step,
                skipped,
                self.name,
                len(updates),
                self.config.on_divergence.max_skipped,
            )

    def save_state(self) -> Mapping[str, Contents]:
        """This rank's share of weights and optimizer, in memory that is kept and written over by the next call."""
        return {f"rank_{self.job.world.rank:05d}.safetensors": self.model.save_state()}

    def take_copying_s(self) -> float:
        return self.model.take_copying_s()
