"""A model with experts learns by GRPO: experts dealt out to the actor's replicas and to an engine's ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.jobs import REPOSITORY, column, train

NUM_EXPERTS = 4
STEPS = 24


@pytest.fixture(scope="module")
def upcycled(warmed_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up checkpoint with its MLP as each of four experts, of which any two are it: it draws as before."""
    folder = tmp_path_factory.mktemp("upcycled")
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(warmed_up / file, folder)
    config = json.loads((warmed_up / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {}
    for name, tensor in load_file(warmed_up / "model.safetensors").items():
        layer, is_mlp, matrix = name.partition(".mlp.")
        if not is_mlp:
            tensors[name] = tensor
            continue
        tensors |= {f"{layer}.mlp.experts.{expert}.{matrix}": tensor.clone() for expert in range(NUM_EXPERTS)}
        tensors[f"{layer}.mlp.gate.weight"] = 0.02 * torch.randn(NUM_EXPERTS, config["hidden_size"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_it_learns_and_engine_and_actor_agree(upcycled: Path, data_overrides: list[str], tmp_path: Path) -> None:
    records = train(
        REPOSITORY / "configs/quickstart_moe.yaml",
        f"model.path={upcycled}",
        f"output_dir={tmp_path}",
        f"steps={STEPS}",
        f"evaluation.interval={STEPS}",
        *data_overrides,
    )
    scores, rewards = column(records, "eval/score"), column(records, "rollout/reward_mean")
    assert scores[-1] > scores[0] + 0.1
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    assert min(column(records, "train/moe_idle_experts")) == 0
