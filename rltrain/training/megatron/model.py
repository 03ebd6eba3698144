"""megatron-core's GPTModel for the families of rltrain.models, with either head, on explicit process groups."""

import importlib.util
from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.cluster.grid import Grid
from rltrain.cluster.process_groups import ProcessGroups
from rltrain.config import schema
from rltrain.models import Architecture
from rltrain.models.rotary import inverse_frequencies
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout, padded_vocab_size
from rltrain.training.megatron.architecture_settings import attention_settings, config_class, expert_settings
from rltrain.training.megatron.attention import PositionRotaryEmbedding, packed_sequences, thd_sequences
from rltrain.training.megatron.groups import process_group_collection
from rltrain.training.megatron.latent_attention import rotate_by_position
from rltrain.training.megatron.layers import (
    ValueHead,
    add_final_norm,
    block_spec,
    check_names_of_experts,
    mark_parallel_weights,
    uses_transformer_engine,
)
from rltrain.training.megatron.platform import adapt_to_platform

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")
ROUTER_BIAS = ".router.expert_bias"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LanguageModel(GPTModel):
    """One rank's part of the model: a pipeline stage's layers, sharded over tensor parallelism.

    Takes packed micro-batches: input_ids [1, tokens] and packed_seq_params=self.sequences(lengths). Returns hidden
    states, or on the last stage the logits [1, tokens, padded vocabulary / tp] or, where `architecture` has a value
    head, the values [1, tokens], fp32 and whole on every tensor-parallel rank.
    """

    rotary_pos_emb: torch.nn.Module

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        grid: Grid,
        groups: ProcessGroups,
        *,
        layout: Layout,
        transformer_engine: bool,
        device: torch.device,
    ) -> None:
        collection = process_group_collection(grid, groups)
        stage = collection.pp.rank()
        last_stage, value_head = stage == grid.pp - 1, architecture.head == "value"
        (chunk,) = chunks_of(architecture, grid.pp)[stage]
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, chunk.layers, transformer_engine),
            vocab_size=padded_vocab_size(architecture.vocab_size, grid.tp),
            max_sequence_length=architecture.max_positions,
            pre_process=stage == 0,
            # Megatron would allocate a vocabulary projection with the last stage of a value model.
            post_process=last_stage and not value_head,
            share_embeddings_and_output_weights=architecture.tied_embeddings,
            position_embedding_type="rope",
            pg_collection=collection,
        )
        if last_stage and value_head:
            self.post_process = True
            add_final_norm(self.decoder)
            self.output_layer = ValueHead(config, collection.tp)
        self.architecture = architecture
        self.layout = layout
        self.device = device
        self.on_micro_batch: Callable[[Sequence[int], bool], None] = lambda lengths, backward: None
        """Called with every micro-batch that begins, so that others see the model getting on."""
        self.transformer_engine = transformer_engine
        self._set_rotary_embedding()
        mark_parallel_weights(self)
        # Rows of padding in the vocabulary are in no checkpoint; with zero gradients they stay as they are made here.
        for name, parameter in self.named_parameters():
            if name in VOCABULARY_PARAMETERS:
                parameter.data.zero_()

    def _set_rotary_embedding(self) -> None:
        if self.architecture.mla:
            if not self.transformer_engine:
                rotate_by_position(self, self.architecture, self.device)
            return
        frequencies = inverse_frequencies(self.architecture).to(self.device)
        if self.transformer_engine:
            self.rotary_pos_emb.inv_freq = frequencies
        else:
            self.rotary_pos_emb = PositionRotaryEmbedding(frequencies)

    def sequences(self, lengths: Sequence[int]) -> PackedSeqParams:
        """Describe sequences packed end to end, for forward()."""
        return (thd_sequences if self.transformer_engine else packed_sequences)(lengths, self.device)


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

    ConfigError where Transformer Engine is asked for and missing.
    Collective over: first and last pipeline stage, where embeddings are tied.
    """
    adapt_to_platform()
    # Nothing here draws random numbers: no dropout, and weights come from checkpoints.
    initialize_rng_tracker(inference_rng_tracker=True)
    if parallel.sequence_parallel and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    transformer_engine = uses_transformer_engine(model, device)
    config = transformer_config(
        architecture, grid, model=model, parallel=parallel, device=device, transformer_engine=transformer_engine
    )
    layout = layout_of_model(architecture, grid, model=model, device=device)
    return LanguageModel(
        architecture, config, grid, groups, layout=layout, transformer_engine=transformer_engine, device=device
    )


def layout_of_model(architecture: Architecture, grid: Grid, *, model: schema.Model, device: torch.device) -> Layout:
    """Where the parameters lie that build_model makes. ConfigError as there."""
    transformer_engine = uses_transformer_engine(model, device)
    if transformer_engine:
        check_names_of_experts(architecture)
    return megatron_layout(architecture, grid, dtype=model.dtype, transformer_engine=transformer_engine)


def local_parameters(model: LanguageModel) -> dict[str, Tensor]:
    """This rank's parameters by Megatron's names, as in model.layout.on(rank), with the routers' biases, which
    Megatron keeps as buffers.

    Parameters, not what they hold, which may move to other memory when a TrainableModel takes the model over.
    """
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIAS)}
    return {**dict(model.named_parameters()), **biases}


def transformer_config(
    architecture: Architecture,
    grid: Grid,
    *,
    model: schema.Model,
    parallel: schema.Parallel,
    device: torch.device,
    transformer_engine: bool,
) -> TransformerConfig:
    dtype, cuda = DTYPES[model.dtype], device.type == "cuda"
    recompute_layers = {"recompute_method": "uniform", "recompute_num_layers": 1} if model.recompute == "full" else {}
    return config_class(architecture)(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        ffn_hidden_size=architecture.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm or architecture.mla is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        sequence_parallel=parallel.sequence_parallel and grid.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        bias_activation_fusion=cuda,
        use_te_activation_func=not cuda,  # any fused one: block_spec says which
        bias_dropout_fusion=cuda,
        apply_rope_fusion=transformer_engine and architecture.mla is None,
        gradient_accumulation_fusion=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        recompute_granularity=None if model.recompute == "none" else model.recompute,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        # Losses are normalised by counts over the whole mini-batch: gradients are to be summed, never averaged.
        calculate_per_token_loss=True,
        **recompute_layers,
        **attention_settings(architecture),
        **expert_settings(architecture, grid, grouped=transformer_engine),
    )
