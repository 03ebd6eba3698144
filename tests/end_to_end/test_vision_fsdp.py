"""A whole job with images trains a model sharded over two ranks."""

from pathlib import Path

import pytest
import torch

from tests.support.counting_images import grpo, write_config, write_rows
from tests.support.jobs import column, read_records, train
from tests.support.vision_checkpoints import load_model, write_checkpoint

STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a finished job, out/, and of its model/."""
    folder = tmp_path_factory.mktemp("counting")
    write_checkpoint(folder / "model", "qwen3_vl")
    for number, name in enumerate(("train", "eval")):
        write_rows(folder, name, 16, seed=number)
    config = grpo(folder / "model", folder / "train.jsonl", folder / "eval.jsonl", STEPS)
    config["actor"]["backend"] = "fsdp"
    (folder / "reward.py").write_text("def parity(args, sample):\n    return float(sum(sample.tokens) % 2)\n")
    config["reward"] = {"function": f"{folder / 'reward.py'}:parity"}
    config["placement"] = {"actor, reference, rollout, reward": "all"}
    config["batch"] = {"prompts_per_step": 8, "samples_per_prompt": 4, "mini_batches": 2}
    train(write_config(folder / "grpo.yaml", **config), f"output_dir={folder / 'out'}", num_ranks=2)
    return folder


def test_engine_and_actor_agree_on_images_after_every_sync(folder: Path) -> None:
    differences = column(read_records(folder / "out"), "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-4


def test_the_exported_tower_is_the_trained_one(folder: Path) -> None:
    before, after = (dict(load_model(folder / name).named_parameters()) for name in ("model", "out/hf"))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {"model.visual.patch_embed.proj.weight", "model.visual.merger.linear_fc2.weight"} <= changed
