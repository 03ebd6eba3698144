"""What Megatron's config says of attention and of experts, for an architecture, and of recomputation."""

from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from rltrain.config import schema
from rltrain.config.models import RecomputedModule
from rltrain.errors import ConfigError
from rltrain.models import Architecture, YarnScaling
from rltrain.runtime.grid import Grid

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
