"""The actor's weights for an evaluation by engines of its own. A task that both roles' ranks join."""

from torch import Tensor

from rltrain.roles.actor import Actor
from rltrain.roles.evaluation import Evaluation
from rltrain.roles.role import Job, Role
from rltrain.roles.weight_sync import resharding_into
from rltrain.rollout.embedded.parameters import allocate_parameters
from rltrain.rollout.layout import ARRIVING_BYTES, in_parts, whole_engine
from rltrain.training.backend import served_weights


class EvaluationSync:
    """Built on every rank that hosts either role; None where this rank has it not.

    Engines keep the weights on the host until their turn, so they join while they draw an evaluation before this one.
    Building and calling it are collective over: the union of both roles' ranks.
    """

    def __init__(self, job: Job, actor: Role | None, evaluation: Role | None) -> None:
        self.job = job
        self.actor = actor if isinstance(actor, Actor) else None
        self.evaluation = evaluation if isinstance(evaluation, Evaluation) else None
        whole = whole_engine(job.config, job.architecture, job.grids["evaluation"], "evaluation")
        self.parts = [resharding_into(job, "evaluation", part) for part in in_parts(whole, ARRIVING_BYTES)]

    def __call__(self, step: int, chunk: int) -> None:
        """The evaluation of the step has its weights afterwards."""
        source = served_weights(self.actor.model) if self.actor else None
        received: dict[str, Tensor] = {}
        for part in self.parts:
            incoming = None
            if self.evaluation:
                incoming = allocate_parameters(part.destination, self.job.world.rank, device=self.job.world.device)
            part.run(source, incoming)
            received |= {name: tensor.cpu() for name, tensor in (incoming or {}).items()}
        if self.evaluation:
            self.evaluation.weights[step] = received
