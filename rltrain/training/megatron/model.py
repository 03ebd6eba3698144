"""One rank's part of a model on explicit process groups, and Megatron's config for it."""

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from rltrain.config import schema
from rltrain.config.models import Lora, RecomputedModule
from rltrain.errors import ConfigError
from rltrain.models import Architecture, YarnScaling
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.offload.activations import ActivationOffload
from rltrain.offload.device_memory import check_device, move_to_device
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import Chunk, chunks_of, megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.logprobs import Logits, PackedModel, groups_of_rank
from rltrain.training.megatron.attention import packed_sequences, thd_sequences
from rltrain.training.megatron.chunk import ModelChunk, ModelOptions
from rltrain.training.megatron.context_parallel import BY_HEADS, RING, sequences_of_share, thd_slices
from rltrain.training.megatron.fused import rows_multiple
from rltrain.training.megatron.lora import Adapters, is_adapter
from rltrain.training.megatron.platform import adapt_to_platform
from rltrain.training.megatron.prediction import prediction_loss
from rltrain.training.packing import MicroBatch, Packing

# Megatron's collection of process groups for one role, made from explicit rank lists.

# Fields that mean the same group as another one while there is a single optimizer instance per role.
ALIASES = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}
UNUSED = ("inter_dist_opt", "hcp")


def process_group_collection(grid: Grid, groups: ProcessGroups) -> ProcessGroupCollection:
    """This rank's groups in `grid`, under Megatron's field names; None where the rank is in no such group.

    Megatron's global parallel state stays uninitialised, so that roles with different grids can share a process.
    """
    collection = ProcessGroupCollection()
    for field, group in groups_of_rank(grid, groups).items():
        setattr(collection, field, group)
    for alias, field in ALIASES.items():
        setattr(collection, alias, getattr(collection, field))
    for field in UNUSED:
        setattr(collection, field, None)
    return collection


# Which layers every stage of a pipeline holds, as Megatron's config says it.


class StageLayout(PipelineParallelLayerLayout):
    """Of `chunks` [stages][chunks of a stage], for the rank at `stage`.

    Megatron's own asks the global parallel state which stage and how many chunks are this rank's.
    """

    def __init__(self, chunks: Sequence[Sequence[Chunk]], stage: int) -> None:
        by_depth = [chunk for interleaved in zip(*chunks, strict=True) for chunk in interleaved]
        super().__init__([_layer_types(chunk) for chunk in by_depth], len(chunks))
        self.stage = stage

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers before those of this rank's chunk `vp_stage` (None: it has one)."""
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + self.stage
        by_depth = [chunk for interleaved in zip(*self.layout, strict=True) for chunk in interleaved]
        return sum(types.count(layer_type) for types in by_depth[:before])

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """In this rank's chunk `vp_stage`."""
        types: list[LayerType] = self.layout[self.stage][vp_stage or 0]
        return types.count(layer_type)


def _layer_types(chunk: Chunk) -> list[LayerType]:
    ends = [LayerType.embedding] * chunk.embedding, [LayerType.loss] * chunk.head
    return [*ends[0], *[LayerType.decoder] * len(chunk.layers), *ends[1]]


# Which implementation of layers, and of the way of tokens to experts, can be had for a model, and what stands in the
# way of the others.

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Of Transformer Engine's attention over sequences that ranks share out (2.20, utils.get_attention_backend)."""
SINGLE_PARAMETER = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""Of Transformer Engine: its grouped products then have one parameter for all experts."""


def uses_transformer_engine(
    model: schema.Model, device: torch.device, architecture: Architecture | None = None, grid: Grid | None = None
) -> bool:
    """Whether model.transformer_impl means Transformer Engine here; ConfigError if it is asked for and cannot be had.

    It has no fused attention over packed sequences in float32, which therefore takes the local layers, no layers of
    some architectures, and for sequences that ranks share out no heads of some sizes and numbers.
    """
    obstacle = obstacle_to_transformer_engine(model, device)
    if obstacle is None and architecture is not None and (mechanisms := local_mechanisms(architecture)):
        obstacle = (
            f"the model has {mechanisms[0]}, which rltrain trains by Megatron's local layers alone",
            "use another",
        )
    if obstacle is None and architecture is not None and grid is not None and grid.cp > 1:
        obstacle = _obstacle_to_shared_sequences(model, architecture, grid)
    if model.transformer_impl == "transformer_engine" and obstacle is not None:
        problem, remedy = obstacle
        raise ConfigError(
            f"model.transformer_impl is transformer_engine, but {problem}; set it to auto or local, or {remedy}"
        )
    return obstacle is None and model.transformer_impl != "local"


def check_names_of_experts(architecture: Architecture) -> None:
    """ConfigError where Transformer Engine would keep a layer's experts in one parameter, under another name."""
    if architecture.moe and os.environ.get(SINGLE_PARAMETER, "0") not in ("", "0"):
        raise ConfigError(
            f"the environment variable {SINGLE_PARAMETER} is {os.environ[SINGLE_PARAMETER]}: Transformer Engine would "
            "keep all experts of a layer in one parameter, where weight syncs and checkpoints expect one for each; "
            "unset it, or set model.transformer_impl to local"
        )


