"""A rank's part of a Megatron model on explicit process groups."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.models import Architecture
from rltrain.models.attention import axis_of_frequency, inverse_frequencies
from rltrain.models.registry import PREDICTIONS
from rltrain.offload.activations import ActivationOffload
from rltrain.offload.device_memory import check_device, move_to_device
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import Chunk, chunks_of, megatron_layout, padded_vocab_size
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.logprobs import PackedModel
from rltrain.training.megatron.attention import (
    MegatronRotaryEmbedding,
    PositionRotaryEmbedding,
    packed_sequences,
    rotate_by_position,
    thd_sequences,
    tree_sequences,
)
from rltrain.training.megatron.context_parallel import BY_HEADS, sequences_of_share, thd_slices, tree_of_share
from rltrain.training.megatron.experts import round_experts
from rltrain.training.megatron.layers import (
    DeferredHead,
    ValueHead,
    block_spec,
    make_again,
    mark_parallel_weights,
    predicting_layer_spec,
    scale_embedding,
    word_embedding,
)
from rltrain.training.megatron.lora import Adapters, is_adapter
from rltrain.training.megatron.model_config import (
    ModelOptions,
    check_dispatcher,
    check_names_of_experts,
    process_group_collection,
    splits_sequences,
    transformer_config,
    uses_transformer_engine,
)
from rltrain.training.megatron.norms import norm_with_sums
from rltrain.training.megatron.platform import adapt_to_platform, rows_multiple
from rltrain.training.megatron.prediction import (
    PredictionLayer,
    PredictionLayers,
    copy_of_embedding,
    mark_shared,
    prediction_loss,
    told_following,
)
from rltrain.training.megatron.tower import SeeingTower, add_deepstack, with_images
from rltrain.training.packing import MicroBatch, Packing
from rltrain.training.tower_pass import Sight, TowerPass
from rltrain.training.vocabulary import Logits

# Consecutive layers of a model with optional embedding and head, built of megatron-core's modules.

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelChunk(LanguageModule):
    """Consecutive layers of a model, sharded over tensor parallelism, with the embedding and head of `chunk`.

    It takes packed micro-batches: input_ids [1, tokens] and packed_seq_params=LanguageModel.sequences(lengths). With
    context parallelism the ids are those of `LanguageModel.share` alone.

    It returns hidden states on chunks without the head. With a vocabulary head it returns the logits' inputs [1,
    tokens, hidden]. With a value head it returns values [1, tokens], fp32. Both are whole on every tensor-parallel
    rank.

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
        norm_with_sums(cast(Any, self.decoder).layers, cast(Any, self.decoder).final_layernorm)
        if not options.transformer_engine:
            make_again(cast(Any, self.decoder).layers, options.model.recomputed.chosen(transformer_engine=False))
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
        """Returns hidden states or values, as described in the class. Positions and masks come with the
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
        rotary = cast(PositionRotaryEmbedding | MegatronRotaryEmbedding, self.rotary_pos_emb)
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
            self.output_layer = DeferredHead(
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
            self.rotary_pos_emb = MegatronRotaryEmbedding(frequencies, self.config, self.pg_collection.cp)
        elif architecture.sliding_rope_theta is None:
            axes = axis_of_frequency(architecture)
            axes = None if axes is None else axes.to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, axes=axes)
        else:
            of_sliding = inverse_frequencies(architecture, sliding=True).to(device)
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies, of_sliding)


# A rank's part of a model, built from megatron-core's modules on explicit process groups.

ROUTER_BIAS = ".router.expert_bias"
HOST_TENSORS = ("sort_input_by_local_experts", "restore_output_by_local_experts")
"""Attributes of Megatron's token dispatchers. They stay on the host because they are read as lists."""


