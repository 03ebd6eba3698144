"""Megatron's config for a model: options, process groups, stages, kinds of layers, and settings."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rltrain.config import schema
from rltrain.config.models import CHEAP, RecomputedModule
from rltrain.errors import ConfigError
from rltrain.models import Architecture, YarnScaling
from rltrain.models.checkpoint_model import local_mechanisms
from rltrain.reshard.megatron_layout import Chunk, chunks_of
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.logprobs import groups_of_rank
from rltrain.training.megatron.context_parallel import BY_HEADS, RING
from rltrain.training.megatron.platform import accumulates_in_products

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


# Megatron's process group collection for one role, from explicit rank lists.

# Fields with the same group as another field, since a role has a single optimizer instance.
ALIASES = {"intra_dp_cp": "dp_cp", "intra_expt_dp": "expt_dp"}
UNUSED = ("inter_dist_opt", "hcp")


def process_group_collection(grid: Grid, groups: ProcessGroups) -> ProcessGroupCollection:
    """Returns this rank's groups in `grid` under Megatron's field names. None: the rank is in no such group.

    Megatron's global parallel state stays uninitialised, so roles with different grids can share a process.
    """
    collection = ProcessGroupCollection()
    for field, group in groups_of_rank(grid, groups).items():
        setattr(collection, field, group)
    for alias, field in ALIASES.items():
        setattr(collection, alias, getattr(collection, field))
    for field in UNUSED:
        setattr(collection, field, None)
    return collection


# The layers of every pipeline stage, in the form of Megatron's config.


class StageLayout(PipelineParallelLayerLayout):
    """The layers of `chunks` [stages][chunks of a stage], for the rank at `stage`.

    Megatron's own class asks the global parallel state for this rank's stage and number of chunks.
    """

    def __init__(self, chunks: Sequence[Sequence[Chunk]], stage: int) -> None:
        by_depth = [chunk for interleaved in zip(*chunks, strict=True) for chunk in interleaved]
        super().__init__([_layer_types(chunk) for chunk in by_depth], len(chunks))
        self.stage = stage

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Returns the number of layers before this rank's chunk `vp_stage`. None: the rank has one chunk."""
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + self.stage
        by_depth = [chunk for interleaved in zip(*self.layout, strict=True) for chunk in interleaved]
        return sum(types.count(layer_type) for types in by_depth[:before])

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Returns the number of layers in this rank's chunk `vp_stage`."""
        types: list[LayerType] = self.layout[self.stage][vp_stage or 0]
        return types.count(layer_type)


def _layer_types(chunk: Chunk) -> list[LayerType]:
    ends = [LayerType.embedding] * chunk.embedding, [LayerType.loss] * chunk.head
    return [*ends[0], *[LayerType.decoder] * len(chunk.layers), *ends[1]]


# The choice of Megatron's or Transformer Engine's layers and of the expert dispatcher, with the obstacles to each.

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Limits of head sizes for context parallelism in Transformer Engine (2.20, utils.get_attention_backend)."""
SINGLE_PARAMETER = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""Transformer Engine's variable. If it is set, grouped products have one parameter for all experts."""


