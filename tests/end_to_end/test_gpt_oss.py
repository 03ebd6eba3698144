"""A tiny gpt-oss learns by supervised steps and continues with GRPO, with its experts divided among ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.test_experts import loss_of_transformers
from tests.support.jobs import REPOSITORY, column, train

SUPERVISED, BY_GRPO, ROWS = 12, 3, 32
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
TEXTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def make_model(folder: Path, warmed_up: Path) -> Path:
    """Makes a model with the quickstart's tokenizer and the width of its model."""
    import transformers

    sizes = json.loads((warmed_up / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id")
    config = transformers.GptOssConfig(
        **{name: sizes[name] for name in names},
        num_hidden_layers=2,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=128,
        rope_parameters={**YARN, "truncate": False, "original_max_position_embeddings": 32},
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    for file in TEXTS:
        shutil.copy(warmed_up / file, folder)
    return folder


@pytest.mark.slow
def test_it_learns_and_the_engine_draws_from_what_was_learned(
    warmed_up: Path, quickstart_files: Path, data_overrides: list[str], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", warmed_up)
    records = train(
        REPOSITORY / "configs/quickstart_moe_sft.yaml",
        *(f"model.path={model}", f"output_dir={tmp_path / 'sft'}", f"steps={SUPERVISED}"),
        *(data_overrides[0], f"data.train.max_rows={ROWS}", f"batch.prompts_per_step={ROWS}"),
        *("actor.optimizer.warmup_steps=2", "placement.actor=0-1", "actor.parallel={tp: 1, ep: 2}"),
        num_ranks=2,
    )
    losses = column(records, "train/loss")
    assert losses[-1] < 0.9 * losses[0]
    learned = tmp_path / "sft/hf"
    assert loss_of_transformers(learned, quickstart_files / "train.jsonl") < losses[-1]

    records = train(
        REPOSITORY / "configs/quickstart_moe.yaml",
        *(f"model.path={learned}", f"output_dir={tmp_path / 'grpo'}", *data_overrides, "data.eval=null"),
        "model.moe.aux_loss_coef=0.1",  # makes weights change for any rewards
        *("model.router_replay=rollout", f"steps={BY_GRPO}"),
        "batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 2}",
    )
    assert len(column(records, "train/grad_norm")) == BY_GRPO and min(column(records, "train/grad_norm")) > 1e-3
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
