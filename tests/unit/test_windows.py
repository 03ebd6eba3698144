"""Layers of Qwen's families slide as in transformers, however config.json says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from rltrain.errors import CheckpointError
from rltrain.models import read_architecture

CONFIGS = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"
ON = {"use_sliding_window": True}
WAYS: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    {**ON, "sliding_window": 7},
    {**ON, "sliding_window": 7, "max_window_layers": 0},
    {**ON, "sliding_window": 7, "max_window_layers": 2},
    {**ON, "sliding_window": 7, "max_window_layers": LAYERS},
    {**ON, "max_window_layers": 1},
    {**ON, "sliding_window": 7, "layer_types": [FULL, SLIDING, SLIDING, FULL]},
    {**ON, "sliding_window": 7, "layer_types": [FULL] * LAYERS},
    {"layer_types": [FULL] * LAYERS},
]


def write(folder: Path, family: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **changes}))
    return folder


def windows_of(path: Path) -> list[int | None]:
    architecture = read_architecture(path)
    return [architecture.window_of(layer) for layer in range(LAYERS)]


UNREAD = [way for way in WAYS if "sliding_window" in way and "layer_types" in way]
"""Of which transformers reads layer_types in all families but qwen3_moe."""


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in CONFIGS for way in WAYS if family != "qwen3_moe" or way not in UNREAD],
    ids=str,
)
def test_windows_are_those_of_transformers(family: str, way: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{CONFIGS[family]}Config")(**SIZES, **way)
    kinds = getattr(config, "layer_types", [SLIDING if config.sliding_window else FULL] * LAYERS)
    size = config.sliding_window if (config.sliding_window or 999) < SIZES["max_position_embeddings"] else None
    expected = [size if kind == SLIDING else None for kind in kinds]
    assert windows_of(write(tmp_path, family, **way)) == expected
    config.save_pretrained(tmp_path)
    assert windows_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("qwen2", {"layer_types": [SLIDING] * LAYERS}, ["layer_types", "use_sliding_window is not true"]),
        ("qwen2", {**ON, "sliding_window": 7, "layer_types": [SLIDING]}, ["layer_types", "each of 4 layers"]),
        ("qwen2", {**ON, "sliding_window": 7, "layer_types": [[], 1, None, 2]}, ["layer_types", "each of 4 layers"]),
        ("qwen3", {**ON, "sliding_window": None}, ["sliding_window is null", "use_sliding_window is true"]),
        ("qwen3", {**ON, "sliding_window": 0}, ["sliding_window is 0", "at least 1"]),
        ("qwen3", {**ON, "sliding_window": "wide"}, ["sliding_window", "an integer"]),
        ("qwen3", {"use_sliding_window": "yes"}, ["use_sliding_window", "true or false"]),
        ("qwen2_moe", {**ON, "max_window_layers": 1.5}, ["max_window_layers", "an integer"]),
        ("qwen3_moe", {**ON, "sliding_window": 7, "layer_types": [FULL] * LAYERS}, ["layer_types", "every layer"]),
        ("llama", ON, ["use_sliding_window", "llama"]),
    ],
)
def test_what_says_nothing_of_windows_is_refused_by_its_key(
    family: str, changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write(tmp_path, family, **changes))
    for part in parts:
        assert part in str(refusal.value)
