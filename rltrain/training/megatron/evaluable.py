"""Megatron's model evaluated by its schedules."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.residency.memory_parts import MemoryPart
from rltrain.training.evaluable import Evaluable, Outputs
from rltrain.training.megatron.forward import make_micro_batches, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.packing import MicroBatch


class EvaluableModel(Evaluable):
    """As training.backend.Model describes it."""

    model: LanguageModel

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model, model.layout, local_parameters(model), model.device)
        self.parts = {"weights": MemoryPart(self._weights)}

    def _weights(self) -> list[Tensor]:
        adapters = self.model.adapters
        return [*self.parameters.values(), *(adapters.parameters.values() if adapters else ())]

    def micro_batches(self, experience: Experience, max_tokens: int) -> list[MicroBatch]:
        return make_micro_batches(self.model, experience, max_tokens)

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        was_training = self.model.training
        self.model.eval()
        kept = run_schedule(self.model, micro_batches, outputs, backward=False)
        self.model.train(was_training)
        return kept

    def share_results(self, results: Sequence[Tensor]) -> None:
        pipeline = self.model.pg_collection.pp
        for result in results if pipeline.size() > 1 else ():
            dist.broadcast(result, group=pipeline, group_src=pipeline.size() - 1)


class BaseModel(EvaluableModel):
    """A model whose adapters are off while it is evaluated: in the same memory, what it was before they learned."""

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        adapters = self.model.adapters
        assert adapters is not None, "a model without adapters is its own base"
        with adapters.off():
            return super().forward(micro_batches, outputs)