class LanguageModel(torch.nn.Module, PackedModel):
    """A rank's part of the model: the chunks of its pipeline stage by depth. Interleaved stages have several chunks."""

    adapters: Adapters | None

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        grid: Grid,
        collection: ProcessGroupCollection,
        options: ModelOptions,
        layout: Layout,
        sight: Sight | None = None,
    ) -> None:
        """Takes `sight` if the architecture has a vision tower."""
        super().__init__()
        PackedModel.__init__(self, architecture, grid, collection, layout, options.device, options.model)
        self.config, self.options, self.moe = config, options, options.model.moe
        self.chunks = torch.nn.ModuleList(
            ModelChunk(
                architecture,
                config,
                chunk,
                collection,
                options,
                number=number if grid.vpp > 1 else None,
            )
            for number, chunk in enumerate(chunks_of(architecture, grid)[collection.pp.rank()])
        )
        self.vision: SeeingTower | None = None
        if architecture.vision is not None and self.chunks[0].pre_process:
            assert sight is not None, "the model has a vision tower"
            self.vision = SeeingTower(architecture, config, sight, options.device)
        if options.model.activation_offload:
            for chunk in self.chunks:
                decoder = cast(torch.nn.Module, chunk.decoder)
                layers = cast(torch.nn.ModuleList, decoder.layers)
                ActivationOffload(self.device, self.parameters, len(layers)).attach(decoder, list(layers))

    @property
    def weights(self) -> dict[str, Tensor]:
        return local_parameters(self)

    @property
    def packing(self) -> Packing:
        """Pads micro-batches for sequence and pipeline parallelism and for fast matrix products.

        Pipeline stages receive tensors of one shape, so all micro-batches are padded to one length. Balanced packing
        keeps this padding small, and no shapes are sent. Interleaved stages need a multiple of the number of stages.

        If replicas hold experts for each other, no replica can compute alone. All get the same number of micro-batches,
        some without samples. With dispatcher allgather these also have one length.
        """
        config, stages = self.config, self.config.pipeline_model_parallel_size
        ranks_of_tokens = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return Packing(
            self.device,
            self.share,
            rows_multiple=math.lcm(rows_multiple(self.device, config.params_dtype), ranks_of_tokens),
            equal_lengths=stages > 1,
            count_multiple_of=stages if len(self.chunks) > 1 else 1,
            together=self.pg_collection.tp_dp_cp if self.shares_experts else None,
            padding="longest of all" if config.moe_token_dispatcher_type == "allgather" else "longest",
            prefixes=self.share_prefixes,
        )

    def logits_of(self, outputs: Tensor) -> Logits:
        """Returns the last chunk's outputs as logits."""
        return self._head(outputs, cast(ModelChunk, self.chunks[-1]).vocabulary)

    def _head(self, states: Tensor, vocabulary: Tensor) -> Logits:
        """Returns the logits of `states`. In training the gradient of the vocabulary is added to Megatron's buffer.

        Megatron's hook must then not add it again. With tied embeddings it adds the embedding's gradient.
        """
        last = cast(ModelChunk, self.chunks[-1])
        total = getattr(vocabulary, "main_grad", None) if vocabulary.requires_grad else None
        if total is not None and total.dtype != torch.float32:
            total = None
        is_tied = last.share_embeddings_and_output_weights and last.pre_process
        if total is not None and not is_tied:
            cast(Any, vocabulary).grad_added_to_main_grad = True
        wide, softcap = self.options.has_wide_head, self.architecture.logits_softcap
        return Logits(states, vocabulary, wide, softcap, total, stands_in=not is_tied)

    @property
    def prediction(self) -> schema.Mtp:
        """Training settings of the layer for multi-token prediction. The model must have one."""
        assert self.options.model.mtp is not None, "the model must train multi-token prediction"
        return self.options.model.mtp

    def prediction_loss(self, batch: MicroBatch, states: Tensor, shares: Tensor) -> Tensor:
        """Returns the loss of multi-token prediction from its layer's `states`. Call it on the last pipeline stage."""
        last = cast(ModelChunk, self.chunks[-1])
        vocabulary = last.vocabulary.detach() if self.prediction.trains == "layer" else last.vocabulary
        head = self._head(states, vocabulary)
        return prediction_loss(batch, head, shares, self.pg_collection, self.architecture.vocab_size)

    def sum_gradients_of_copies(self) -> None:
        """Sums the embedding's gradients of the first and last pipeline stage, if both have a copy.

        Collective over: the first and the last stage, if the model predicts a further token.
        """
        pipeline, ends = self.pg_collection.pp, self.pg_collection.embd
        if not self.architecture.predicts or pipeline.size() == 1:
            return
        if pipeline.rank() in (0, pipeline.size() - 1):
            chunk = cast(ModelChunk, self.chunks[0 if pipeline.rank() == 0 else -1])
            dist.all_reduce(cast(Any, chunk.embedding.word_embeddings.weight).main_grad, group=ends)

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel replicas hold experts for each other. Then no replica can compute alone."""
        grid = self.grid
        return self.architecture.moe is not None and (grid.tp * grid.cp) % (grid.ep * (grid.etp or grid.tp)) != 0

    def tower_pass(self, batches: Sequence[MicroBatch], *, trains: bool) -> TowerPass | None:
        """Encodes the images of the micro-batches. Returns None if this rank has no tower or the samples have no
        images' fields."""
        if self.vision is None or not batches[0].experience.has("image_keys"):
            return None
        assert self.vision.store is not None, "a model with samples has a store of images"
        return TowerPass(self.vision.tower, batches, self.vision.store, trains=trains and self.vision.is_trained)

    def rows_of_tokens(self, batch: MicroBatch, tokens: Tensor) -> Tensor:
        """Returns the rows of tokens [n] in the embeddings of this rank, or -1 for tokens of other ranks."""
        rows, num_rows = batch.rows_with(tokens, self.share), len(batch.padded_tokens)
        if self.config.sequence_parallel:
            num_rows //= self.pg_collection.tp.size()
            first = self.pg_collection.tp.rank() * num_rows
            rows = torch.where(rows < first + num_rows, rows - first, -1)
        return rows.clamp(min=-1)

    def sequences_of(self, batch: MicroBatch) -> PackedSeqParams:
        """Describes the rows of a micro-batch, as an argument of forward()."""
        if batch.tree is None:
            return self.sequences(batch.segments)
        if self.share.size > 1:
            return tree_of_share(batch, self.share, self.device, by_heads=self.config.cp_comm_type == BY_HEADS)
        return tree_sequences(batch, self.device)

    def sequences(self, lengths: Sequence[int]) -> PackedSeqParams:
        """Describes sequences packed end to end, as an argument of forward().

        With context parallelism they are whole padded sequences, and this rank has its slices of them.
        """
        if self.share.size > 1 and self.options.transformer_engine:
            return thd_slices(lengths, self.pg_collection.cp, self.device)
        if self.share.size > 1:
            by_heads = self.config.cp_comm_type == BY_HEADS
            return sequences_of_share(lengths, self.share, self.device, by_heads=by_heads)
        return (thd_sequences if self.options.transformer_engine else packed_sequences)(lengths, self.device)


