"""The layer that predicts a further token, beside the end of a model, and its loss.

Megatron's own block for that takes its groups from the global parallel state; this is the same layer, with the same
names. What belongs to a row is decided where all tokens of a micro-batch are known, so no rank asks another for the
token that follows its last one.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.algorithms.losses import LossOutput
from rltrain.models.prediction import PredictionNames
from rltrain.training.logprobs import Logits, vocab_parallel_logprobs
from rltrain.training.megatron.layers import word_embedding
from rltrain.training.megatron.norms import RMSNorm, parameter_device
from rltrain.training.packing import MicroBatch, of_all_tokens

LOSS = "mtp_loss"
"""The metric of its loss."""
AHEAD = 2
"""The row of token i is given token i + 1, and predicts token i + 2."""


@dataclass
class Predicted:
    """With the packed sequences of a micro-batch: `following` [rows + padding] the token behind that of each row, 0
    at a sample's end. The layer leaves `states` [rows + padding, hidden] there, equal on all ranks of the
    tensor-parallel group."""

    following: Tensor
    states: Tensor | None = field(default=None, init=False)

    @property
    def made(self) -> Tensor:
        assert self.states is not None, "the model's last chunk has made them"
        return self.states


def tell_following(sequences: PackedSeqParams, batch: MicroBatch) -> Predicted:
    """Have the tokens that follow reach the layer with the packed sequences."""
    following = batch.experience.tokens.roll(-1)
    following[batch.experience.offsets()[1:] - 1] = 0  # whoever packed which samples: routers count those rows too
    rows = batch.rows_of(following)
    padded = torch.nn.functional.pad(rows, (0, len(batch.padded_tokens) - len(rows)))
    told = Predicted(padded.to(batch.padded_tokens.device))
    vars(sequences)["predicted"] = told
    return told


def told_following(sequences: PackedSeqParams) -> Predicted | None:
    """What `tell_following` told, if it did."""
    return cast(Predicted | None, vars(sequences).get("predicted"))


class PredictionLayer(torch.nn.Module):
    """Every tensor-parallel rank has the matrix of the projection whole: cut, its outputs would have to be gathered."""

    def __init__(
        self,
        shape: PredictionNames,
        config: TransformerConfig,
        decoder_layer: ModuleSpec,
        number: int,
        collection: ProcessGroupCollection,
        *,
        vp_stage: int | None,
    ) -> None:
        """`number` of the layer, from 1, behind the others of its chunk."""
        super().__init__()
        self.hidden_first, self.config, self.tp_group = shape.hidden_first, config, collection.tp
        norm = (config, config.hidden_size, config.layernorm_epsilon)
        self.enorm, self.hnorm, self.final_layernorm = RMSNorm(*norm), RMSNorm(*norm), RMSNorm(*norm)
        self.eh_proj = torch.nn.Linear(
            2 * config.hidden_size,
            config.hidden_size,
            bias=False,
            device=parameter_device(config),
            dtype=config.params_dtype,
        )
        # Each rank has tokens of its own there, whose gradients Megatron then sums.
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.transformer_layer = build_module(
            decoder_layer, config=config, layer_number=number, pg_collection=collection, vp_stage=vp_stage
        )

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """Returns the decoder layer by the name that Megatron's CUDA graphs have for it since 0.19."""
        return cast(torch.nn.Module, self.transformer_layer)

    def forward(self, hidden: Tensor, embedded: Tensor, **settings: Any) -> Tensor:
        """[tokens (of this rank), 1, hidden] each, what the model makes of every token and the embedding of the one
        that follows -> [tokens, hidden], of all of the tensor-parallel group, as the head takes it. `settings` are what
        decoder layers are told. Collective over: the tensor-parallel group, and in backward."""
        parts = self.hnorm(hidden), self.enorm(embedded)
        joined = self.eh_proj(torch.cat(parts if self.hidden_first else parts[::-1], dim=-1))
        states, _ = self.transformer_layer(hidden_states=joined, **settings)
        normed = self.final_layernorm(states)
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(normed, group=self.tp_group)[:, 0]
        return copy_to_tensor_model_parallel_region(normed, group=self.tp_group)[:, 0]


class PredictionLayers(torch.nn.Module):
    """One, under the name that Megatron's block of several has for it."""

    def __init__(self, layer: PredictionLayer) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])

    @property
    def only(self) -> PredictionLayer:
        return cast(PredictionLayer, self.layers[0])


def copy_of_embedding(
    config: TransformerConfig, vocab_size: int, max_positions: int, collection: ProcessGroupCollection
) -> LanguageModelEmbedding:
    """On the last stage of a pipeline, whose first one has the embedding too: both get the sum of both's gradients, so
    that the copies stay equal, and count once in their norm."""
    embedding = word_embedding(config, vocab_size, max_positions, collection)
    embedding.word_embeddings.weight.shared = True
    mark_shared(embedding)
    return embedding


def mark_shared(embedding: LanguageModelEmbedding) -> None:
    """Have data parallelism cut its gradient where it cuts that of the other stage."""
    embedding.word_embeddings.weight.shared_embedding = True


def weights_of_rows(batch: MicroBatch, shares: Tensor) -> Tensor:
    """[tokens] what the loss counts for in the row of every token: only where the token that is predicted is one of the
    sample's response. Those of a sample come to its share together. On the micro-batch's device."""
    experience = batch.experience
    counted = experience.response_mask.float()
    offsets = experience.offsets().to(counted.device)
    numbers = torch.repeat_interleave(
        torch.arange(experience.num_samples, device=counted.device), experience.lengths.to(counted.device)
    )
    # The first tokens of a sample are predicted by no row of it.
    place = torch.arange(len(counted), device=counted.device) - offsets[numbers]
    counted = counted * (place >= AHEAD)
    counts = torch.zeros(experience.num_samples, device=counted.device).index_add(0, numbers, counted)
    weights = counted * (shares.to(counted.device) / counts.clamp(min=1))[numbers]
    return weights.roll(-AHEAD)


def prediction_loss(batch: MicroBatch, made_of: Logits, shares: Tensor, groups: Any, vocab_size: int) -> Tensor:
    """The cross-entropy of the token after next, each sample's mean over those of its response, which counts for its
    part of `shares` [samples]: a scalar. `made_of` has the layer's states and the head's weights.

    Collective over: the tensor- and context-parallel groups.
    """
    logits = replace(made_of, states=made_of.states[: batch.num_rows])
    labels = batch.rows_of(batch.experience.tokens.roll(-AHEAD))
    logprobs, _ = vocab_parallel_logprobs(logits, labels, vocab_size=vocab_size, temperature=1.0, group=groups.tp)
    of_tokens = of_all_tokens(batch, logprobs, groups.cp)
    return -(of_tokens * weights_of_rows(batch, shares)).sum()


def with_loss(output: LossOutput, loss: Tensor) -> LossOutput:
    """What is kept of a micro-batch, with that of the further token."""
    sums = {**output.sums, LOSS: loss.detach().clone()}
    return LossOutput(output.loss, output.divisor, sums, output.token_sums, output.maxima)
