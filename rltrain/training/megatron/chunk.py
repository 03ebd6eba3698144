"""Consecutive layers of a model, built of megatron-core's modules, and the options for building them."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.config import schema
from rltrain.models import Architecture
from rltrain.models.attention import axis_of_frequency, inverse_frequencies
from rltrain.models.registry import PREDICTIONS
from rltrain.reshard.megatron_layout import Chunk, padded_vocab_size
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
from rltrain.training.megatron.prediction import (
    PredictionLayer,
    PredictionLayers,
    copy_of_embedding,
    mark_shared,
    told_following,
)
from rltrain.training.megatron.vision import add_deepstack, with_images

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
        if chunk.embedding and architecture.vision is not None:
            add_deepstack(cast(torch.nn.ModuleList, self.decoder.layers), len(architecture.vision.deepstack))
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
        if embedded is not None:
            embedded = with_images(embedded, packed_seq_params)
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
            axes = axis_of_frequency(architecture)
            axes = None if axes is None else axes.to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, axes=axes)
        else:
            of_sliding = inverse_frequencies(architecture, sliding=True).to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, of_sliding)
