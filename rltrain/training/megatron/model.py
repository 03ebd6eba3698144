"""megatron-core's GPTModel for the families of rltrain.models, with either head, on explicit process groups."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.cluster.grid import Grid
from rltrain.cluster.process_groups import ProcessGroups
from rltrain.config import schema
from rltrain.config.lora import Lora
from rltrain.models import Architecture
from rltrain.models.rotary import inverse_frequencies
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout, padded_vocab_size
from rltrain.reshard.model_layout import Chunk
from rltrain.training.activation_offload import ActivationOffload
from rltrain.training.context_slices import ContextShare
from rltrain.training.logprobs import Logits
from rltrain.training.megatron.architecture_settings import (
    activation_settings,
    attention_settings,
    config_class,
    expert_settings,
    recompute_settings,
    splits_sequences,
)
from rltrain.training.megatron.attention import PositionRotaryEmbedding, packed_sequences, thd_sequences
from rltrain.training.megatron.context_parallel import BY_HEADS, RING, sequences_of_share, thd_slices
from rltrain.training.megatron.fake_quantization import round_experts
from rltrain.training.megatron.groups import process_group_collection
from rltrain.training.megatron.implementation import (
    check_dispatcher,
    check_names_of_experts,
    uses_transformer_engine,
)
from rltrain.training.megatron.latent_attention import rotate_by_position
from rltrain.training.megatron.layers import (
    DeferredHead,
    ValueHead,
    add_final_norm,
    bend_logits,
    block_spec,
    mark_parallel_weights,
    place_shared_gates,
    scale_embedding,
)
from rltrain.training.megatron.lora import Adapters, is_adapter
from rltrain.training.megatron.options import ModelOptions
from rltrain.training.megatron.pipeline import StageLayout
from rltrain.training.megatron.platform import adapt_to_platform
from rltrain.training.megatron.precision import widen_projection

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")
ROUTER_BIAS = ".router.expert_bias"


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
        self._set_rotary_embedding(architecture, options.device, options.transformer_engine)
        if chunk.embedding and architecture.embedding_scale != 1:
            scale_embedding(self.embedding, architecture.embedding_scale, config.params_dtype)
        place_shared_gates(self, options.device)
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

    def _set_rotary_embedding(self, architecture: Architecture, device: torch.device, transformer_engine: bool) -> None:
        if architecture.mla:
            if not transformer_engine:
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


class LanguageModel(torch.nn.Module):
    """One rank's part of the model: the chunks of its pipeline stage, by depth; several where stages interleave."""

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        grid: Grid,
        collection: ProcessGroupCollection,
        options: ModelOptions,
        layout: Layout,
    ) -> None:
        super().__init__()
        self.architecture, self.grid = architecture, grid
        self.config, self.options, self.moe = config, options, options.model.moe
        self.pg_collection = collection
        self.share = ContextShare(collection.cp.rank(), collection.cp.size())
        self.layout = layout
        self.device = options.device
        self.on_micro_batch: Callable[[Sequence[int], bool], None] = lambda lengths, backward: None
        """Called with every micro-batch that begins, so that others see the model getting on."""
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
        self.adapters: Adapters | None = None
        if options.model.activation_offload:
            for chunk in self.chunks:
                decoder = cast(torch.nn.Module, chunk.decoder)
                layers = cast(torch.nn.ModuleList, decoder.layers)
                ActivationOffload(self.device, self.parameters, len(layers)).attach(decoder, list(layers))

    def logits_of(self, outputs: Tensor) -> Logits:
        """What the last chunk put out for some tokens, [tokens, ...], as logits."""
        chunk_tokens = self.options.model.logits_chunk_tokens
        if chunk_tokens is None:
            return Logits(outputs)
        last = cast(ModelChunk, self.chunks[-1])
        return Logits(outputs, last.vocabulary, chunk_tokens, self.options.has_wide_head)

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel replicas hold experts for each other, so that none computes without the others."""
        grid = self.grid
        return self.architecture.moe is not None and (grid.tp * grid.cp) % (grid.ep * (grid.etp or grid.tp)) != 0

    def sequences(self, lengths: Sequence[int]) -> PackedSeqParams:
        """Describe sequences packed end to end, for forward(): with context parallelism whole ones, with their padding,
        of which this rank has its slices."""
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
) -> LanguageModel:
    """This rank's part of the model, weights not yet loaded. `grid` must divide the model, as megatron_layout says.

    ConfigError where Transformer Engine or DeepEP is asked for and missing.
    Collective over: first and last pipeline stage, where embeddings are tied.
    """
    adapt_to_platform()
    # Nothing here draws random numbers: no dropout, and weights come from checkpoints.
    initialize_rng_tracker(inference_rng_tracker=True)
    gathers_tokens = splits_sequences(architecture, grid, parallel) or model.moe.dispatcher == "allgather"
    if gathers_tokens and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    options = ModelOptions(model, parallel, device, uses_transformer_engine(model, device, architecture, grid))
    check_dispatcher(architecture, model, grid, device)
    collection = process_group_collection(grid, groups)
    config = transformer_config(architecture, grid, collection.pp.rank(), options)
    layout = layout_of_model(architecture, grid, model=model, device=device)
    return LanguageModel(architecture, config, grid, collection, options, layout)


def layout_of_model(architecture: Architecture, grid: Grid, *, model: schema.Model, device: torch.device) -> Layout:
    """Where the parameters lie that build_model makes. ConfigError as there."""
    transformer_engine = uses_transformer_engine(model, device, architecture, grid)
    if transformer_engine:
        check_names_of_experts(architecture)
    return megatron_layout(architecture, grid, dtype=model.dtype, transformer_engine=transformer_engine)


def local_parameters(model: LanguageModel) -> dict[str, Tensor]:
    """This rank's parameters by Megatron's names, as in model.layout.on(rank), with the routers' biases, which
    Megatron keeps as buffers. Without adapters.

    Parameters, not what they hold, which may move to other memory when a TrainableModel takes the model over.
    """
    held: dict[str, Tensor] = {}
    for number, chunk in enumerate(model.chunks):
        prefix = f"{number}." if len(model.chunks) > 1 else ""
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS))
        parameters = ((name, tensor) for name, tensor in chunk.named_parameters() if not is_adapter(name))
        held |= {prefix + name: tensor for name, tensor in (*parameters, *biases)}
    return held


def adapters_layout_of_model(
    architecture: Architecture, grid: Grid, settings: Lora, *, model: schema.Model, device: torch.device
) -> Layout:
    """Where the adapters lie of a model that build_model makes. ConfigError as there."""
    transformer_engine = uses_transformer_engine(model, device, architecture)
    adapted = architecture.adapted(settings.rank, settings.targets)
    return megatron_layout(adapted, grid, dtype=model.dtype, transformer_engine=transformer_engine)


def add_adapters(model: LanguageModel, settings: Lora, seed: int = 0) -> Adapters:
    """Freeze a model that is built and give it adapters, all of them zero."""
    options = model.options
    model.adapters = Adapters(
        cast(Sequence[torch.nn.Module], model.chunks),
        adapters_layout_of_model(model.architecture, model.grid, settings, model=options.model, device=model.device),
        dist.get_rank(),
        settings,
        model.pg_collection,
        sequence_parallel=model.config.sequence_parallel,
        seed=seed,
    )
    return model.adapters


def learned_layout(model: LanguageModel) -> Layout:
    """Where what training changes lies: the adapters, if there are any."""
    return model.adapters.layout if model.adapters else model.layout


def learned_parameters(model: LanguageModel) -> dict[str, Tensor]:
    """This rank's, as in learned_layout(model).on(rank)."""
    return model.adapters.parameters if model.adapters else local_parameters(model)


