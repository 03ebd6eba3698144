"""What the roles that learn have in common: a model with its optimizer, and how both go into checkpoints of the run."""

from collections.abc import Mapping

from rltrain.checkpoint.run.files import Contents
from rltrain.config import schema
from rltrain.roles.role import Job, Role
from rltrain.training.build import training_backend


class TrainedRole(Role):
    """`model` starts from the role's checkpoint, or in a run that goes on from the training state that was saved."""

    def __init__(self, job: Job, settings: schema.Trained, *, total_updates: int) -> None:
        """Collective over: the role's ranks."""
        super().__init__(job)
        state = job.resumed.files(self.name) if job.resumed else None
        self.model = training_backend().trained_model(
            job.model_site(self.name), settings, total_updates=total_updates, state=state
        )
        self.parts = self.model.parts

    def save_state(self) -> Mapping[str, Contents]:
        """This rank's share of weights and optimizer, in memory that is kept and written over by the next call."""
        return {f"rank_{self.job.world.rank:05d}.safetensors": self.model.save_state()}
