"""The recipes for models with experts fit the GPUs that they name, by the shapes of the published config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from rltrain.config.loader import load_config
from rltrain.dry_run.description import describe_job
from rltrain.dry_run.options import DryRunOptions
from rltrain.legality.doubts import doubts_about_models
from rltrain.models import read_architecture

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 151645,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("recipe", "world_size", "model", "stages"),
    [
        ("qwen3_30b_a3b", 8, QWEN3_30B_A3B, None),
        ("qwen3_30b_a3b_4_nodes", 32, QWEN3_30B_A3B, None),
        ("deepseek_v3", 512, DEEPSEEK_V3, "layers of the stages: 7, 8, 8, 8, 8, 8, 8, 6"),
    ],
)
def test_it_fits_and_its_step_is_foretold(
    recipe: str, world_size: int, model: dict[str, Any], stages: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    options = DryRunOptions(world_size, 8)  # refused where it does not fit an H100
    text = describe_job(CONFIGS / f"{recipe}.yaml", [f"model.path={tmp_path}"], options)
    assert "Bytes, foretold for h100" in text and "a step: " in text
    assert stages is None or stages in text
    assert "Warnings" not in text


def test_experts_that_are_trained_without_the_engines_choice_are_doubted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    architectures, path = {"actor": read_architecture(tmp_path)}, f"model.path={tmp_path}"

    def doubts(*settings: str) -> list[str]:
        config = load_config(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off", *settings])
        return [*doubts_about_models(config, architectures)]

    (doubt,) = doubts()
    assert doubt.startswith("model.router_replay: got off with experts and model.dtype bfloat16")
    assert doubt.endswith(
        "expected rollout: the actor's tokens visit the experts that the engine chose, for 384 bytes a token"
    )
    (doubt,) = doubts("model.dtype=float32", "rollout.dtype=fp8")
    assert "with experts and rollout.dtype fp8" in doubt
    for beyond_doubt in ("model.dtype=float32", "actor.backend=fsdp", "model.router_replay=recompute"):
        assert doubts(beyond_doubt) == []
    options = DryRunOptions(8, 8)
    assert doubts()[0] in describe_job(CONFIGS / "qwen3_30b_a3b.yaml", [path, "model.router_replay=off"], options)
