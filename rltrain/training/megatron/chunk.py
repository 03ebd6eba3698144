"""Consecutive layers of megatron-core's GPTModel for the families of rltrain.models, with the ends that they have."""

from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.prediction import PREDICTIONS
from rltrain.models.rotary import inverse_frequencies
from rltrain.reshard.megatron_layout import padded_vocab_size
from rltrain.reshard.model_layout import Chunk
from rltrain.training.megatron.attention import PositionRotaryEmbedding
from rltrain.training.megatron.fake_quantization import round_experts
from rltrain.training.megatron.latent_attention import rotate_by_position
from rltrain.training.megatron.layers import (
    DeferredHead,
    ValueHead,
    add_final_norm,
    bend_logits,
    block_spec,
    mark_parallel_weights,
    predicting_layer_spec,
    scale_embedding,
)
from rltrain.training.megatron.options import ModelOptions
from rltrain.training.megatron.precision import widen_projection
from rltrain.training.megatron.prediction import (
    PredictionLayer,
    PredictionLayers,
    copy_of_embedding,
    mark_shared,
    told_following,
)

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelChunk(GPTModel):
    """Consecutive layers of a model, sharded over tensor parallelism, with the ends that `chunk` has.

    Takes packed micro-batches: input_ids [1, tokens] and packed_seq_params=LanguageModel.sequences(lengths), with
    context parallelism the ids of `LanguageModel.share` alone. Returns hidden states, or with the head the logits
    [1, tokens, padded vocabulary / tp] or, where `architecture` has a value head, the values [1, tokens], fp32 and
    whole on every tensor-parallel rank. With `model.logits_chunk_tokens` what logits are made of takes their place:
    [1, tokens, hidden].
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
        """`number` of this one among the rank's; None where it is alone."""
        value_head = architecture.head == "value"
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, chunk.layers, options.transformer_engine),
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_positions,
            pre_process=chunk.embedding,
            # Megatron would allocate a vocabulary projection with the last chunk of a value model.
            post_process=chunk.head and not value_head,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=collection,
            vp_stage=number,
        )
        if chunk.head and value_head:
            self.post_process = True
            add_final_norm(self.decoder)
            self.output_layer = ValueHead(config, collection.tp)
        elif chunk.head and options.model.logits_chunk_tokens is not None:
            self.output_layer = DeferredHead(self.output_layer, config, collection.tp)
        elif chunk.head and options.has_wide_head:
            widen_projection(self.output_layer)
        if chunk.head and not value_head and architecture.logits_softcap is not None:
            bend_logits(self.output_layer, architecture.logits_softcap)
        self._add_prediction(architecture, chunk, collection, options, number)
        self._set_rotary_embedding(architecture, options.device, options.transformer_engine)
        if chunk.embedding and architecture.embedding_scale != 1:
            scale_embedding(self.embedding, architecture.embedding_scale, config.params_dtype)
        mark_parallel_weights(self)
        if options.model.fake_quantization:
            round_experts(self, options.model.fake_quantization)
        # Rows of padding in the vocabulary are in no checkpoint; with zero gradients they stay as they are made here.
        for name, parameter in self.named_parameters():
            if name in VOCABULARY_PARAMETERS:
                parameter.data.zero_()

    @property
    def vocabulary(self) -> Tensor:
        """Of a chunk with the head: this rank's [padded vocabulary / tp, hidden]."""
        own = cast(Tensor | None, self.output_layer.weight)
        return cast(Tensor, self.embedding.word_embeddings.weight) if own is None else own

    def _add_prediction(
        self,
        architecture: Architecture,
        chunk: Chunk,
        collection: ProcessGroupCollection,
        options: ModelOptions,
        number: int | None,
    ) -> None:
        """The layer that predicts a further token, where the chunk has it."""
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

    def _postprocess(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSeqParams,
        rotary_pos_emb: Any = None,
        attention_mask: Any = None,
        **others: Any,
    ) -> Tensor:
        """As Megatron has it, and in training what the layer behind makes of the same states: the head comes first, so
        that its weights are there."""
        outputs: Tensor = super()._postprocess(
            hidden_states=hidden_states,
            packed_seq_params=packed_seq_params,
            rotary_pos_emb=rotary_pos_emb,
            attention_mask=attention_mask,
            **others,
        )
        told = told_following(packed_seq_params)
        if told is not None and self.post_process:
            assert self.mtp_settings is not None, "of a model that learns to predict"
            inputs = hidden_states, self.embedding(input_ids=told.following[None], position_ids=None)
            told.states = self.mtp.only(
                *(inputs if self.mtp_settings.trains == "model" else (one.detach() for one in inputs)),
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
            )
        return outputs

    def _set_rotary_embedding(self, architecture: Architecture, device: torch.device, transformer_engine: bool) -> None:
        if architecture.mla:
            rotate_by_position(self, architecture, device)
            return
        frequencies = inverse_frequencies(architecture).to(device)
        if transformer_engine:
            self.rotary_pos_emb.inv_freq = frequencies
        elif architecture.sliding_rope_theta is None:
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies)
        else:
            of_sliding = inverse_frequencies(architecture, sliding=True).to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, of_sliding)
