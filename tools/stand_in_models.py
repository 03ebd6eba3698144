"""config.json of published models, by their names: what a dry run reads of a model whose weights are not at hand."""

import json
import re
from pathlib import Path
from typing import Any

VOCABULARY = {"vocab_size": 151936, "eos_token_id": 151645, "hidden_act": "silu", "rms_norm_eps": 1e-6}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 32768, **VOCABULARY}
QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128, **VOCABULARY}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "eos_token_id": 128001,
    "vocab_size": 128256,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
GLM = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "eos_token_id": 151329,
    "max_position_embeddings": 32768,
}
GEMMA = {
    "model_type": "gemma",
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "vocab_size": 256000,
    "eos_token_id": 1,
    "rope_theta": 1e4,
    "max_position_embeddings": 8192,
}
GEMMA2 = {
    **{key: value for key, value in GEMMA.items() if key != "hidden_act"},
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def _dense(family: dict[str, Any], sizes: str, tied: bool = False, **more: Any) -> dict[str, Any]:
    """`sizes`: hidden size, layers, heads, key-value heads, feed-forward units."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = dict(zip(names, map(int, sizes.split()), strict=True))
    return {**family, **shape, "tie_word_embeddings": tied, **more}


def _large(text: str, **more: Any) -> dict[str, Any]:
    """Of DeepSeek-V3's family: hidden size, layers, heads, units, units of an expert, experts, of which so many."""
    names = "hidden_size num_hidden_layers num_attention_heads intermediate_size moe_intermediate_size "
    names += "n_routed_experts num_experts_per_tok"
    shape = dict(zip(names.split(), map(int, text.split()), strict=True))
    return {**DEEPSEEK, **shape, "num_key_value_heads": shape["num_attention_heads"], **more}


QWEN_DELTA = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    **VOCABULARY,
}