def build_model(
    architecture: Architecture,
    grid: Grid,
    groups: ProcessGroups,
    *,
    model: schema.Model,
    parallel: schema.Parallel,
    device: torch.device,
    sight: Sight | None = None,
) -> LanguageModel:
    """Builds this rank's part of the model, without loaded weights. `grid` must divide the model as in megatron_layout.
    A model with a vision tower needs `sight`.

    Raises ConfigError if Transformer Engine or DeepEP is requested and missing. Collective over: first and last
    pipeline stage, if embeddings are tied.
    """
    adapt_to_platform()
    # No random numbers are used: there is no dropout, and weights come from checkpoints.
    initialize_rng_tracker(inference_rng_tracker=True)
    gathers_tokens = splits_sequences(architecture, grid, parallel) or model.moe.dispatcher == "allgather"
    if gathers_tokens and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    options = ModelOptions(model, parallel, device, uses_transformer_engine(model, device, architecture, grid))
    check_dispatcher(architecture, model, grid, device)
    collection = process_group_collection(grid, groups)
    config = transformer_config(architecture, grid, collection.pp.rank(), options)
    layout = layout_of_model(architecture, grid, model=model, device=device)
    built = LanguageModel(architecture, config, grid, collection, options, layout, sight)
    if sight is not None and not sight.settings.train:
        built.trained_layout = layout_of_model(replace(architecture, vision=None), grid, model=model, device=device)
    move_to_device(built, device)
    check_device(built, device, on_host=HOST_TENSORS)
    return built


def layout_of_model(architecture: Architecture, grid: Grid, *, model: schema.Model, device: torch.device) -> Layout:
    """Returns the layout of the parameters of build_model. Raises ConfigError in the same cases."""
    transformer_engine = uses_transformer_engine(model, device, architecture, grid)
    if transformer_engine:
        check_names_of_experts(architecture)
    return megatron_layout(architecture, grid, dtype=model.dtype, transformer_engine=transformer_engine)


def local_parameters(model: LanguageModel) -> dict[str, Tensor]:
    """Returns this rank's parameters by Megatron's names, as in model.layout.on(rank), without adapters.

    The routers' biases are included. Megatron keeps them as buffers. The values of the returned parameters may move to
    other memory when a TrainableModel takes over the model.
    """
    held: dict[str, Tensor] = {}
    for number, chunk in enumerate(model.chunks):
        prefix = f"{number}." if len(model.chunks) > 1 else ""
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS))
        parameters = ((name, tensor) for name, tensor in chunk.named_parameters() if not is_adapter(name))
        held |= {prefix + name: tensor for name, tensor in (*parameters, *biases)}
    if model.vision is not None:
        of_tower = model.vision.named_weights("0." if len(model.chunks) > 1 else "")
        held |= {name: weight for name, weight in of_tower if not is_adapter(name)}
    return held


def adapters_layout_of_model(
    architecture: Architecture, grid: Grid, settings: Lora, *, model: schema.Model, device: torch.device
) -> Layout:
    """Returns the layout of the adapters of a model of build_model. Raises ConfigError in the same cases."""
    transformer_engine = uses_transformer_engine(model, device, architecture)
    adapted = architecture.adapted(settings.rank, settings.targets, vision=settings.vision)
    return megatron_layout(adapted, grid, dtype=model.dtype, transformer_engine=transformer_engine)


def add_adapters(model: LanguageModel, settings: Lora, seed: int = 0) -> Adapters:
    """Freezes a built model and adds adapters. All of them are zero."""
    options = model.options
    model.adapters = Adapters(
        cast(Sequence[torch.nn.Module], model.chunks),
        adapters_layout_of_model(model.architecture, model.grid, settings, model=options.model, device=model.device),
        dist.get_rank(),
        settings,
        model.pg_collection,
        sequence_parallel=model.config.sequence_parallel,
        seed=seed,
        tower=None if model.vision is None else model.vision.module,
    )
    check_device(model, model.device, on_host=HOST_TENSORS)
    return model.adapters
