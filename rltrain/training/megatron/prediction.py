"""The multi-token prediction layer at the end of a model, and its loss.

It has the layers and names of Megatron's own block. Megatron's takes its groups from the global parallel state. Here
the following token of each row is found while all tokens of a micro-batch are known, so ranks need not exchange tokens.
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
from rltrain.training.megatron.layers import word_embedding
from rltrain.training.megatron.norms import RMSNorm, parameter_device
from rltrain.training.packing import MicroBatch, of_all_tokens, of_drawn_tokens
from rltrain.training.prefix_tree import following_tokens
from rltrain.training.vocabulary import LabelledRows, Logits, vocab_parallel_logprobs

LOSS = "mtp_loss"
"""Name of the metric of its loss."""
AHEAD = 2
"""The row of token i gets token i + 1 and predicts token i + 2."""


@dataclass
class Predicted:
    """The layer's input and output of a micro-batch. It travels with the packed sequences.

    `following` [rows + padding] is the token after each row's token, or 0 at a sample's end. The layer stores `states`
    [rows + padding, hidden], equal on all ranks of the tensor-parallel group.
    """

    following: Tensor
    states: Tensor | None = field(default=None, init=False)

    @property
    def made(self) -> Tensor:
        assert self.states is not None, "made by the model's last chunk"
        return self.states


def tell_following(sequences: PackedSeqParams, batch: MicroBatch) -> Predicted:
    """Attaches the following tokens to the packed sequences, for the layer."""
    # A sample's end gets a fixed token, since routers count these rows too.
    rows = batch.rows_of(following_tokens(batch.experience))
    padded = torch.nn.functional.pad(rows, (0, len(batch.padded_tokens) - len(rows)))
    told = Predicted(padded.to(batch.padded_tokens.device))
    vars(sequences)["predicted"] = told
    return told


def told_following(sequences: PackedSeqParams) -> Predicted | None:
    """Returns the attachment of `tell_following`, or None."""
    return cast(Predicted | None, vars(sequences).get("predicted"))


class PredictionLayer(torch.nn.Module):
    """The multi-token prediction layer.

    Every tensor-parallel rank has the whole projection matrix. With a split one, its outputs would have to be gathered.
    """

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
        """Takes `number`, the layer's number from 1, after the others of its chunk."""
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
        # With sequence parallelism each rank has its own tokens, and Megatron sums their gradients.
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.transformer_layer = build_module(
            decoder_layer, config=config, layer_number=number, pg_collection=collection, vp_stage=vp_stage
        )

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """The decoder layer under the name expected by Megatron's CUDA graphs since 0.19."""
        return cast(torch.nn.Module, self.transformer_layer)

    def forward(self, hidden: Tensor, embedded: Tensor, **settings: Any) -> Tensor:
        """Returns the states for the head, [tokens, hidden], for all tokens of the tensor-parallel group.

        `hidden` are the model's states of every token, `embedded` the embeddings of the following tokens, [tokens (of
        this rank), 1, hidden] each. `settings` are arguments of decoder layers. Collective over: the tensor-parallel
        group, and in backward.
        """
        parts = self.hnorm(hidden), self.enorm(embedded)
        joined = self.eh_proj(torch.cat(parts if self.hidden_first else parts[::-1], dim=-1))
        states, _ = self.transformer_layer(hidden_states=joined, **settings)
        normed = self.final_layernorm(states)
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(normed, group=self.tp_group)[:, 0]
        return copy_to_tensor_model_parallel_region(normed, group=self.tp_group)[:, 0]


class PredictionLayers(torch.nn.Module):
    """A container of the single layer, under the name of Megatron's block of several layers."""

    def __init__(self, layer: PredictionLayer) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])

    @property
    def only(self) -> PredictionLayer:
        return cast(PredictionLayer, self.layers[0])


def copy_of_embedding(
    config: TransformerConfig, vocab_size: int, max_positions: int, collection: ProcessGroupCollection
) -> LanguageModelEmbedding:
    """Returns a copy of the embedding for the last pipeline stage. The first stage has the embedding too.

    Both get the sum of both gradients, so the copies stay equal. They count once in the gradient norm.
    """
    embedding = word_embedding(config, vocab_size, max_positions, collection)
    embedding.word_embeddings.weight.shared = True
    mark_shared(embedding)
    return embedding


def mark_shared(embedding: LanguageModelEmbedding) -> None:
    """Marks the embedding as shared, so data parallelism splits its gradient in the same way on both stages."""
    embedding.word_embeddings.weight.shared_embedding = True


def weights_of_rows(batch: MicroBatch, shares: Tensor) -> Tensor:
    """Returns each row's weight in the loss, [tokens], on the micro-batch's device.

    A row counts only if its predicted token is in the sample's response. The weights of a sample sum to its share.
    """
    experience = batch.experience
    counted = experience.response_mask.float()
    offsets = experience.offsets().to(counted.device)
    numbers = torch.repeat_interleave(
        torch.arange(experience.num_samples, device=counted.device), experience.lengths.to(counted.device)
    )
    # No row of a sample predicts its first tokens.
    place = torch.arange(len(counted), device=counted.device) - offsets[numbers]
    counted = counted * (place >= AHEAD)
    counts = torch.zeros(experience.num_samples, device=counted.device).index_add(0, numbers, counted)
    weights = counted * (shares.to(counted.device) / counts.clamp(min=1))[numbers]
    return weights.roll(-AHEAD)


def prediction_loss(batch: MicroBatch, made_of: Logits, shares: Tensor, groups: Any, vocab_size: int) -> Tensor:
    """Returns the cross-entropy of the token after next, a scalar.

    Each sample's mean over its response tokens has its weight in `shares` [samples]. `made_of` has the layer's states
    and the head's weights. Collective over: the tensor- and context-parallel groups.
    """
    logits, tokens = replace(made_of, states=made_of.states[: batch.num_rows]), batch.experience.tokens
    settings: dict[str, Any] = {"vocab_size": vocab_size, "temperature": 1.0, "group": groups.tp}
    if batch.slices is None or batch.tree is None:
        logprobs, _ = vocab_parallel_logprobs(logits, batch.rows_of(tokens.roll(-AHEAD)), **settings)
        of_tokens = of_all_tokens(batch, logprobs, groups.cp)
    else:
        drawn = batch.slices.drawn[AHEAD - 1]
        labelled = LabelledRows(drawn.rows, drawn.starts)
        logprobs, _ = vocab_parallel_logprobs(logits, tokens[drawn.tokens], labelled=labelled, **settings)
        of_tokens = of_drawn_tokens(batch, drawn, logprobs, groups.cp).roll(-AHEAD)
    return -(of_tokens * weights_of_rows(batch, shares)).sum()


def with_loss(output: LossOutput, loss: Tensor) -> LossOutput:
    """Returns the kept output of a micro-batch with the loss of the prediction layer."""
    sums = {**output.sums, LOSS: loss.detach().clone()}
    return LossOutput(output.loss, output.divisor, sums, output.token_sums, output.maxima)
