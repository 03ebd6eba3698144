"""Tests of reading config.json, and of the family tables against the models of transformers."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from rltrain.errors import CheckpointError
from rltrain.models import (
    MLA,
    DeltaNet,
    ExpertLayers,
    LongRopeScaling,
    RopeScaling,
    Windows,
    YarnScaling,
    canonical_tensors,
    first_tensors,
    quantizable_tensors,
    read_architecture,
    table_of,
)
from tests.support.model_shards import tiny_architecture


def classes(family: str, config: str = "Config", **values: Any) -> tuple[Any, Any]:
    """Returns a family's config and model classes in transformers. The config has these values by default."""
    model = getattr(transformers, f"{family}ForCausalLM")
    return partial(getattr(transformers, f"{family}{config}"), **values), model


MODELS = {
    "llama": classes("Llama"),
    "mistral": classes("Mistral", sliding_window=None),
    "qwen2": classes("Qwen2"),
    "qwen3": classes("Qwen3"),
    "phi3": classes("Phi3", pad_token_id=0, eos_token_id=2),
    "glm4": classes("Glm4", pad_token_id=0, eos_token_id=2),
    "gemma": classes("Gemma"),
    "gemma2": classes("Gemma2"),
    "gemma3_text": classes("Gemma3", "TextConfig"),
    "seed_oss": classes("SeedOss"),
    "nemotron": classes("Nemotron"),
    "qwen3_5_text": classes("Qwen3_5", "TextConfig", full_attention_interval=2),
}
SIZES = json.loads("""{"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 20, "vocab_size": 50, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05}""")
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4}
FEW_ROUTED = {**ROUTED, "n_routed_experts": 4}
DEEPSEEK = {**FEW_ROUTED, **LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
SHARED = {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 20}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE_MODELS = {
    "qwen3_moe": (*classes("Qwen3Moe"), {**ROUTED, "num_experts": 4, "mlp_only_layers": [1]}),
    "mixtral": (*classes("Mixtral"), LOCAL),
    "deepseek_v3": (*classes("DeepseekV3"), DEEPSEEK),
    "qwen2_moe": (*classes("Qwen2Moe"), {**SHARED, "mlp_only_layers": [1]}),
    "glm4_moe": (
        *classes("Glm4Moe"),
        {**FEW_ROUTED, "n_shared_experts": 2, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4_moe_lite": (*classes("Glm4MoeLite"), {**FEW_ROUTED, **LATENT, "n_shared_experts": 1}),
    "qwen3_5_moe_text": (*classes("Qwen3_5Moe", "TextConfig"), {**SHARED, "full_attention_interval": 2}),
    "qwen3_next": (*classes("Qwen3Next"), {**SHARED, "full_attention_interval": 2, "mlp_only_layers": [1]}),
    "hy_v3": (*classes("HYV3"), {**ROUTED, "num_experts": 4, "num_shared_experts": 2}),
    "gpt_oss": (*classes("GptOss"), {**LOCAL, "sliding_window": 3}),
    "minimax_m2": (*classes("MiniMaxM2", eos_token_id=2), {**LOCAL, "rotary_dim": 4}),
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


@pytest.mark.parametrize("family", SPARSE_MODELS)
def test_canonical_tensors_of_experts_are_those_of_files(family: str, tmp_path: Path) -> None:
    """Compares with files, since transformers stacks the experts in its modules and splits them on saving."""
    config_class, model_class, sizes = SPARSE_MODELS[family]
    model_class(config_class(**{**SIZES, **sizes})).save_pretrained(tmp_path)
    assert_tensors_are_those_of_file(tmp_path)


def assert_tensors_are_those_of_file(path: Path) -> None:
    with safe_open(path / "model.safetensors", "pt") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    tensors = canonical_tensors(read_architecture(path))
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == expected
    assert len(tensors.names) == len(expected)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_value_models_have_the_tensors_of_sequence_classification(family: str, tied: bool, tmp_path: Path) -> None:
    config = MODELS[family][0](**SIZES, tie_word_embeddings=tied, num_labels=1)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        state = transformers.AutoModelForSequenceClassification.from_config(config).state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tensors = canonical_tensors(read_architecture(tmp_path).value_model())
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == expected


def test_reads_experts_and_latent_attention(tmp_path: Path) -> None:
    found = {}
    for family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        config_class, _, sizes = SPARSE_MODELS[family]
        config_class(**{**SIZES, **sizes}).save_pretrained(tmp_path)
        found[family] = read_architecture(tmp_path)
    assert found["qwen3_moe"].moe == ExpertLayers(
        num_experts=4, top_k=2, ffn_hidden_size=12, dense_layers=(1,), normalized=False
    )
    assert found["qwen3_moe"].qk_norm
    assert found["mixtral"].moe == ExpertLayers(num_experts=4, top_k=2, ffn_hidden_size=20)
    deepseek = found["deepseek_v3"]
    assert deepseek.moe == ExpertLayers(
        4, 2, 12, 24, dense_layers=(0,), score="sigmoid", scaling=2.5, num_groups=2, top_groups=1
    )
    assert deepseek.mla == MLA(q_rank=16, kv_rank=8, plain_head_dim=8, rope_head_dim=4, value_head_dim=6)
    assert deepseek.head_dim == 12
    assert deepseek.sparse_layers == (False, True, True)
    assert found["mixtral"].mla is None


OLD_QWEN3_MOE = {"model_type": "qwen3_moe", **SIZES, **ROUTED, "num_experts": 8, "rope_theta": 1e6}
OLD_DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SIZES,
    **ROUTED,
    **LATENT,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
}


def test_reads_experts_that_transformers_4_wrote(tmp_path: Path) -> None:
    every_other = read_architecture(write_config(tmp_path, **OLD_QWEN3_MOE, decoder_sparse_step=2, norm_topk_prob=True))
    assert every_other.moe == ExpertLayers(num_experts=8, top_k=2, ffn_hidden_size=12, dense_layers=(0, 2))
    deepseek = read_architecture(write_config(tmp_path, **OLD_DEEPSEEK, rope_scaling=YARN))
    assert deepseek.rope_scaling == YarnScaling(40.0, 32.0, 1.0, 1.0, 0.5, 64)
    assert deepseek.moe is not None
    assert deepseek.moe.dense_layers == (0, 1)
    assert (deepseek.moe.score, deepseek.moe.scaling, deepseek.moe.num_groups) == ("sigmoid", 1.0, 1)


# The keys of Moonlight-16B-A3B's original config.json that differ from DeepSeek-V3's.
OLD_MOONLIGHT = OLD_DEEPSEEK | json.loads("""{"q_lora_rank": null, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rope_theta": 50000.0, "rope_scaling": null}""")


def test_reads_moonlight_whichever_transformers_wrote_it(tmp_path: Path) -> None:
    old = read_architecture(write_config(tmp_path, **OLD_MOONLIGHT))
    assert old.moe == ExpertLayers(8, 2, 12, 24, dense_layers=(0,), score="sigmoid", scaling=2.446)
    config = transformers.DeepseekV3Config(**{**SIZES, **DEEPSEEK, "q_lora_rank": None, "n_group": 1})
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    assert_tensors_are_those_of_file(tmp_path)
    for architecture in (old, read_architecture(tmp_path)):
        assert architecture.mla == MLA(q_rank=None, kv_rank=8, plain_head_dim=8, rope_head_dim=4, value_head_dim=6)
        assert architecture.family == "deepseek_v3"


DELTA_SIZES = {"linear_key_head_dim": 6, "linear_value_head_dim": 4, "linear_num_key_heads": 2}
PICTURES = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_position_embeddings": 4}


def test_a_language_model_beside_what_encodes_pictures_is_read_alone(tmp_path: Path) -> None:
    text = {**SIZES, **DELTA_SIZES, "linear_num_value_heads": 4, "full_attention_interval": 3, "eos_token_id": 7}
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config={**PICTURES, "out_hidden_size": 24}, tie_word_embeddings=True
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    found = read_architecture(tmp_path)
    assert found.delta == DeltaNet((True, True, False), 2, 4, key_dim=6, value_dim=4, kernel=4)
    assert found.tied_embeddings and found.gated_attention and found.eos_token_ids == (7,) and found.rotary_dim == 2
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    tensors = canonical_tensors(found)
    of_pictures = {name for name in shapes if name.startswith("model.visual.")}
    assert of_pictures
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == {
        name: shape for name, shape in shapes.items() if name not in of_pictures
    }


def test_models_that_transformers_lacks_are_those_that_they_are_built_as(tmp_path: Path) -> None:
    """MiMo is Qwen2 and Kimi-K2 is DeepSeek-V3, by their own code. MiMo's key about biases changes nothing."""
    pairs = [
        ("mimo", {**OLD_CONFIG, "attention_bias": False}, {**OLD_CONFIG, "model_type": "qwen2"}),
        ("kimi_k2", {**OLD_DEEPSEEK, "rope_scaling": YARN}, {**OLD_DEEPSEEK, "rope_scaling": YARN}),
    ]
    for family, config, known in pairs:
        expected = read_architecture(write_config(tmp_path, **known))
        found = read_architecture(write_config(tmp_path, **{**config, "model_type": family}))
        assert found == replace(expected, family=family)
        assert table_of(found) == table_of(expected)


def test_llama_with_attention_biases_has_one_for_every_projection(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, attention_bias=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert_tensors_are_those_of_file(tmp_path)
    architecture = read_architecture(tmp_path)
    assert (architecture.qkv_bias, architecture.output_bias) == (True, True)


REFUSED_EXPERTS = [
    (OLD_QWEN3_MOE, {"num_experts": None}, ["num_experts", "null", "an integer"]),
    (OLD_QWEN3_MOE, {"mlp_only_layers": [True]}, ["mlp_only_layers", "a list of layer numbers"]),
    (OLD_DEEPSEEK, {"q_lora_rank": 0}, ["q_lora_rank", "0", "at least 1"]),
    (OLD_DEEPSEEK, {"scoring_func": "softmax"}, ["scoring_func", '"softmax"', "'sigmoid'"]),
    (OLD_DEEPSEEK, {"topk_method": "greedy"}, ["topk_method", '"greedy"', "'noaux_tc'"]),
    (OLD_DEEPSEEK, {"rope_interleave": False}, ["rope_interleave", "false", "True"]),
    (OLD_DEEPSEEK, {"attention_bias": True}, ["attention_bias", "true", "deepseek_v3"]),
    (OLD_DEEPSEEK, {"norm_topk_prob": False}, ["norm_topk_prob", "false", "true"]),
    (OLD_DEEPSEEK, {"n_group": 3}, ["n_group", "3", "n_routed_experts = 8"]),
    (OLD_DEEPSEEK, {"n_group": 4, "topk_group": 2}, ["topk_group", "2", "half of num_experts_per_tok = 2"]),
    (OLD_DEEPSEEK, {"moe_layer_freq": 2}, ["moe_layer_freq", "2", "1"]),
    (OLD_DEEPSEEK, {"first_k_dense_replace": 4}, ["first_k_dense_replace", "4", "num_hidden_layers = 3"]),
]


@pytest.mark.parametrize("family", [*MODELS, *SPARSE_MODELS])
def test_only_matrices_of_layers_may_be_quantised(family: str) -> None:
    architecture = tiny_architecture(family, num_layers=3)
    tensors = canonical_tensors(architecture)
    for name, shape, quantizable in zip(tensors.names, tensors.shapes, quantizable_tensors(architecture), strict=True):
        routers = (".gate.weight", "mlp.shared_expert_gate.weight", "mlp.router.weight")
        router = name.endswith((*routers, "mlp.experts.gate_up_proj_bias", "down_proj_bias"))
        in_layer = name.startswith("model.layers.")
        says_what_is_kept = ".linear_attn.in_proj_" in name  # the share of a state kept at each token
        assert quantizable == (len(shape) == 2 and in_layer and not router and not says_what_is_kept), name


@pytest.mark.parametrize("family", [*MODELS, *SPARSE_MODELS])
def test_first_tensors_are_where_layers_begin(family: str) -> None:
    architecture = tiny_architecture(family, num_layers=4)
    names = canonical_tensors(architecture).names
    first = first_tensors(architecture)
    for layer in range(4):
        assert all(name.startswith(f"model.layers.{layer}.") for name in names[first[layer] : first[layer + 1]])
    assert first[0] == 1
    assert names[first[4]] == "model.norm.weight"


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


REFUSED = [
    ({"model_type": "gemma4"}, ["model_type", '"gemma4"', "llama, mistral, qwen2, qwen3"]),
    ({"model_type": "gemma2", "hidden_act": None, "final_logit_softcapping": 0}, ["softcapping", "0", "above 0"]),
    ({"model_type": "gemma"}, ["hidden_act", '"silu"', "gelu_pytorch_tanh"]),
    ({"model_type": "mistral", "sliding_window": "wide"}, ["sliding_window", '"wide"', "an integer"]),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, ["mxfp4", "MXFP4", "bfloat16"]),
    ({"model_type": "gpt_oss", "swiglu_limit": 8.0}, ["swiglu_limit", "8.0", "7.0"]),
    ({"model_type": "gpt_oss"}, ["rope_scaling", "absent", "an object"]),
    ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}, ["layer_types", "each of 3 layers"]),
    ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 3}, ["layer_types", "at least one"]),
    ({"model_type": "qwen3_5_text", "full_attention_interval": 4}, ["full_attention_interval", "4", "at most"]),
    ({"model_type": "qwen3_5_text", "linear_num_value_heads": 24}, ["linear_num_value_heads", "24", "multiple"]),
    ({"model_type": "qwen3_5_text", "attention_bias": True}, ["attention_bias", "qwen3_5_text"]),
    ({"model_type": "qwen3_5"}, ["text_config", "absent", "an object"]),
    ({"model_type": "glm_moe_dsa"}, ["model_type", "an indexer of each layer"]),
    ({"model_type": "minimax_m2", **LOCAL, "attn_type_list": [1, 0]}, ["attn_type_list", "1 for every layer"]),
    ({"model_type": "minimax_m2", "rotary_dim": 9}, ["rotary_dim", "9", "8 elements"]),
    ({"model_type": "minimax_m2", "shared_intermediate_size": 64}, ["shared_intermediate_size", "64", "0"]),
    ({"model_type": "phi3", "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5", "8 elements"]),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
        ["rope_scaling.short_factor", "absent", "a list of 4 numbers"],
    ),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, ["layer_types", "each of 3 layers"]),
    ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30"]),
    ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
    ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.rope_type", "linear"]),
    ({"model_type": "mistral", "sliding_window": None, "attention_bias": True}, ["attention_bias", "mistral"]),
    ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling.factor", "absent", "a number"]),
    ({"model_type": "gemma", "attention_bias": True, "hidden_act": None}, ["attention_bias", "true", "gemma"]),
    ({"model_type": "seed_oss", "mlp_bias": True}, ["mlp_bias", "true", "False", "seed_oss"]),
    ({"attention_bias": "yes"}, ["attention_bias", '"yes"', "true or false"]),
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
]


