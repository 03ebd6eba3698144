"""Megatron-LM's command line arguments for an architecture. They are written into checkpoints and compared with
them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rltrain.checkpoint.megatron_keys import VOCAB_ROWS_MULTIPLE, GlobalTensors
from rltrain.models import Architecture, LinearScaling, RopeScaling, YarnScaling

UNTOLD = {
    "add_position_embedding": True,
    "use_rotary_position_embeddings": True,
    "squared_relu": False,
    "apply_query_key_layer_scaling": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": VOCAB_ROWS_MULTIPLE,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": None,
    "vocab_file": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "data_parallel_random_init": False,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "skipped_train_samples": 0,
    "ckpt_format": "torch_dist",
    "no_save_optim": True,
    "no_save_rng": True,
    "finetune": False,
}
"""Arguments read by Megatron-LM from a checkpoint but independent of the architecture."""


def megatron_arguments(
    architecture: Architecture, *, dtype: str, padded_vocab_size: int | None = None
) -> dict[str, Any]:
    """Returns the arguments read by Megatron-LM and slime from a checkpoint, by name, for weights of `dtype` (in
    torch's spelling). `padded_vocab_size` is as in GlobalTensors."""
    padded_vocab_size = GlobalTensors(architecture, padded_vocab_size=padded_vocab_size).padded_vocab_size
    return {
        **UNTOLD,
        **describing(architecture),
        "group_query_attention": architecture.num_kv_heads != architecture.num_heads,
        "max_position_embeddings": architecture.max_positions,
        "seq_length": architecture.max_positions,
        "padded_vocab_size": padded_vocab_size,
        "params_dtype": getattr(torch, dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
    }


def describing(architecture: Architecture) -> dict[str, Any]:
    """Returns the arguments determined by an architecture, by name, with the values required by Megatron-LM."""
    described = {
        "add_bias_linear": architecture.mlp_bias,
        "swiglu": architecture.activation == "silu",
        "squared_relu": architecture.activation == "relu_squared",
        "normalization": "LayerNorm" if architecture.norm_bias else "RMSNorm",
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_heads,
        "vocab_size": architecture.vocab_size,
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm or architecture.mla is not None,
        "norm_epsilon": architecture.norm_eps,
        "apply_layernorm_1p": architecture.norm_offset != 0,
        "rotary_base": architecture.rope_theta,
        "rotary_interleaved": architecture.rotates_pairs,
        "rotary_percent": 1.0 if architecture.mla else architecture.rotated_size / architecture.head_dim,
        "multi_latent_attention": architecture.mla is not None,
        "num_experts": architecture.num_experts or None,
    }
    if architecture.mla is None:
        described |= {"num_query_groups": architecture.num_kv_heads, "kv_channels": architecture.head_dim}
    return described | _rope(architecture) | _latent_attention(architecture) | _experts(architecture)


def _rope(architecture: Architecture) -> dict[str, Any]:
    """Returns the arguments of rotary embeddings. Latent attention has separate names for YaRN's arguments."""
    scaling = architecture.rope_scaling
    linear = scaling.factor if isinstance(scaling, LinearScaling) and architecture.sliding_rope_theta is None else None
    described: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_seq_len_interpolation_factor": linear,
        "use_rope_scaling": isinstance(scaling, RopeScaling),
    }
    if isinstance(scaling, RopeScaling):
        described["rope_scaling_factor"] = scaling.factor
    if not isinstance(scaling, YarnScaling):
        return described
    of_yarn: dict[str, Any] = {
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if architecture.mla is not None:
        return described | of_yarn | {"mscale": scaling.mscale or 1.0, "mscale_all_dim": scaling.mscale_all_dim}
    of_yarn |= {"correction_range_round_to_int": scaling.truncate}
    return described | {"position_embedding_type": "yarn"} | {f"yarn_{name}": of_yarn[name] for name in of_yarn}


def _latent_attention(architecture: Architecture) -> dict[str, Any]:
    mla = architecture.mla
    if mla is None:
        return {}
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.plain_head_dim,
        "qk_pos_emb_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.value_head_dim,
    }


def _experts(architecture: Architecture) -> dict[str, Any]:
    moe = architecture.moe
    if moe is None:
        return {}
    # Normalised shares are a softmax over the chosen experts alone. Other shares are a softmax over all experts.
    return {
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_layer_freq": [int(sparse) for sparse in architecture.sparse_layers],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalized,
        "moe_router_enable_expert_bias": moe.score == "sigmoid",
        "moe_router_topk_scaling_factor": moe.scaling if moe.scaling != 1.0 else None,
    }


IN_EFFECT_ONLY: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "moe_router_pre_softmax": lambda arguments: arguments.get("moe_router_score_function", "softmax") == "softmax",
    "rope_scaling_factor": lambda arguments: bool(arguments.get("use_rope_scaling")),
}
"""The condition for an argument to have an effect. Without effect it may have any value."""


def compare_arguments(architecture: Architecture, arguments: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns (name, value in the checkpoint, value expected) of the `arguments` in conflict with `architecture`.

    Arguments missing in the checkpoint are not compared, because Megatron-LM's programs save different ones.
    """
    found = {**arguments, **_in_effect(architecture, arguments)}
    return [
        (name, found[name], expected)
        for name, expected in describing(architecture).items()
        if name in found
        and not _same(found[name], expected)
        and (name not in IN_EFFECT_ONLY or IN_EFFECT_ONLY[name](arguments))
    ]


def _in_effect(architecture: Architecture, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the effective values of some arguments, given the others."""
    effect: dict[str, Any] = {}
    if arguments.get("group_query_attention") is False:
        effect["num_query_groups"] = arguments.get("num_attention_heads", architecture.num_heads)
    if "kv_channels" in arguments and arguments["kv_channels"] is None:
        effect["kv_channels"] = arguments.get("hidden_size", 0) // arguments.get("num_attention_heads", 1)
    if arguments.get("vocab_size") is None:  # Megatron-LM takes it from the tokenizer
        effect["vocab_size"] = architecture.vocab_size
    frequency = arguments.get("moe_layer_freq")
    if isinstance(frequency, int):
        effect["moe_layer_freq"] = [int(layer % frequency == 0) for layer in range(architecture.num_layers)]
    if arguments.get("disable_bias_linear") is True:
        effect["add_bias_linear"] = False
    if architecture.mla is None and arguments.get("rotary_scaling_factor") not in (None, 1.0):
        effect["position_embedding_type"] = "yarn"  # under the names of latent attention
    return effect


def _same(found: Any, expected: Any) -> bool:
    """Returns whether two values mean the same. So do None and false, and 10000 and 10000.0."""
    return found == expected or (not found and not expected)
