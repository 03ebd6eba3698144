"""Whole jobs with images on one rank: a tiny model learns to count red squares, by demonstrations and rewards."""

import json
from pathlib import Path

import pytest

from tests.support.counting_images import grpo, sft, write_config, write_rows
from tests.support.jobs import column, read_records, train
from tests.support.vision_checkpoints import write_checkpoint

SFT_STEPS, GRPO_STEPS = 6, 4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with model/, train.jsonl and eval.jsonl."""
    folder = tmp_path_factory.mktemp("counting")
    write_checkpoint(folder / "model", "qwen2_5_vl")
    write_rows(folder, "train", 256, seed=0)
    write_rows(folder, "eval", 40, seed=1)
    return folder


@pytest.fixture(scope="module")
def shown(task: Path) -> Path:
    """Returns the folder of a job that has learnt from demonstrations."""
    config = sft(task / "model", task / "train.jsonl", task / "eval.jsonl", SFT_STEPS)
    train(write_config(task / "sft.yaml", **config), f"output_dir={task / 'sft'}", num_ranks=1)
    return task / "sft"


def test_demonstrations_with_images_lower_the_held_out_loss(shown: Path) -> None:
    records = read_records(shown)
    losses = column(records, "eval/loss")
    assert losses[-1] < losses[0] / 2
    assert column(records, "images/tokens") == [32 * 16.0] * SFT_STEPS
    assert sum(column(records, "images/decoded")) == 6 * 32 + 40


def test_engine_and_actor_agree_on_images_after_every_sync(task: Path, shown: Path) -> None:
    config = grpo(shown / "hf", task / "train.jsonl", task / "eval.jsonl", GRPO_STEPS)
    records = train(write_config(task / "grpo.yaml", **config), f"output_dir={task / 'grpo'}", num_ranks=1)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == GRPO_STEPS and max(differences) <= 1e-4
    assert column(records, "images/tokens") == [32 * 8 * 16.0] * GRPO_STEPS
    assert column(records, "images/distinct") == [32.0] * GRPO_STEPS
    assert sum(column(records, "images/decoded")) == 4 * 32 + 40, "once for a group of samples"
    assert column(records, "images/bytes_sent") == [0.0] * (GRPO_STEPS + 1)
    assert len(column(records, "eval/score")) == 2
    samples = [json.loads(line) for line in (task / "grpo/samples.jsonl").read_text().splitlines()]
    assert all("<image>" in sample["prompt"] for sample in samples)
