"""A model that says of every token its log-prob, or the score of its sample up to there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rltrain.data.experience import Experience
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard.layout import Layout
from rltrain.training.objective import OBJECTIVES, PackedModel, likeliest_tokens, squared_probabilities
from rltrain.training.packing import MicroBatch

Outputs = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""(micro-batch, what a model makes of its rows on this rank [rows, ...]) -> (loss scalar, anything to keep)."""
Forward = Callable[[Sequence[MicroBatch], Outputs], list[Any]]
"""As Evaluable.forward."""


class Evaluable(ABC):
    """As training.backend.Model describes it, of what a backend says of its model."""

    def __init__(
        self, model: PackedModel, layout: Layout, parameters: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.model, self.device = model, device
        self.objective = OBJECTIVES[model.architecture.head]
        self.layout = layout
        self.parameters = parameters
        self.parts: Mapping[str, MemoryPart] = {"weights": MemoryPart(parameters.values)}

    @abstractmethod
    def micro_batches(self, experience: Experience, max_tokens: int) -> list[MicroBatch]:
        """`experience` in micro-batches that the model can take."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> list[Any]:
        """What `outputs` keeps of each micro-batch with samples, on ranks where the model ends; without gradients."""

    @abstractmethod
    def share_results(self, results: Sequence[Tensor]) -> None:
        """Give those of ranks where the model ends to the others of the replica."""

    def evaluate(self, experience: Experience, *, max_tokens: int, temperature: float = 1.0) -> Tensor:
        """Collective over: this replica."""
        return self._evaluate_tokens(experience, max_tokens, temperature, self.forward)

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
        logprobs, top_ids, top_logprobs = self._evaluate(experience, max_tokens, outputs, empty, self.forward)
        return logprobs, top_ids, top_logprobs

    def evaluate_squares(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Collective over: this replica."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, ...]:
            logprobs = self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0]
            return logprobs, squared_probabilities(self.model, batch, of_tokens, temperature)

        empty = [torch.zeros(experience.num_tokens), torch.zeros(experience.num_tokens)]
        logprobs, squares = self._evaluate(experience, max_tokens, outputs, empty, self.forward)
        return logprobs, squares

    def evaluate_routing(
        self, experience: Experience, *, max_tokens: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Of a backend whose routers tell what they choose; others are refused with it."""
        raise NotImplementedError(f"{type(self).__name__} does not tell which experts its routers choose")

    def _evaluate_tokens(self, experience: Experience, max_tokens: int, temperature: float, forward: Forward) -> Tensor:
        """[tokens] on the host, the objective's first output."""

        def outputs(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor]:
            return (self.objective.token_outputs(self.model, batch, of_tokens, temperature)[0],)

        return self._evaluate(experience, max_tokens, outputs, [torch.zeros(experience.num_tokens)], forward)[0]

    @torch.no_grad()
    def _evaluate(
        self,
        experience: Experience,
        max_tokens: int,
        outputs: Callable[[MicroBatch, Tensor], Sequence[Tensor]],
        empty: Sequence[Tensor],
        forward: Forward,
    ) -> list[Tensor]:
        """`empty`, filled with what `outputs` gives of each micro-batch, on every rank of the replica, on the host."""
        results = [tensor.to(self.device) for tensor in empty]

        def without_loss(batch: MicroBatch, of_tokens: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            return torch.zeros((), device=self.device), outputs(batch, of_tokens)

        micro_batches = self.micro_batches(experience, max_tokens)
        if not micro_batches:
            return [*empty]
        kept = forward(micro_batches, without_loss)
        for batch, values in zip(micro_batches, kept, strict=False):
            for result, value in zip(results, values, strict=True):
                result[batch.token_index.to(result.device)] = value
        self.share_results(results)
        return [result.cpu() for result in results]
