"""Settings of memory that an import chooses for a GPU: they fit, say so, and leave what is computed as it was."""

import json
from pathlib import Path

import pytest

from rltrain.errors import ConfigError
from rltrain.import_config.command import imported, peak_bytes
from rltrain.import_config.translation import Translation
from rltrain.planning.hardware import gpu_named

COMMAND = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2
 --hf-checkpoint MODEL --prompt-data /data/a.jsonl --input-key prompt --label-key label --rm-type math --num-rollout 9
 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-max-prompt-len 1024
 --attention-dropout 0.0 --hidden-dropout 0.0 --tensor-model-parallel-size 2 --use-dynamic-batch-size
 --max-tokens-per-gpu 32768 --sglang-mem-fraction-static 0.7"""
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
}
OF_MEMORY = {
    "model.recompute",
    "model.logits_chunk_tokens",
    "model.activation_offload",
    "actor.micro_batch_tokens",
    "actor.optimizer.cpu_offload",
    "rollout.sglang.args",
}


def found_of(model: Path, gpu: str | None = None) -> Translation:
    return imported("slime", [COMMAND.replace("MODEL", str(model)).replace("\n", " ")], gpu=gpu)


def test_an_import_fits_by_settings_of_memory_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    gpu = gpu_named("h100")
    plain, fitted = found_of(tmp_path, "none"), found_of(tmp_path, "h100")
    before, after = peak_bytes(plain, {}, gpu), peak_bytes(fitted, {}, gpu)
    assert before is not None and after is not None and after <= gpu.usable_bytes < before
    changed = {path for path in fitted.settings if fitted.settings[path] != plain.settings.get(path)}
    assert changed and changed <= OF_MEMORY
    assert all("--gpu h100: of memory alone" in fitted.settings[path].origin for path in changed)
    roomy = found_of(tmp_path, "b200")
    assert roomy.settings == plain.settings, "what fits stays as it is"
    assert found_of(tmp_path).settings == fitted.settings, "where no GPU is named, an H100"


def test_without_the_models_shape_nothing_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match="/models/m has no config.json at hand"):
        found_of(Path("/models/m"), "h100")
    assert any("memory is as the source has it" in note for note in found_of(Path("/models/m")).notes)


def test_experts_are_dealt_out_over_more_ranks_where_nothing_else_helps(tmp_path: Path) -> None:
    of_experts = {"model_type": "qwen3_moe", "num_experts": 256, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 12288, "norm_topk_prob": True, "mlp_only_layers": []}
    shape = SHAPE | of_experts | sizes
    (tmp_path / "config.json").write_text(json.dumps(shape))
    text = COMMAND.replace("--actor-num-nodes 1", "--actor-num-nodes 4").replace("engine 2", "engine 16")
    text = text.replace("MODEL", f"{tmp_path} --expert-model-parallel-size 4").replace("\n", " ")
    fitted = imported("slime", [text])
    assert fitted.get("actor.parallel.ep") > 4
    held = peak_bytes(fitted, {}, gpu_named("h100"))
    assert held is not None and held <= gpu_named("h100").usable_bytes
