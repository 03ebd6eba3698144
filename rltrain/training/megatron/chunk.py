"""Consecutive layers of a model, built of megatron-core's modules, and the multi-token prediction layer at its end.

The prediction layer has the layers and names of Megatron's own block. Megatron's takes its groups from the global
parallel state. Here the following token of each row is found while all tokens of a micro-batch are known, so ranks need
not exchange tokens.
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.algorithms.losses import LossOutput
from rltrain.config import schema
from rltrain.models import Architecture
from rltrain.models.attention import inverse_frequencies
from rltrain.models.prediction import PredictionNames
from rltrain.models.registry import PREDICTIONS
from rltrain.reshard.megatron_layout import Chunk, padded_vocab_size
from rltrain.training.logprobs import Logits, vocab_parallel_logprobs
from rltrain.training.megatron.attention import PositionRotaryEmbedding, rotate_by_position
from rltrain.training.megatron.experts import round_experts
from rltrain.training.megatron.layers import (
    DeferredHead,
    ValueHead,
    bend_logits,
    block_spec,
    mark_parallel_weights,
    predicting_layer_spec,
    scale_embedding,
    widen_projection,
    word_embedding,
)
from rltrain.training.megatron.norms import RMSNorm, parameter_device
from rltrain.training.packing import MicroBatch, of_all_tokens

# The multi-token prediction layer and its loss.

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
    following = batch.experience.tokens.roll(-1)
    following[batch.experience.offsets()[1:] - 1] = 0  # a fixed token, since routers count these rows too
    rows = batch.rows_of(following)
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
    logits = replace(made_of, states=made_of.states[: batch.num_rows])
    labels = batch.rows_of(batch.experience.tokens.roll(-AHEAD))
    logprobs, _ = vocab_parallel_logprobs(logits, labels, vocab_size=vocab_size, temperature=1.0, group=groups.tp)
    of_tokens = of_all_tokens(batch, logprobs, groups.cp)
    return -(of_tokens * weights_of_rows(batch, shares)).sum()


def with_loss(output: LossOutput, loss: Tensor) -> LossOutput:
    """Returns the kept output of a micro-batch with the loss of the prediction layer."""
    sums = {**output.sums, LOSS: loss.detach().clone()}
    return LossOutput(output.loss, output.divisor, sums, output.token_sums, output.maxima)


# Options of a model in addition to its architecture and grid.


@dataclass(frozen=True)
class ModelOptions:
    """Settings of a model and its role's parallel sizes, on `device`.

    `transformer_engine` selects Transformer Engine's modules instead of Megatron's own.
    """

    model: schema.Model
    parallel: schema.Parallel
    device: torch.device
    transformer_engine: bool

    @property
    def has_wide_head(self) -> bool:
        """Whether logits have another type than weights."""
        return self.model.head != self.model.dtype


# Consecutive layers of a model with optional embedding and head, built of megatron-core's modules.

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelChunk(LanguageModule):
    """Consecutive layers of a model, sharded over tensor parallelism, with the embedding and head of `chunk`.

    It takes packed micro-batches: input_ids [1, tokens] and packed_seq_params=LanguageModel.sequences(lengths). With
    context parallelism the ids are those of `LanguageModel.share` alone.

    It returns hidden states on chunks without the head. With a vocabulary head it returns logits [1, tokens, padded
    vocabulary / tp], or with `model.logits_chunk_tokens` the logits' inputs [1, tokens, hidden]. With a value head it
    returns values [1, tokens], fp32 and whole on every tensor-parallel rank.

    It is based on LanguageModule and TransformerBlock because Megatron deprecates GPTModel since release 0.19.
    Parameters have the names of GPTModel.
    """

    rotary_pos_emb: torch.nn.Module
    output_layer: torch.nn.Module
    embedding: LanguageModelEmbedding

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        chunk: Chunk,
        collection: ProcessGroupCollection,
        options: ModelOptions,
        *,
        number: int | None,
    ) -> None:
        """Takes `number`, the index of this chunk on the rank, or None if the rank has no other chunk."""
        super().__init__(config=config, pg_collection=collection)
        # Megatron's schedules, its gradient buffers and LanguageModule read these attributes.
        self.model_type, self.vp_stage = ModelType.encoder_or_decoder, number
        self.pre_process, self.post_process = chunk.embedding, chunk.head
        self.share_embeddings_and_output_weights = architecture.tied_embeddings
        self.vocab_size = padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size)
        self.max_positions = architecture.max_positions
        if self.pre_process:
            self.embedding = word_embedding(config, self.vocab_size, self.max_positions, collection)
        self.decoder = TransformerBlock(
            config=config,
            spec=block_spec(architecture, config, chunk.layers, options.transformer_engine),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=collection,
            vp_stage=number,
        )
        self._add_head(architecture, collection, options)
        self._add_prediction(architecture, chunk, collection, options, number)
        self._set_rotary_embedding(architecture, options.device, options.transformer_engine)
        if chunk.embedding and architecture.embedding_scale != 1:
            scale_embedding(self.embedding, architecture.embedding_scale, config.params_dtype)
        mark_parallel_weights(self)
        if options.model.fake_quantization:
            round_experts(self, options.model.fake_quantization)
        # Padding rows of the vocabulary are in no checkpoint. Their gradients are zero, so they keep the zeros set
        # here.
        for name, parameter in self.named_parameters():
            if name in VOCABULARY_PARAMETERS:
                parameter.data.zero_()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Sets the hidden states of the previous pipeline stage. Megatron's schedules call it."""
        (hidden_states,) = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.decoder.set_input_tensor(hidden_states)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: None = None,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSeqParams,
    ) -> Tensor:
        """Returns hidden states, logits or values, as described in the class. Positions and masks come with the
        sequences.

        Collective over: the tensor- and context-parallel groups.
        """
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        settings: dict[str, Any] = {
            "attention_mask": None,
            "packed_seq_params": packed_seq_params,
            "rotary_pos_emb": self._angles(embedded, packed_seq_params),
        }
        hidden_states: Tensor = self.decoder(hidden_states=embedded, **settings)
        if not self.post_process:
            return hidden_states
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        outputs, _ = self.output_layer(hidden_states, weight=weight)
        told = told_following(packed_seq_params)
        if told is not None:  # after the head: its weights have arrived
            assert self.mtp_settings is not None, "the model must train multi-token prediction"
            inputs = hidden_states, self.embedding(input_ids=told.following[None], position_ids=None)
            told.states = self.mtp.only(
                *(inputs if self.mtp_settings.trains == "model" else (one.detach() for one in inputs)), **settings
            )
        by_sample: Tensor = outputs.transpose(0, 1).contiguous()
        return by_sample

    def _angles(self, embedded: Tensor | None, sequences: PackedSeqParams) -> Tensor | None:
        """Returns the angles of rotary embeddings. Layers with latent attention make their own."""
        if self.config.multi_latent_attention:
            return None
        rotary = cast(PositionRotaryEmbedding | RotaryEmbedding, self.rotary_pos_emb)
        length = rotary.get_rotary_seq_len(None, self.decoder, embedded, self.config, sequences)
        angles: Tensor = rotary(length, packed_seq=sequences.qkv_format == "thd", cp_group=sequences.cp_group)
        return angles

    @property
    def vocabulary(self) -> Tensor:
        """This rank's vocabulary weights of a chunk with the head, [padded vocabulary / tp, hidden]."""
        own = cast(Tensor | None, self.output_layer.weight)
        return cast(Tensor, self.embedding.word_embeddings.weight) if own is None else own

    def _add_head(self, architecture: Architecture, collection: ProcessGroupCollection, options: ModelOptions) -> None:
        """Adds the projection to the vocabulary or the value head, if this chunk has the head.

        Collective over: first and last pipeline stage, if embeddings are tied.
        """
        if architecture.head == "value":
            if self.pre_process:
                self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
            if self.post_process:
                self.output_layer = ValueHead(self.config, collection.tp)
            return
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=collection.tp,
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if not self.post_process:
            return
        if options.model.logits_chunk_tokens is not None:
            self.output_layer = DeferredHead(self.output_layer, self.config, collection.tp)
        elif options.has_wide_head:
            widen_projection(self.output_layer)
        if architecture.logits_softcap is not None:
            bend_logits(self.output_layer, architecture.logits_softcap)

    def _add_prediction(
        self,
        architecture: Architecture,
        chunk: Chunk,
        collection: ProcessGroupCollection,
        options: ModelOptions,
        number: int | None,
    ) -> None:
        """Adds the multi-token prediction layer, if the chunk has it."""
        self.mtp_settings = options.model.mtp
        if architecture.predicts and chunk.embedding and not chunk.head:
            mark_shared(self.embedding)
        if not chunk.prediction:
            return
        config, shape, depth = self.config, PREDICTIONS[architecture.family], len(chunk.layers) + 1
        spec = predicting_layer_spec(architecture, config, options.transformer_engine)
        self.mtp = PredictionLayers(PredictionLayer(shape, config, spec, depth, collection, vp_stage=number))
        if not chunk.embedding:
            self.embedding = copy_of_embedding(config, self.vocab_size, architecture.max_positions, collection)

    def _set_rotary_embedding(self, architecture: Architecture, device: torch.device, transformer_engine: bool) -> None:
        if architecture.mla:
            rotate_by_position(self, architecture, device)
            return
        frequencies = inverse_frequencies(architecture).to(device)
        if transformer_engine:
            self.rotary_pos_emb = RotaryEmbedding(
                self.config.kv_channels,
                rotary_percent=1.0,
                use_cpu_initialization=self.config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
            self.rotary_pos_emb.inv_freq = frequencies
        elif architecture.sliding_rope_theta is None:
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies)
        else:
            of_sliding = inverse_frequencies(architecture, sliding=True).to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, of_sliding)
