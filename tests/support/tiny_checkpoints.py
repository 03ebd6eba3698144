"""Tiny checkpoints of every model family, made by transformers, with samples and transformers' results for them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB_SIZE = 131
TEMPERATURE = 0.8
ENTROPY_COEF = 0.01
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.25,
}
"""Its original positions are fewer than the tokens of samples."""
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
}
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
    ),
}
DELTA: dict[str, Any] = {
    "tie_word_embeddings": False,
    "head_dim": 24,
    "full_attention_interval": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",  # only eager attention soft-caps its scores
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_implementation": "eager"},
    ),
    "gpt2": ("GPT2", {"n_inner": 96}),
    "granite": ("Granite", {"logits_scaling": 0.5, "tie_word_embeddings": False}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}),
    "phi": ("Phi", {"tie_word_embeddings": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", {"head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": DYNAMIC}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": SHORT_YARN}),
    "qwen3_window": (
        "Qwen3",
        {**WINDOW, "head_dim": 24, "attention_bias": True, "max_window_layers": 1, "rope_parameters": LINEAR},
    ),
    "qwen2_moe_window": (
        "Qwen2Moe",
        {
            **WINDOW,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "rope_parameters": SHORT_YARN,
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", DELTA),
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
"""Models whose numbers backend fsdp must reproduce. Most belong to families without a table."""
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def make_checkpoints(folder: Path, names: Iterable[str] = CHECKPOINTS, **shape: float) -> dict[str, str]:
    """Writes checkpoints and returns their folders by name, with experience.safetensors and expected.safetensors in
    each.

    The pad token is the most frequent token of the samples.
    """
    return {name: str(_make(folder / name, *_settings(name, shape))) for name in names}


def _settings(name: str, shape: dict[str, int]) -> tuple[str, dict[str, Any]]:
    family, settings = (CHECKPOINTS | WITH_EXPERTS | OF_TRANSFORMERS)[name]
    pad = {"pad_token_id": int(_experience()["tokens"].mode().values)}
    return family, (TOKENS if name in OF_TRANSFORMERS else {}) | pad | settings | shape


def _make(path: Path, family: str, settings: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norm weights and biases begin as ones and zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.get_input_embeddings().weight[config.pad_token_id].normal_(std=SHAPE["initializer_range"])  # was zero
    model.save_pretrained(path)
    columns = _experience()
    save_file(columns, path / "experience.safetensors")
    save_file(_expected(model, columns), path / "expected.safetensors")
    return path


def _experience() -> dict[str, Tensor]:
    """Returns 12 samples of 5 to 47 tokens. The first third of each is its prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 48, (12,), generator=generator)
    num_tokens = int(lengths.sum())
    within = torch.cat([torch.arange(int(n)) for n in lengths])
    return {
        "group_ids": torch.arange(12) // 2,
        "prompt_ids": torch.arange(12) // 2,
        "lengths": lengths,
        "truncated": torch.zeros(12, dtype=torch.bool),
        "tokens": torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator),
        "response_mask": within >= lengths.repeat_interleave(lengths) // 3,
        "policy_version": torch.zeros(num_tokens, dtype=torch.int32),
        "rollout_logprobs": torch.zeros(num_tokens),
        "turns": torch.ones(len(lengths), dtype=torch.int32),
        "turn_rewards": torch.zeros(num_tokens),
    }


def _expected(model: Any, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns logits, tempered log-probs, and loss and gradient norm of cases_training.negative_log_likelihood.

    The pad token is learned like any other token.
    """
    model.get_input_embeddings().padding_idx = None
    lengths, mask = columns["lengths"].tolist(), columns["response_mask"].float()
    logits, logprobs, entropies = [], [], []
    for tokens in columns["tokens"].split(lengths):
        sample = model(tokens[None]).logits[0]
        logits.append(sample)
        log_softmax = (sample[:-1] / TEMPERATURE).log_softmax(-1)
        logprobs += [torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(log_softmax.exp() * log_softmax).sum(-1)]
    loss = -((torch.cat(logprobs) + ENTROPY_COEF * torch.cat(entropies)) * mask).sum() / mask.sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    results = {
        "logits": torch.cat(logits),
        "logprobs": torch.cat(logprobs),
        "loss": loss,
        "grad_norm": torch.cat([gradient.flatten() for gradient in gradients]).norm(),
    }
    return {name: value.detach().contiguous() for name, value in results.items()}
