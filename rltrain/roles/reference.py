"""The reference: the frozen policy that a KL penalty or metric compares the actor with."""

from pathlib import Path

from rltrain.checkpoint.hf import load_parameters
from rltrain.cluster.exchange import Shipment
from rltrain.data.experience import Experience
from rltrain.roles.role import Job, Role
from rltrain.training.forward import compute_logprobs
from rltrain.training.model import build_model, local_parameters


class Reference(Role):
    name = "reference"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        config, world = self.config, job.world
        self.model = build_model(
            job.architecture,
            self.grid,
            job.groups,
            model=config.model,
            parallel=config.reference.parallel or config.actor.parallel,
            device=world.device,
        ).eval()
        layout = job.megatron_layout(self.name)
        path = Path(config.reference.path or config.model.path)
        load_parameters(path, layout, world.rank, local_parameters(self.model))

    def reference_logprobs(self, step: int) -> None:
        """Log-probs of the drawn tokens under the reference. Collective over: this replica."""
        scored = self.shipments.pop("scored")
        columns = {name: scored.columns[name] for name in ("group_ids", "lengths")}
        columns["reference_logprobs"] = compute_logprobs(
            self.model,
            Experience(**scored.columns),
            temperature=self.config.rollout.sampling.temperature,
            max_tokens=self.config.reference.micro_batch_tokens,
        )
        self.shipments["reference_logprobs"] = Shipment(columns, scored.group_tokens)
