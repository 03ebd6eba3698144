"""What models that are trained have in common on every backend."""

from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from rltrain.algorithms.losses import LossFunction, LossOutput
from rltrain.data.experience import Experience
from rltrain.training.evaluable import Evaluable, Outputs
from rltrain.training.late_copies import LateCopies
from rltrain.training.packing import MicroBatch


class Trainable(Evaluable):
    """As training.backend.TrainedModel describes it, of what a backend says of its model."""

    late: LateCopies
    """Of the state that was saved last."""

    def take_copying_s(self) -> float:
        """As training.backend.TrainedModel has it."""
        return self.late.take_waited_s()

    def copy_late(self) -> None:
        """Once `parts` are known: `late` has made its copies before one of them moves."""
        self.late = LateCopies(self.device)
        for part in self.parts.values():
            part.settle = self.late.settle

    @abstractmethod
    def train_batches(
        self, mini_batches: Iterable[Experience], loss_function: LossFunction, *, temperature: float = 1.0
    ) -> list[dict[str, float]]:
        """As training.backend.TrainedModel has it."""

    def train_batch(
        self, experience: Experience, loss_function: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """That of one mini-batch. Collective over: the role's ranks."""
        (metrics,) = self.train_batches([experience], loss_function, temperature=temperature)
        return metrics

    def loss_of(self, loss_function: LossFunction, temperature: float) -> Outputs:
        """What a pass makes of a micro-batch: its loss, and that with its sums to keep."""

        def loss(batch: MicroBatch, outputs: Tensor) -> tuple[Tensor, LossOutput]:
            token_outputs = self.objective.token_outputs(self.model, batch, outputs, temperature)
            output = loss_function(batch.experience, *token_outputs)
            # A copy: pipeline schedules free the storage of what a stage returns.
            kept = LossOutput(
                output.loss.detach().clone(), output.divisor, output.sums, output.token_sums, output.maxima
            )
            return output.loss, kept

        return loss