@pytest.mark.parametrize(
    ("config", "changes", "parts"), [*REFUSED_EXPERTS, *((OLD_CONFIG, *refused) for refused in REFUSED)]
)
def test_what_is_not_supported_is_refused_by_key(
    config: dict[str, Any], changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read_architecture(write_config(tmp_path, **{**config, **changes}))
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
    with pytest.raises(CheckpointError, match=r"expected a JSON object \(config key critic\.path\)"):
        read_architecture(tmp_path, config_key="critic.path")
    values = {key: value for key, value in OLD_CONFIG.items() if key != "intermediate_size"}
    with pytest.raises(CheckpointError, match="intermediate_size is absent; expected an integer"):
        read_architecture(write_config(tmp_path, **values))


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-3-1b": (
        json.loads("""{"model_type": "gemma3_text", "attn_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144}"""),
        999_885_952,
    ),
    "Phi-4-mini": (
        json.loads("""{"model_type": "phi3", "attention_bias": false, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "tie_word_embeddings": true, "vocab_size": 200064}""")
        | {"rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
        3_836_021_760,
    ),
    "Qwen1.5-ExpertLayers-A2.7B": (
        json.loads("""{"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "norm_topk_prob":
        false, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "shared_expert_intermediate_size":
        5632, "sliding_window": 32768, "use_sliding_window": false, "vocab_size": 151936}"""),
        14_315_784_192,
    ),
    "GLM-4.5-Air": (
        json.loads("""{"model_type": "glm4_moe", "attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob":
        true, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
        "use_qk_norm": false, "vocab_size": 151552}"""),
        106_852_245_504,
    ),
    "gpt-oss-20b": (
        json.loads("""{"model_type": "gpt_oss", "attention_bias": true, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers":
        24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings":
        4096, "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088}""")
        | {"layer_types": ["sliding_attention", "full_attention"] * 12},
        20_914_757_184,
    ),
}
"""Configs of published models as written by transformers 4, with their numbers of parameters."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str, tmp_path: Path) -> None:
    config, num_parameters = PUBLISHED[name]
    architecture = read_architecture(write_config(tmp_path, **config))
    tensors = canonical_tensors(architecture)
    named = zip(tensors.names, tensors.shapes, strict=True)
    counted = [math.prod(shape) for tensor, shape in named if not tensor.endswith(".e_score_correction_bias")]
    assert sum(counted) == num_parameters, "transformers does not count routers' biases as parameters"


def test_reads_windows_and_rotary_embeddings_of_published_models(tmp_path: Path) -> None:
    gemma, phi, _, glm, oss = (read_architecture(write_config(tmp_path, **config)) for config, _ in PUBLISHED.values())
    assert oss.windows == Windows(128, (True, False) * 12) and oss.rope_theta == 150_000
    assert oss.rope_scaling == YarnScaling(32.0, 32.0, 1.0, 0.0, 0.0, 4096, truncate=False)
    assert oss.moe == ExpertLayers(num_experts=32, top_k=4, ffn_hidden_size=2880, interleaved=True)
    assert (oss.attention_sinks, oss.qkv_bias, oss.output_bias, oss.activation) == (True, True, True, "clamped_swish")
    assert gemma.windows == Windows(512, tuple(bool((layer + 1) % 6) for layer in range(26)))
    assert (gemma.rope_theta, gemma.sliding_rope_theta, gemma.attention_scale) == (1e6, 1e4, 1 / 16)
    assert (gemma.tied_embeddings, gemma.embedding_scale, gemma.norm_offset) == (True, 1152**0.5, 1.0)
    assert phi.windows is None and (phi.rotary_dim, phi.max_positions) == (96, 4096)
    assert phi.rope_scaling == LongRopeScaling((1.0,) * 48, pytest.approx(1.1902380714238083))
    assert (glm.rotary_dim, glm.qkv_bias, glm.output_bias, glm.qk_norm) == (64, True, False, False)
