"""A sharded model, evaluated."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart
from rltrain.training.evaluable import Evaluable, Outputs
from rltrain.training.fsdp.model import ShardedModel
from rltrain.training.fsdp.passes import make_micro_batches, run
from rltrain.training.packing import MicroBatch


class EvaluableModel(Evaluable):
    """As training.backend.Model describes it. Where that is collective over a replica it is over the role's ranks."""

    model: ShardedModel

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model, model.layout, model.parameters, model.device)
        self.parts = {"weights": MemoryPart(self._weights)}

    def _weights(self) -> list[Tensor]:
        held, adapters = [*self.parameters.values()], self.model.adapters
        return [*held, *self.model.learned.values(), *adapters.whole_a.values()] if adapters else held

    def micro_batches(self, experience: Experience, max_tokens: int) -> list[MicroBatch]:
        return make_micro_batches(self.model, experience, max_tokens)

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        kept = run(self.model, micro_batches, outputs, backward=False)
        self.model.give_up_gathered()
        return kept

    def share_results(self, results: Sequence[Tensor]) -> None:
        """Every rank of a replica has them."""


class BaseModel(EvaluableModel):
    """A model whose adapters are off while it is evaluated: in the same memory, what it was before they learned."""

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        adapters = self.model.adapters
        assert adapters is not None, "a model without adapters is its own base"
        with adapters.off():
            return super().forward(micro_batches, outputs)