def check_dispatcher(architecture: Architecture, model: schema.Model, grid: Grid, device: torch.device) -> None:
    """ConfigError where model.moe.dispatcher is deepep and that cannot be had."""
    if architecture.moe is None or model.moe.dispatcher != "deepep":
        return
    problem = None
    if device.type != "cuda":
        problem = "this machine has no GPU"
    elif not HAVE_DEEP_EP:
        problem = "megatron-core cannot import Buffer, EventHandle and EventOverlap of deep_ep"
    elif grid.ep * (grid.etp or grid.tp) == 1:
        problem = "every rank has all experts whole (ep and etp are 1)"
    if problem:
        raise ConfigError(f"model.moe.dispatcher is deepep, but {problem}; set it to alltoall")


def obstacle_to_transformer_engine(model: schema.Model, device: torch.device) -> tuple[str, str] | None:
    """(what is in its way, what would help)."""
    if model.dtype == "float32":
        return (
            "model.dtype is float32, for which it has no attention over packed sequences",
            "set model.dtype to bfloat16",
        )
    if not HAVE_TE:
        return "transformer_engine.pytorch cannot be imported", "install transformer-engine for your CUDA version"
    return ("this machine has no GPU", "run it on one that has") if device.type != "cuda" else None


def _obstacle_to_shared_sequences(
    model: schema.Model, architecture: Architecture, grid: Grid
) -> tuple[str, str] | None:
    """(what of context parallelism is in its way, what would help). Its attention then takes the kernels of cuDNN or
    flash-attn alone, and by heads every rank has some keys and values of its own."""
    mla = architecture.mla
    sizes = (architecture.head_dim, mla.value_head_dim if mla else architecture.head_dim)
    if any(size % HEAD_MULTIPLE or size > LARGEST_HEAD for size in sizes):
        return (
            f"with cp {grid.cp} it takes heads of at most {LARGEST_HEAD} elements, a multiple of {HEAD_MULTIPLE}, and "
            f"the model's keys and values have {sizes[0]} and {sizes[1]}",
            "set cp to 1",
        )
    num_kv_heads = max(1, architecture.num_kv_heads // grid.tp)
    if model.cp_communication == "all_to_all" and num_kv_heads % grid.cp:
        return (
            f"by model.cp_communication all_to_all it shares out the {num_kv_heads} key-value heads of a "
            f"tensor-parallel rank, which cp {grid.cp} does not divide",
            "set model.cp_communication to auto",
        )
    return None


# What Megatron's config says of attention and of experts, for an architecture, and of recomputation.

WITH_TRANSFORMER_ENGINE: tuple[RecomputedModule, ...] = ("layernorm", "mla_up_proj")
"""Modules whose outputs Megatron gives up in the middle of a layer: its function for that asks for the state of FP8."""


def config_class(architecture: Architecture) -> type[TransformerConfig]:
    """Megatron's config that has the settings of `attention_settings`."""
    return MLATransformerConfig if architecture.mla else TransformerConfig


def attention_settings(architecture: Architecture, *, transformer_engine: bool) -> dict[str, Any]:
    """Heads and their sizes, and what scores are multiplied by. Rotary embeddings are replaced in ModelChunk."""
    mla, magnitude = architecture.mla, architecture.rotation_magnitude
    if mla is None:
        scale = architecture.attention_scale
        if transformer_engine and magnitude != 1:  # its fused rotation multiplies nothing, and whole heads are rotated
            scale = architecture.score_scale * magnitude**2
        return {
            "num_query_groups": architecture.num_kv_heads,
            "kv_channels": architecture.head_dim,
            "softmax_scale": scale,
            "attention_output_gate": architecture.gated_attention,
        }
    yarn = architecture.rope_scaling if isinstance(architecture.rope_scaling, YarnScaling) else None
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.plain_head_dim,
        "qk_pos_emb_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.value_head_dim,
        "rotary_base": architecture.rope_theta,
        "rope_type": "rope" if magnitude == 1 else "yarn",  # whether rotary embeddings give a magnitude beside angles
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,  # of these two Megatron makes the scale of scores
        "mscale_all_dim": yarn.mscale_all_dim if yarn else 0.0,
    }


