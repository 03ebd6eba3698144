"""Makes a tiny checkpoint of every model family and variant with transformers, with tokens and expected logits."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import DYNAMIC, LINEAR, LLAMA3_ROPE, SHAPE, SHORT_YARN, VOCAB_SIZE, WINDOW

CONFIGS = {"Gemma3": "Gemma3Text", "Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}
"""Names of the config classes of language models, if they differ from the model's name."""
LENGTHS = (5, 31, 12, 22, 40, 9)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
}
YARN_ALONE = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LONG_HEAD_DIM = 16
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [5.0] * 6,
    "original_max_position_embeddings": 256,
}
GEMMA: dict[str, Any] = {
    **NO_TOKENS,
    "tie_word_embeddings": True,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
LINEAR_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GLM: dict[str, Any] = {
    **EXPERTS,
    **NO_TOKENS,
    "tie_word_embeddings": False,
    "head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
DELTA: dict[str, Any] = {
    **NO_TOKENS,
    "tie_word_embeddings": False,
    "head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_rope_scaling_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_attention_bias": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama_attention_bias_tied": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 24}),
    "mistral_tied": ("Mistral", {"tie_word_embeddings": True, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_experts": 8,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_tied": (
        "Qwen3Moe",
        {**EXPERTS, "tie_word_embeddings": True, "head_dim": 16, "num_experts": 4, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_tied": ("Mixtral", {"tie_word_embeddings": True, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT,
            "tie_word_embeddings": False,
            "rope_parameters": YARN,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3_tied": ("DeepseekV3", {**LATENT, "tie_word_embeddings": True}),
    "moonlight": ("DeepseekV3", {**LATENT, "tie_word_embeddings": False, "q_lora_rank": None, "rms_norm_eps": 1e-2}),
}
OTHER_DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_window": ("Mistral", {"tie_word_embeddings": False, "sliding_window": 7, "head_dim": 16}),
    "phi3": ("Phi3", {"tie_word_embeddings": False, **NO_TOKENS}),
    "phi4_mini": (
        "Phi3",
        {
            **NO_TOKENS,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "rope_parameters": LONG_ROPE,
            "sliding_window": 23,
        },
    ),
    "glm4": (
        "Glm4",
        {"tie_word_embeddings": False, "head_dim": 24, "attention_bias": True, **NO_TOKENS, "eos_token_id": 2},
    ),
    "seed_oss": ("SeedOss", {**NO_TOKENS, "tie_word_embeddings": False, "head_dim": 24, "attention_out_bias": True}),
    "gemma": ("Gemma", {**NO_TOKENS, "tie_word_embeddings": True, "head_dim": 24}),
    "gemma2": (
        "Gemma2",
        {
            **NO_TOKENS,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 5,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.4,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3_linear": ("Gemma3", {**GEMMA, "tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "nemotron": ("Nemotron", {**NO_TOKENS, "tie_word_embeddings": False, "head_dim": 24}),
}
"""Dense models with other windows, rotary embeddings, activations and biases, and with norms after attention and
MLPs."""
DENSE |= OTHER_DENSE
SPARSE |= {
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "tie_word_embeddings": False,
            "num_experts": 8,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [2],
        },
    ),
    "glm4_moe": ("Glm4Moe", {**GLM, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_air": ("Glm4Moe", {**GLM, "attention_bias": True, "n_group": 4, "topk_group": 1}),
}
SPARSE |= {
    "hy_v3": (
        "HYV3",
        {
            **EXPERTS,
            **NO_TOKENS,
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_experts": 8,
            "router_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, **NO_TOKENS, "tie_word_embeddings": False}),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **NO_TOKENS,
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 12,
            # transformers before 5.18 reads only this key. Published checkpoints have the key above and rotate half.
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**DELTA, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**DELTA, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "gpt_oss": (
        "GptOss",
        {
            **NO_TOKENS,
            "head_dim": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {**YARN_ALONE, "truncate": False},
        },
    ),
}
WITH_BIASES = "llama_biases"
OTHER_DENSE |= {
    WITH_BIASES: (
        "Llama",
        {
            **NO_TOKENS,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LINEAR,
        },
    ),
}
DENSE |= OTHER_DENSE
DENSE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mlp_bias_dynamic": (
        "Llama",
        {**NO_TOKENS, "tie_word_embeddings": True, "mlp_bias": True, "rope_parameters": DYNAMIC},
    ),
    "qwen2_yarn": ("Qwen2", {**NO_TOKENS, "tie_word_embeddings": False, "rope_parameters": SHORT_YARN}),
    "qwen2_window": (
        "Qwen2",
        {
            **NO_TOKENS,
            **WINDOW,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {**SHORT_YARN, "attention_factor": 1.4, "truncate": False},
        },
    ),
    "qwen3_window_bias": (
        "Qwen3",
        {
            **NO_TOKENS,
            **WINDOW,
            "tie_word_embeddings": False,
            "head_dim": 24,
            "attention_bias": True,
            "max_window_layers": 1,
            "rope_parameters": LINEAR,
        },
    ),
}
SPARSE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe_window_yarn": (
        "Qwen2Moe",
        {
            **SPARSE["qwen2_moe"][1],
            **NO_TOKENS,
            **WINDOW,
            "max_window_layers": 3,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "qwen3_moe_yarn_bias": (
        "Qwen3Moe",
        {**SPARSE["qwen3_moe"][1], **NO_TOKENS, "attention_bias": True, "rope_parameters": SHORT_YARN},
    ),
    "qwen3_moe_window": ("Qwen3Moe", {**SPARSE["qwen3_moe_tied"][1], **NO_TOKENS, **WINDOW, "rope_parameters": LINEAR}),
    "mixtral_yarn": (
        "Mixtral",
        {**SPARSE["mixtral"][1], **NO_TOKENS, "head_dim": 24, "rope_parameters": SHORT_YARN},
    ),
    "deepseek_v3_linear": ("DeepseekV3", {**SPARSE["deepseek_v3_tied"][1], "rope_parameters": LINEAR}),
}
VARIANTS = DENSE_VARIANTS | SPARSE_VARIANTS
"""Variants with features that other checkpoints cover too, for the slow tests."""
CHECKPOINTS = DENSE | SPARSE | VARIANTS
QUICK_DENSE = ("llama", "llama_rope_scaling_tied", "llama_biases", "qwen3_tied", "phi4_mini", "gemma3", "qwen3_5")
QUICK_SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "glm4_moe", "gpt_oss", "qwen3_next")
"""Checkpoints of the default suite if a test does not run all families. Every kind of layer is among them."""


def tiny_config(name: str, sizes: dict[str, Any], **changes: Any) -> Any:
    """Returns transformers' config of one of CHECKPOINTS. Its settings override `sizes`."""
    import transformers

    family, settings = CHECKPOINTS[name]
    wanted = {**sizes, **settings, **changes}
    if "layer_types" in wanted:
        wanted["num_hidden_layers"] = len(wanted["layer_types"])
    if "short_factor" in wanted.get("rope_parameters", {}):  # the factors need heads of this size
        heads = wanted["hidden_size"] // LONG_HEAD_DIM
        wanted |= {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2)}
    return getattr(transformers, f"{CONFIGS.get(family, family)}Config")(**wanted)


def make_family_checkpoint(name: str, path: Path) -> Path:
    """Writes a checkpoint to the folder `path` and returns the folder.

    Also writes expected.safetensors: `tokens` and `logits`, shape [tokens, vocabulary].
    """
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, SHAPE), dtype=torch.float32).eval()
    _randomize_vectors(model)
    model.save_pretrained(path)
    tokens = torch.randint(VOCAB_SIZE, (sum(LENGTHS),))
    with torch.no_grad():
        logits = torch.cat([model(sample[None]).logits[0] for sample in tokens.split(LENGTHS)])
    save_file({"tokens": tokens, "logits": logits}, path / "expected.safetensors")
    return path


def write_gradients(path: Path, response_mask: Tensor, model: Any | None = None, gradients: Path | None = None) -> None:
    """Writes gradients of the mean negative log-likelihood of response tokens as a checkpoint, computed by
    transformers.

    The model is `model`, or the checkpoint in `path`. The output folder is `gradients`, by default `path`/gradients.
    """
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = model or load(path, dtype=torch.float32, attn_implementation="eager")
    tokens = load_file(path / "expected.safetensors")["tokens"]
    loss = torch.zeros(())
    for sample, mask in zip(tokens.split(LENGTHS), response_mask.split(LENGTHS), strict=True):
        loss = loss - model_logprobs(model, sample)[mask].sum()
    (loss / response_mask.sum()).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(gradients or path / "gradients")


def model_logprobs(model: torch.nn.Module, sample: Tensor) -> Tensor:
    """Returns the log-probs of transformers' model, shape [tokens]. The first one is 0."""
    logprobs = model(sample[None]).logits[0, :-1].log_softmax(-1)
    return torch.nn.functional.pad(logprobs.gather(1, sample[1:, None])[:, 0], (1, 0))


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Gives norms and biases random values. Ones and zeros would hide unused vectors."""
    vectors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, vector in vectors:
        if (vector.dim() == 1 and not name.endswith("inv_freq")) or name.endswith("_bias"):
            vector.data.add_(0.3 * torch.randn_like(vector))
    remember(model)


@torch.no_grad()
def remember(model: torch.nn.Module) -> None:
    """Makes the heads of gated delta nets keep their states for one to a hundred tokens. With transformers'
    initialization most heads forget at once."""
    for name, vector in model.named_parameters():
        if name.endswith(".A_log"):
            vector.copy_(torch.empty_like(vector).uniform_(-5, 0))
