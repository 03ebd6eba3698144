"""A model that says of every token its log-prob, or the score of its sample up to there."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.residency.memory_parts import MemoryPart
from rltrain.training.megatron.forward import make_micro_batches, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.megatron.objective import OBJECTIVES
from rltrain.training.packing import MicroBatch


class EvaluableModel:
    """As training.backend.Model describes it."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = model.layout
        self.parameters: Mapping[str, Tensor] = local_parameters(model)
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(model.parameters)}

    @torch.no_grad()
    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """Collective over: the replica's tensor- and pipeline-parallel groups."""
        model = self.model
        result = torch.zeros(experience.num_tokens, device=model.device)
        if experience.num_samples == 0:
            return result.cpu()

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Tensor]:
            values = self.objective.token_outputs(model, batch, of_tokens, temperature)[0]
            return values.new_zeros(()), values

        was_training = model.training
        model.eval()
        micro_batches = make_micro_batches(model, experience, max_tokens)
        kept = run_schedule(model, micro_batches, outputs, backward=False)
        model.train(was_training)

        for batch, values in zip(micro_batches, kept, strict=False):
            result[batch.token_index.to(result.device)] = values
        pipeline = model.pg_collection.pp
        if pipeline.size() > 1:
            dist.broadcast(result, group=pipeline, group_src=pipeline.size() - 1)
        return result.cpu()