def transformer_config(architecture: Architecture, grid: Grid, stage: int, options: ModelOptions) -> TransformerConfig:
    """Megatron's, of pipeline stage `stage`."""
    model = options.model
    dtype, cuda = getattr(torch, model.dtype), options.device.type == "cuda"
    return config_class(architecture)(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        ffn_hidden_size=architecture.ffn_hidden_size,
        normalization="LayerNorm" if architecture.norm_bias else "RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        layernorm_zero_centered_gamma=architecture.norm_offset != 0,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm or architecture.mla is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        context_parallel_size=grid.cp,
        cp_comm_type=BY_HEADS if model.cp_communication == "all_to_all" else RING,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        pipeline_model_parallel_layout=StageLayout(chunks_of(architecture, grid), stage) if grid.pp > 1 else None,
        sequence_parallel=splits_sequences(architecture, grid, options.parallel),
        params_dtype=dtype,
        pipeline_dtype=getattr(torch, model.residual),
        fp32_residual_connection=model.residual != model.dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=options.transformer_engine and architecture.mla is None,
        gradient_accumulation_fusion=cuda
        # It would add to the gradients of rounded weights, which nobody has.
        and model.fake_quantization is None
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        # Losses are normalised by counts over the whole mini-batch: gradients are to be summed, never averaged.
        calculate_per_token_loss=True,
        **activation_settings(architecture, cuda=cuda),
        **recompute_settings(model.recomputed),
        **attention_settings(architecture),
        **expert_settings(architecture, grid, model.moe, grouped=options.transformer_engine),
    )