def activation_settings(architecture: Architecture, *, cuda: bool) -> dict[str, Any]:
    """Of MLPs. On GPUs Megatron fuses that of the gate by itself where it is SiLU; another one is a module. Without a
    gate it is Megatron's own."""
    if not architecture.gates_mlps:
        return {"gated_linear_unit": False, "activation_func": squared_relu, "bias_activation_fusion": False}
    silu = architecture.activation == "silu"
    return {
        "gated_linear_unit": True,
        "activation_func": F.silu
        if silu
        else F.gelu,  # which is that by tanh where Megatron fuses it, and in block_spec
        "bias_activation_fusion": cuda and silu,
        "use_te_activation_func": not (cuda and silu),  # any fused one: block_spec says which
    }


def splits_sequences(architecture: Architecture, grid: Grid, parallel: schema.Parallel) -> bool:
    """Whether tensor-parallel ranks share out tokens where nothing else is shared out.

    Megatron trains experts in no other way, and its latent attention has wrong gradients in another: those of the
    rotated key, of which every rank has only what its own heads add, and of the queries' norm, which it would sum.
    """
    return grid.tp > 1 and (parallel.sequence_parallel or architecture.is_split_by_tokens)


def expert_settings(architecture: Architecture, grid: Grid, settings: schema.MoE, *, grouped: bool) -> dict[str, Any]:
    """Routing and experts, none for a dense model. `grouped`: all of a rank's experts in one kernel."""
    moe = architecture.moe
    if moe is None:
        return {}
    chosen_groups = moe.top_groups < moe.num_groups
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(sparse) for sparse in architecture.sparse_layers] if moe.dense_layers else 1,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": "flex" if settings.dispatcher == "deepep" else settings.dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_router_topk": moe.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalized,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_router_num_groups": moe.num_groups if chosen_groups else None,
        "moe_router_group_topk": moe.top_groups if chosen_groups else None,
        # Routers have biases, losses and counts of their own.
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": settings.aux_loss_coef,
        "moe_z_loss_coeff": settings.z_loss_coef,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp or grid.tp,
    }


def recompute_settings(recompute: schema.Recompute) -> dict[str, Any]:
    """ConfigError where Megatron's way of doing it needs Transformer Engine, which is not there."""
    lacking = [module for module in WITH_TRANSFORMER_ENGINE if recompute.repeats(module) and not HAVE_TE]
    if lacking:
        raise ConfigError(
            f"model.recompute.modules: got {', '.join(lacking)}, which Megatron recomputes with Transformer Engine's "
            "help alone, and transformer_engine.pytorch cannot be imported; expected core_attn, mlp, moe, "
            "shared_experts, or model.recompute: full"
        )
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": [*recompute.modules]}
    method, layers = ("uniform", 1) if recompute.layers is None else ("block", recompute.layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


# One rank's part of a model of rltrain.models, built of megatron-core's modules on explicit process groups.

ROUTER_BIAS = ".router.expert_bias"
HOST_TENSORS = ("sort_input_by_local_experts", "restore_output_by_local_experts")
"""Attributes of Megatron's token dispatchers, which are read as lists."""


class LanguageModel(torch.nn.Module, PackedModel):
    """One rank's part of the model: the chunks of its pipeline stage, by depth; several where stages interleave."""

    adapters: Adapters | None

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
        """Padded for sequence and pipeline parallelism and for fast matrix products.

        Stages of a pipeline receive tensors of one shape, so there all micro-batches are padded to one length; balanced
        packing keeps that padding small, and no shapes have to be sent. Interleaved stages take micro-batches in rounds
        of as many as there are stages.

        Where replicas hold experts for each other all get as many micro-batches, of which some have no samples: none
        can compute alone. With dispatcher allgather these have one length, too.
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
        )

    def logits_of(self, outputs: Tensor) -> Logits:
        """Of the last chunk."""
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