def _qwen3_5(sizes: str, value_heads: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    """`sizes` as in `_dense`; what encodes pictures is left out."""
    text = _dense(QWEN_DELTA, sizes, linear_num_value_heads=value_heads, vocab_size=248320, eos_token_id=248044, **more)
    family = "qwen3_5_moe" if "num_experts" in more else "qwen3_5"
    text |= {"model_type": f"{family}_text", "tie_word_embeddings": tied, "mtp_num_hidden_layers": 1}
    return {"model_type": family, "text_config": text, "tie_word_embeddings": tied}


YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 201088,
    "eos_token_id": 200002,
}
SHAPES: dict[str, dict[str, Any]] = {
    r"qwen2(\.5)?-.*\b0\.5b": _dense(QWEN2, "896 24 14 2 4864", tied=True),
    r"qwen2(\.5)?-.*\b1\.5b": _dense(QWEN2, "1536 28 12 2 8960", tied=True),
    r"qwen2(\.5)?-.*\b3b": _dense(QWEN2, "2048 36 16 2 11008", tied=True),
    r"(qwen2(\.5)?-.*\b7b|skywork-or1|webthinker)": _dense(QWEN2, "3584 28 28 4 18944", vocab_size=152064),
    r"qwen2(\.5)?-.*\b14b": _dense(QWEN2, "5120 48 40 8 13824", vocab_size=152064),
    r"(qwen2(\.5)?-.*|qwq-|skywork.*)\b32b": _dense(QWEN2, "5120 64 40 8 27648", vocab_size=152064),
    r"qwen2(\.5)?-.*\b72b": _dense(QWEN2, "8192 80 64 8 29568", vocab_size=152064),
    r"qwen3-(coder-)?30b-a3b": _dense(QWEN3_MOE, "2048 48 32 4 6144", moe_intermediate_size=768),
    r"qwen3-235b-a22b": _dense(QWEN3_MOE, "4096 94 64 4 12288", moe_intermediate_size=1536),
    r"qwen3-0\.6b": _dense(QWEN3, "1024 28 16 8 3072", tied=True),
    r"qwen3-1\.7b": _dense(QWEN3, "2048 28 16 8 6144", tied=True),
    r"qwen3-4b": _dense(QWEN3, "2560 36 32 8 9728", tied=True),
    r"qwen3-8b": _dense(QWEN3, "4096 36 32 8 12288"),
    r"qwen3-14b": _dense(QWEN3, "5120 40 40 8 17408"),
    r"qwen3-32b": _dense(QWEN3, "5120 64 64 8 25600"),
    r"llama-?3\.2-1b": _dense(LLAMA, "2048 16 32 8 8192", tied=True),
    r"llama-?3\.2-3b": _dense(LLAMA, "3072 28 24 8 8192", tied=True),
    r"(skywork-reward-)?llama-?3(\.1)?-8b": _dense(LLAMA, "4096 32 32 8 14336"),
    r"llama-?3(\.[13])?-70b": _dense(LLAMA, "8192 80 64 8 28672"),
    r"deepseek-(llm|coder|math)?-?(6\.)?7b": _dense(LLAMA, "4096 30 32 32 11008", vocab_size=102400),
    r"(mistral-nemo|ministral|mistral.*12b)": _dense(
        {**LLAMA, "model_type": "mistral"}, "5120 40 32 8 14336", head_dim=128, vocab_size=131072, sliding_window=None
    ),
    r"moonlight": _large(
        "2048 27 16 11264 1408 64 6",
        q_lora_rank=None,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        vocab_size=163840,
    ),
    r"kimi-k2": _large(
        "7168 61 64 18432 2048 384 8",
        model_type="kimi_k2",
        q_lora_rank=1536,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        vocab_size=163840,
        rope_scaling={**YARN, "factor": 32},
    ),
    r"qwen2\.5-math$": _dense(QWEN2, "3584 28 28 4 18944", vocab_size=152064),  # a folder of SkyRL's, of 7B
    r"qwen1\.5-moe-a2\.7b": _dense(
        QWEN2,
        "2048 24 16 16 5632",
        model_type="qwen2_moe",
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    r"glm-(z1|4)-9b": _dense(GLM, "4096 40 32 2 13696", model_type="glm4", rope_theta=1e4),
    r"glm-4\.[67](-355b.*|-fp8)?$": _dense(
        GLM,
        "5120 92 96 8 12288",
        model_type="glm4_moe",
        moe_intermediate_size=1536,
        n_routed_experts=160,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
        attention_bias=True,
        eos_token_id=[151329, 151336, 151338],
        rope_theta=1e6,
        max_position_embeddings=202752,
    ),
    r"glm-4\.7-flash": _large(
        "2048 47 20 10240 1536 64 4",
        model_type="glm4_moe_lite",
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        n_shared_experts=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        vocab_size=154880,
        eos_token_id=[154820, 154827, 154829],
        max_position_embeddings=202752,
    ),
    r"mimo-7b": _dense(
        QWEN2,
        "4096 36 32 8 11008",
        model_type="mimo",
        num_nextn_predict_layers=1,
        rope_theta=640000,
        vocab_size=151680,
    ),
    r"nemotron-mini-4b": {
        "model_type": "nemotron",
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000,
        "max_position_embeddings": 4096,
        "eos_token_id": 3,
        "tie_word_embeddings": False,
    },
    r"hy-?v?3": _dense(
        QWEN3,
        "4096 80 64 8 13312",
        model_type="hy_v3",
        head_dim=128,
        num_experts=192,
        num_experts_per_tok=8,
        num_shared_experts=1,
        moe_intermediate_size=1536,
        router_scaling_factor=2.826,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
        rope_theta=11158840,
        vocab_size=120832,
        max_position_embeddings=262144,
    ),
    r"minimax-m2": _dense(
        QWEN3,
        "3072 62 48 8 1536",
        model_type="minimax_m2",
        num_local_experts=256,
        num_experts_per_tok=8,
        rotary_dim=64,
        rope_theta=5e6,
        vocab_size=200064,
        eos_token_id=200020,
        max_position_embeddings=196608,
    ),
    r"gemma-(1\.1-)?2b": _dense(GEMMA, "2048 18 8 1 16384", tied=True),
    r"gemma-(1\.1-)?7b": _dense(GEMMA, "3072 28 16 16 24576", tied=True),
    r"gemma-2-2b": _dense(GEMMA2, "2304 26 8 4 9216", tied=True),
    r"gemma-2-9b": _dense(GEMMA2, "3584 42 16 8 14336", tied=True),
    r"gemma-2-27b": _dense(GEMMA2, "4608 46 32 16 36864", tied=True, head_dim=128, query_pre_attn_scalar=144),
    r"seed-oss-36b": _dense(
        LLAMA,
        "5120 64 80 8 27648",
        model_type="seed_oss",
        head_dim=128,
        vocab_size=155136,
        attention_bias=True,
        rope_theta=1e7,
        max_position_embeddings=524288,
    ),
    r"gpt-?oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    r"gpt-?oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    r"(deepseek-(v3|r1)|dsv3|deepseek-?671b)": _large(
        "7168 61 128 18432 2048 256 8",
        q_lora_rank=1536,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        vocab_size=129280,
        rope_scaling=YARN,
    ),
}
DELTA_SHAPES = {
    r"qwen3-next-80b": _dense(
        QWEN_DELTA,
        "2048 48 16 2 5120",
        model_type="qwen3_next",
        linear_num_value_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
    ),
    r"qwen3\.5-0\.8b": _qwen3_5("1024 24 8 2 3584", 16, tied=True),
    r"qwen3\.5-4b": _qwen3_5("2560 32 16 4 9216", 32, tied=True),
    r"qwen3\.5-9b": _qwen3_5("4096 32 16 4 12288", 32),
    r"qwen-?3\.?[56]-27b": _qwen3_5("5120 64 24 4 17408", 48),
    r"qwen-?3\.?[56]-122b-a10b": _qwen3_5(
        "3072 48 32 2 1024",
        64,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    r"qwen-?3\.?[56]-397b-a17b": _qwen3_5(
        "4096 60 32 2 1024",
        64,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    r"qwen-?3\.?[56]-35b-a3b": _qwen3_5(
        "2048 40 16 2 512",
        32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
"""Of families with gated delta nets, whose names begin as others do. Qwen3.6's shapes are Qwen3.5's."""
OTHERS = (
    r"(qwen3\.\d|qwen3-next|qwen2(\.5)?-vl|glm-5|"
    r"nemotron(?!-mini)|mimo-v2|minimax-(text|m1|m3|vl)|deepseek-v[24])"
)

LATER_NEMOTRONS = "nemotron_h"
"""The family of those that are not Nemotron-Mini."""


def shape_of(name: str) -> dict[str, Any] | None:
    """Of a model's folder or hub name; the family's name alone where its shape is not here; None for no known name."""
    *folders, lower = [part for part in name.lower().replace("_", "-").split("/") if part]
    delta = next((shape for pattern, shape in DELTA_SHAPES.items() if re.match(pattern, lower)), None)
    if delta:
        return delta
    other = re.search(OTHERS, lower)
    if other:
        family = re.sub(r"[-.]", "_", other[0])
        return {"model_type": LATER_NEMOTRONS if family == "nemotron" else family}
    own = next((shape for pattern, shape in SHAPES.items() if re.match(pattern, lower)), None)
    above = (shape for folder in reversed(folders) for pattern, shape in SHAPES.items() if re.search(pattern, folder))
    return own or next(above, None)


def write_stand_in(name: str, folder: Path, classifies: bool = False) -> Path | None:
    """A folder with the config.json of the named model; None for no known name."""
    shape = shape_of(name)
    if shape is None:
        return None
    if classifies:
        shape = {**shape, "num_labels": 1, "architectures": [f"{shape['model_type'].title()}ForSequenceClassification"]}
    target = folder / re.sub(r"\W+", "_", name)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(shape))
    return target
