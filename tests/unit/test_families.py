"""Reading config.json, and the family tables against transformers' own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rltrain.errors import CheckpointError
from rltrain.reshard.families import RopeScaling, canonical_tensors, read_architecture

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
OLD_CONFIG = {"model_type": "llama", **SIZES, "rope_theta": 5e5, "tie_word_embeddings": False, "hidden_act": "silu"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}


def write_config(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_canonical_tensors_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    config_class, model_class = MODELS[family]
    config = config_class(**SIZES, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    with torch.device("meta"):
        state = model_class(config).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    tensors = canonical_tensors(architecture)
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == expected
    assert architecture.family == family
    assert architecture.tied_embeddings is tied


def test_reads_what_transformers_5_writes(tmp_path: Path) -> None:
    rope = {**LLAMA3, "rope_theta": 5e5}
    transformers.LlamaConfig(**SIZES, rope_parameters=rope, eos_token_id=[7, 9]).save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    assert (architecture.num_layers, architecture.hidden_size, architecture.ffn_hidden_size) == (3, 24, 20)
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (4, 2, 8)
    assert (architecture.vocab_size, architecture.max_positions, architecture.norm_eps) == (50, 128, 1e-5)
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    assert architecture.eos_token_ids == (7, 9)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_reads_what_transformers_4_wrote(type_key: str, tmp_path: Path) -> None:
    scaling = {type_key if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    architecture = read_architecture(write_config(tmp_path, **OLD_CONFIG, rope_scaling=scaling))
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)
    plain = read_architecture(write_config(tmp_path, **OLD_CONFIG, rope_scaling=None))
    assert plain.rope_theta == 5e5
    assert plain.rope_scaling is None


def test_keys_that_old_configs_leave_out(tmp_path: Path) -> None:
    values = {key: value for key, value in OLD_CONFIG.items() if key not in ("num_key_value_heads", "head_dim")}
    architecture = read_architecture(write_config(tmp_path, **values))
    assert architecture.num_kv_heads == 4
    assert architecture.head_dim == 6
    qwen3 = read_architecture(write_config(tmp_path, **{**values, "model_type": "qwen3"}))
    assert qwen3.head_dim == transformers.Qwen3Config().head_dim


def test_generation_config_decides_what_ends_a_response(tmp_path: Path) -> None:
    write_config(tmp_path, **OLD_CONFIG, eos_token_id=2)
    assert read_architecture(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_architecture(tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert read_architecture(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gemma"}, ["model_type", '"gemma"', "llama, qwen2, qwen3"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", '"yarn"', "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ["rope_scaling.type", '"linear"', "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling.factor", "absent", "a number"]),
        ({"attention_bias": True}, ["attention_bias", "true", "False"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "true"]),
        ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', "silu"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8", "None"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "full_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_hidden_layers": "three"}, ["num_hidden_layers", '"three"', "an integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "true", "an integer"]),
        ({"vocab_size": 0}, ["vocab_size", "0", "at least 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divisor of num_attention_heads = 4"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>", "integer"]),
    ],
)
def test_what_is_not_supported_is_refused_by_key(changes: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, **{**OLD_CONFIG, **changes}))
    for part in [str(tmp_path / "config.json"), "model.path", *parts]:
        assert part in str(refusal.value)


def test_missing_and_damaged_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist.*model\.path"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read_architecture(tmp_path)
    values = {key: value for key, value in OLD_CONFIG.items() if key != "intermediate_size"}
    with pytest.raises(CheckpointError, match="intermediate_size is absent; expected an integer"):
        read_architecture(write_config(tmp_path, **values))