def uses_transformer_engine(
    model: schema.Model, device: torch.device, architecture: Architecture | None = None, grid: Grid | None = None
) -> bool:
    """Returns whether model.transformer_impl selects Transformer Engine here. Raises ConfigError if it is set but
    unavailable.

    It lacks fused attention over packed sequences in float32, layers of some architectures, and with context
    parallelism some sizes and numbers of heads. Those cases use the local layers.
    """
    obstacle = obstacle_to_transformer_engine(model, device)
    if obstacle is None and architecture is not None and (mechanisms := local_mechanisms(architecture)):
        obstacle = (
            f"the model has {mechanisms[0]}, and rltrain trains it only with Megatron's local layers",
            "use another model",
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
    """Raises ConfigError if Transformer Engine would keep a layer's experts in one parameter with another name."""
    if architecture.moe and os.environ.get(SINGLE_PARAMETER, "0") not in ("", "0"):
        raise ConfigError(
            f"the environment variable {SINGLE_PARAMETER} is {os.environ[SINGLE_PARAMETER]}: Transformer Engine would "
            "keep all experts of a layer in one parameter, but weight syncs and checkpoints need one per expert; "
            "unset it, or set model.transformer_impl to local"
        )


def check_dispatcher(architecture: Architecture, model: schema.Model, grid: Grid, device: torch.device) -> None:
    """Raises ConfigError if model.moe.dispatcher is deepep and DeepEP cannot be used."""
    if architecture.moe is None or model.moe.dispatcher != "deepep":
        return
    problem = None
    if device.type != "cuda":
        problem = "this machine has no GPU"
    elif not HAVE_DEEP_EP:
        problem = "megatron-core cannot import Buffer, EventHandle and EventOverlap of deep_ep"
    elif grid.ep * (grid.etp or grid.tp) == 1:
        problem = "every rank holds all experts (ep and etp are 1)"
    if problem:
        raise ConfigError(f"model.moe.dispatcher is deepep, but {problem}; set it to alltoall")


def obstacle_to_transformer_engine(model: schema.Model, device: torch.device) -> tuple[str, str] | None:
    """Returns (obstacle, remedy), or None if Transformer Engine can be used."""
    if model.dtype == "float32":
        return (
            "model.dtype is float32, and Transformer Engine has no float32 attention over packed sequences",
            "set model.dtype to bfloat16",
        )
    if not HAVE_TE:
        return "transformer_engine.pytorch cannot be imported", "install transformer-engine for your CUDA version"
    return ("this machine has no GPU", "run on a machine with a GPU") if device.type != "cuda" else None


def _obstacle_to_shared_sequences(
    model: schema.Model, architecture: Architecture, grid: Grid
) -> tuple[str, str] | None:
    """Returns (obstacle, remedy) for context parallelism, or None.

    There, Transformer Engine's attention uses only the kernels of cuDNN or flash-attn. With all_to_all every rank needs
    key and value heads of its own.
    """
    mla = architecture.mla
    sizes = (architecture.head_dim, mla.value_head_dim if mla else architecture.head_dim)
    if any(size % HEAD_MULTIPLE or size > LARGEST_HEAD for size in sizes):
        return (
            f"with cp {grid.cp} its heads have at most {LARGEST_HEAD} elements, a multiple of {HEAD_MULTIPLE}, and "
            f"the model's keys and values have {sizes[0]} and {sizes[1]}",
            "set cp to 1",
        )
    num_kv_heads = max(1, architecture.num_kv_heads // grid.tp)
    if model.cp_communication == "all_to_all" and num_kv_heads % grid.cp:
        return (
            f"with model.cp_communication all_to_all it distributes the {num_kv_heads} key-value heads of a "
            f"tensor-parallel rank over cp {grid.cp} ranks, and cp does not divide their number",
            "set model.cp_communication to auto",
        )
    return None


# Settings of Megatron's config for attention, experts and recomputation.

WITH_TRANSFORMER_ENGINE: tuple[RecomputedModule, ...] = ("mla_up_proj",)
"""Modules whose outputs Megatron discards in the middle of a layer. Its function for this needs Transformer Engine's
FP8 state."""
OF_LOCAL_LAYERS: tuple[RecomputedModule, ...] = ("activation", "rotation")
"""Modules that Transformer Engine's layers do not recompute."""


def config_class(architecture: Architecture) -> type[TransformerConfig]:
    """Returns the Megatron config class with the fields of `attention_settings`."""
    return MLATransformerConfig if architecture.mla else TransformerConfig


def attention_settings(architecture: Architecture, *, transformer_engine: bool) -> dict[str, Any]:
    """Returns the settings of heads, their sizes and the scale of attention scores. ModelChunk replaces rotary
    embeddings."""
    mla, magnitude = architecture.mla, architecture.rotation_magnitude
    if mla is None:
        scale = architecture.attention_scale
        if transformer_engine and magnitude != 1:  # its fused rotation of whole heads does not apply the magnitude
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
        "rope_type": "rope" if magnitude == 1 else "yarn",  # whether rotary embeddings have a magnitude
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,  # Megatron computes the scale of scores from these two
        "mscale_all_dim": yarn.mscale_all_dim if yarn else 0.0,
    }


def activation_settings(architecture: Architecture, *, fused: bool) -> dict[str, Any]:
    """Returns the settings of MLP activations.

    With `fused` Megatron fuses a SiLU gate itself. Other gates are modules. Without a gate it is Megatron's own
    activation.
    """
    if not architecture.gates_mlps:
        return {"gated_linear_unit": False, "activation_func": squared_relu, "bias_activation_fusion": False}
    silu = architecture.activation == "silu"
    return {
        "gated_linear_unit": True,
        "activation_func": F.silu if silu else F.gelu,  # the tanh form if Megatron fuses it, and in block_spec
        "bias_activation_fusion": fused and silu,
        "use_te_activation_func": not (fused and silu),  # a fused one, chosen in block_spec
    }


def splits_sequences(architecture: Architecture, grid: Grid, parallel: schema.Parallel) -> bool:
    """Returns whether tensor-parallel ranks split the tokens outside of attention and MLPs (sequence parallelism).

    Megatron requires it for experts. Without it, Megatron's latent attention has wrong gradients. For the rotated key
    each rank would have only its own heads' part, and gradients of the queries' norm would be summed.
    """
    return grid.tp > 1 and (parallel.sequence_parallel or architecture.is_split_by_tokens)


def expert_settings(architecture: Architecture, grid: Grid, settings: schema.MoE, *, grouped: bool) -> dict[str, Any]:
    """Returns the settings of routing and experts, empty for a dense model. `grouped`: one kernel for all experts of a
    rank."""
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
        # Routers have their own biases, losses and counts.
        "moe_router_enable_expert_bias": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": settings.aux_loss_coef,
        "moe_z_loss_coeff": settings.z_loss_coef,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp or grid.tp,
    }


