"""Whole jobs with images on one rank: a tiny model learns to count red squares, by demonstrations and rewards."""

from pathlib import Path

from tests.support.counting_images import SFT_STEPS, grpo, write_config
from tests.support.jobs import column, read_lines, read_records, train

GRPO_STEPS = 4


def test_demonstrations_with_images_lower_the_held_out_loss(counting: Path) -> None:
    records = read_records(counting / "sft")
    losses = column(records, "eval/loss")
    assert losses[-1] < losses[0] / 2
    assert column(records, "images/tokens") == [32 * 16.0] * SFT_STEPS
    assert sum(column(records, "images/decoded")) == SFT_STEPS * 32 + 40


def test_engine_and_actor_agree_on_images_after_every_sync(counting: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "grpo.yaml", **grpo(counting, GRPO_STEPS))
    records = train(config, f"output_dir={tmp_path}", num_ranks=1)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == GRPO_STEPS and max(differences) <= 1e-4
    assert column(records, "images/tokens") == [32 * 8 * 16.0] * GRPO_STEPS
    assert column(records, "images/distinct") == [32.0] * GRPO_STEPS
    assert sum(column(records, "images/decoded")) == GRPO_STEPS * 32 + 40, "once for a group of samples"
    assert not any(column(records, "images/bytes_sent"))
    assert len(column(records, "eval/score")) == 2
    assert all("<image>" in sample["prompt"] for sample in read_lines(tmp_path / "samples.jsonl"))
