"""One rank's part of a model of rltrain.models, built of megatron-core's modules on explicit process groups."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.models import Architecture
from rltrain.offload.activations import ActivationOffload
from rltrain.offload.device_memory import check_device, move_to_device
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import chunks_of, megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.logprobs import Logits
from rltrain.training.megatron.architecture_settings import (
    activation_settings,
    attention_settings,
    config_class,
    expert_settings,
    recompute_settings,
    splits_sequences,
)
from rltrain.training.megatron.attention import packed_sequences, thd_sequences
from rltrain.training.megatron.chunk import ModelChunk
from rltrain.training.megatron.context_parallel import BY_HEADS, RING, sequences_of_share, thd_slices
from rltrain.training.megatron.groups import process_group_collection
from rltrain.training.megatron.implementation import (
    check_dispatcher,
    check_names_of_experts,
    uses_transformer_engine,
)
from rltrain.training.megatron.lora import Adapters, is_adapter
from rltrain.training.megatron.options import ModelOptions
from rltrain.training.megatron.pipeline import StageLayout
from rltrain.training.megatron.platform import adapt_to_platform
from rltrain.training.megatron.prediction import prediction_loss
from rltrain.training.packing import ContextShare, MicroBatch

ROUTER_BIAS = ".router.expert_bias"
HOST_TENSORS = ("sort_input_by_local_experts", "restore_output_by_local_experts")
"""Attributes of Megatron's token dispatchers, which are read as lists."""


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
    def prediction(self) -> schema.Mtp:
        """How the layer that predicts a further token is trained, of a model that has one."""
        assert self.options.model.mtp is not None, "of a model that learns to predict"
        return self.options.model.mtp

    def prediction_loss(self, batch: MicroBatch, states: Tensor, shares: Tensor) -> Tensor:
        """As megatron.prediction has it, of `states` of that layer. On the last pipeline stage."""
        last = cast(ModelChunk, self.chunks[-1])
        vocabulary = last.vocabulary.detach() if self.prediction.trains == "layer" else last.vocabulary
        head = Logits(states, vocabulary, self.options.model.logits_chunk_tokens, self.options.has_wide_head)
        return prediction_loss(batch, head, shares, self.pg_collection, self.architecture.vocab_size)

    def sum_gradients_of_copies(self) -> None:
        """Give both ends of a pipeline that has the embedding at either the sum of its gradients. Collective over: the
        first and the last stage, where the model predicts a further token."""
        pipeline, ends = self.pg_collection.pp, self.pg_collection.embd
        if not self.architecture.predicts or pipeline.size() == 1:
            return
        if pipeline.rank() in (0, pipeline.size() - 1):
            chunk = cast(ModelChunk, self.chunks[0 if pipeline.rank() == 0 else -1])
            dist.all_reduce(cast(Any, chunk.embedding.word_embeddings.weight).main_grad, group=ends)

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
    built = LanguageModel(architecture, config, grid, collection, options, layout)
    move_to_device(built, device)
    check_device(built, device, on_host=HOST_TENSORS)
    return built


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
    check_device(model, model.device, on_host=HOST_TENSORS)
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
        use_cpu_initialization=options.device.type == "cpu",
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
        **attention_settings(architecture, transformer_engine=options.transformer_engine),
        **expert_settings(architecture, grid, model.moe, grouped=options.transformer_engine),
    )
