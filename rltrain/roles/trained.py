"""What the roles that learn have in common: a model with its optimizer, and how both go into checkpoints of the run."""

from collections.abc import Mapping

from torch import Tensor

from rltrain.checkpoint.run.files import Contents
from rltrain.config import schema
from rltrain.roles.models import load_model
from rltrain.roles.role import Job, Role
from rltrain.training.megatron.memory import training_parts
from rltrain.training.megatron.model import local_parameters
from rltrain.training.megatron.objective import POLICY, Objective
from rltrain.training.megatron.state import load_state, save_state
from rltrain.training.megatron.trainable import TrainableModel


class TrainedRole(Role):
    """`model` starts from the role's checkpoint, or in a run that goes on from the training state that was saved."""

    def __init__(
        self, job: Job, settings: schema.Trained, *, total_updates: int, objective: Objective = POLICY
    ) -> None:
        """Collective over: the role's ranks."""
        super().__init__(job)
        self.layout = job.megatron_layout(self.name)
        model = load_model(job, self.name, with_weights=job.resumed is None)
        self.parameters = local_parameters(model)
        self.model = TrainableModel(model, settings, total_updates=total_updates, objective=objective)
        self.parts = training_parts(self.model)
        self._copies: dict[str, Tensor] = {}
        if job.resumed:
            load_state(self.model, self.layout, job.world.rank, job.resumed.files(self.name))

    def save_state(self) -> Mapping[str, Contents]:
        """This rank's share of weights and optimizer, in memory that is kept and written over by the next call."""
        rank = self.job.world.rank
        state = save_state(self.model, self.parts, self.layout, rank, self._copies)
        return {f"rank_{rank:05d}.safetensors": state}
