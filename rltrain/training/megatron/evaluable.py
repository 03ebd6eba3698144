"""A model that says of every token its log-prob, or the score of its sample up to there."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.models.routing_shape import RoutingShape
from rltrain.residency.memory_parts import MemoryPart
from rltrain.training.megatron.forward import likeliest_tokens, make_micro_batches, run_schedule
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.megatron.objective import OBJECTIVES
from rltrain.training.megatron.replayed_batch import found_choices
from rltrain.training.packing import MicroBatch


class EvaluableModel:
    """As training.backend.Model describes it."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = model.layout
        self.parameters: Mapping[str, Tensor] = local_parameters(model)
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(self.parameters.values)}

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor]:
            return (self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0],)

        return self._evaluate(experience, max_tokens, outputs, [torch.zeros(experience.num_tokens)])[0]

    def distributions(
        self, experience: Experience, *, count: int, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, ...]:
            logprobs = self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0]
            return logprobs, *likeliest_tokens(self.model, batch, of_tokens, temperature, count)

        num_tokens = experience.num_tokens
        ids = torch.zeros(num_tokens, count, dtype=torch.int64)
        empty = [torch.zeros(num_tokens), ids, torch.zeros(num_tokens, count)]
        logprobs, top_ids, top_logprobs = self._evaluate(experience, max_tokens, outputs, empty)
        return logprobs, top_ids, top_logprobs

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor]:
            return (self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0],)

        shape = RoutingShape.of(self.model.architecture)
        routed = shape.packed(shape.unknown(experience.num_tokens))
        (values,) = self._evaluate(experience, max_tokens, outputs, [torch.zeros(experience.num_tokens)], routed)
        return values, routed

    @torch.no_grad()
    def _evaluate(
        self,
        experience: Experience,
        max_tokens: int,
        outputs: Callable[[MicroBatch, Tensor], Sequence[Tensor]],
        empty: Sequence[Tensor],
        routed: Tensor | None = None,
    ) -> list[Tensor]:
        """`empty`, filled with what `outputs` gives of each micro-batch, on every rank of the replica, on the host.
        `routed` is filled in place with what this rank's routers choose."""
        model = self.model
        results = [tensor.to(model.device) for tensor in empty]

        def without_loss(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            return torch.zeros((), device=model.device), outputs(batch, of_tokens)

        micro_batches = make_micro_batches(model, experience, max_tokens)
        if not micro_batches:
            return [*empty]
        was_training = model.training
        model.eval()
        found: list[dict[int, Tensor]] | None = None if routed is None else [{} for _ in micro_batches]
        kept = run_schedule(model, micro_batches, without_loss, backward=False, found=found)
        model.train(was_training)
        if routed is not None and found is not None:
            for batch, of_layers in zip(micro_batches, found, strict=True):
                routed[batch.token_index] = found_choices(model, batch, of_layers).cpu()

        for batch, values in zip(micro_batches, kept, strict=False):
            for result, value in zip(results, values, strict=True):
                result[batch.token_index.to(result.device)] = value
        pipeline = model.pg_collection.pp
        for result in results if pipeline.size() > 1 else ():
            dist.broadcast(result, group=pipeline, group_src=pipeline.size() - 1)
        return [result.cpu() for result in results]
