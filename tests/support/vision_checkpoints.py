"""Tiny vision-language models of transformers, with random weights."""

from typing import Any

from transformers import (
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from rltrain.models.vision import Tower, Vision

IMAGE_TOKEN, VISION_START, VISION_END = 5, 7, 8
HIDDEN = 64
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": ROPE,
}
INTERLEAVED = {**TEXT, "head_dim": 16, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 1.0,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 7,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WINDOWED = {**TOWER, "window_size": 28, "fullatt_block_indexes": [1]}
POSITIONED = {**TOWER, "num_position_embeddings": 16}
DEEP = {**POSITIONED, "deepstack_visual_indexes": [0, 1]}
CONFIGS: dict[Tower, tuple[type[PreTrainedConfig], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, TEXT, WINDOWED),
    "qwen3_vl": (Qwen3VLConfig, INTERLEAVED, DEEP),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, {**INTERLEAVED, **EXPERTS}, DEEP),
    "qwen3_5": (Qwen3_5Config, {**INTERLEAVED, **DELTA}, POSITIONED),
    "qwen3_5_moe": (Qwen3_5MoeConfig, {**INTERLEAVED, **DELTA, **EXPERTS}, POSITIONED),
}
"""The class, the language model and the tower of each kind of model."""


def tiny_config(kind: Tower) -> Any:
    """Returns transformers' configuration of a tiny model."""
    config, text, tower = CONFIGS[kind]
    tokens = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return config(text_config=dict(text), vision_config=dict(tower), **tokens)


def tiny_vision(kind: Tower) -> Vision:
    """Returns the shape of the tower of `tiny_config`."""
    tower = CONFIGS[kind][2]
    return Vision(
        kind=kind,
        depth=tower["depth"],
        hidden=tower["hidden_size"],
        heads=tower["num_heads"],
        ffn=tower["intermediate_size"],
        patch=tower["patch_size"],
        temporal_patch=tower["temporal_patch_size"],
        merge=tower["spatial_merge_size"],
        out_hidden=tower["out_hidden_size"],
        window=tower.get("window_size"),
        full_attention=tuple(tower.get("fullatt_block_indexes", ())),
        num_positions=tower.get("num_position_embeddings"),
        deepstack=tuple(tower.get("deepstack_visual_indexes", ())),
        image_token=IMAGE_TOKEN,
        prefix="visual." if kind == "qwen2_5_vl" else "model.visual.",
    )
