"""Megatron's model evaluated by its schedules."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.models.routing_shape import RoutingShape
from rltrain.offload.memory_parts import MemoryPart
from rltrain.training.megatron.forward import make_micro_batches, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.megatron.replayed_batch import found_choices
from rltrain.training.packing import MicroBatch
from rltrain.training.trainable import Evaluable, Outputs


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

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Collective over: this replica."""
        shape = RoutingShape.of(self.model.architecture)
        routed = shape.packed(shape.unknown(experience.num_tokens))

        def forward(micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
            found: list[dict[int, Tensor]] = [{} for _ in micro_batches]
            kept = self._forward(micro_batches, outputs, found)
            for batch, of_layers in zip(micro_batches, found, strict=True):
                routed[batch.token_index] = found_choices(self.model, batch, of_layers).cpu()
            return kept

        return self._evaluate_tokens(experience, max_tokens, temperature, forward), routed

    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        return self._forward(micro_batches, outputs, None)

    def _forward(
        self, micro_batches: Sequence[MicroBatch], outputs: Outputs, found: Sequence[dict[int, Tensor]] | None
    ) -> list[Any]:
        was_training = self.model.training
        self.model.eval()
        kept = run_schedule(self.model, micro_batches, outputs, backward=False, found=found)
        self.model.train(was_training)
        return kept

    def share_results(self, results: Sequence[Tensor]) -> None:
        pipeline = self.model.pg_collection.pp
        for result in results if pipeline.size() > 1 else ():
            dist.broadcast(result, group=pipeline, group_src=pipeline.size() - 1)


class BaseModel(EvaluableModel):
    """A model whose adapters are off while it is evaluated: in the same memory, what it was before they learned."""

    def _forward(
        self, micro_batches: Sequence[MicroBatch], outputs: Outputs, found: Sequence[dict[int, Tensor]] | None
    ) -> list[Any]:
        adapters = self.model.adapters
        assert adapters is not None, "a model without adapters is its own base"
        with adapters.off():
            return super()._forward(micro_batches, outputs, found)