def recompute_settings(recompute: schema.Recompute, *, transformer_engine: bool) -> dict[str, Any]:
    """Returns Megatron's settings of recomputation.

    Those of local layers in CHEAP are not Megatron's. Raises ConfigError if a module needs Transformer Engine and it is
    not installed, or if its layers do not recompute it.
    """
    chosen = recompute.chosen(transformer_engine=transformer_engine)
    lacking = [module for module in WITH_TRANSFORMER_ENGINE if module in chosen and not HAVE_TE]
    if lacking:
        raise ConfigError(
            f"model.recompute.modules: got {', '.join(lacking)}, but Megatron needs Transformer Engine for it and "
            f"transformer_engine.pytorch cannot be imported; expected {', '.join(CHEAP)}, core_attn, mlp, moe, "
            "shared_experts, or model.recompute: full"
        )
    refused = [module for module in OF_LOCAL_LAYERS if module in chosen and transformer_engine]
    if refused:
        raise ConfigError(
            f"model.recompute.modules: got {', '.join(refused)}, which Transformer Engine's layers do not recompute; "
            "expected layernorm, core_attn, mlp, moe, shared_experts, or model.transformer_impl: local"
        )
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        modules = [module for module in chosen if transformer_engine or module not in CHEAP]
        return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    method, layers = ("uniform", 1) if recompute.layers is None else ("block", recompute.layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def transformer_config(architecture: Architecture, grid: Grid, stage: int, options: ModelOptions) -> TransformerConfig:
    """Returns Megatron's config for pipeline stage `stage`."""
    model = options.model
    dtype, cuda = getattr(torch, model.dtype), options.device.type == "cuda"
    # A factor for each token, as experts have, is part of Megatron's kernel alone.
    megatron_activates = cuda and (options.transformer_engine or architecture.moe is not None)
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
        # Fusion would accumulate gradients into the rounded weights, and these are not kept.
        gradient_accumulation_fusion=model.fake_quantization is None and accumulates_in_products(options.device),
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        # Losses are normalized by counts over the whole mini-batch, so gradients are summed and never averaged.
        calculate_per_token_loss=True,
        **activation_settings(architecture, fused=megatron_activates),
        **recompute_settings(model.recomputed, transformer_engine=options.transformer_engine),
        **attention_settings(architecture, transformer_engine=options.transformer_engine),
        **expert_settings(architecture, grid, model.moe, grouped=options.transformer_engine),
    )
