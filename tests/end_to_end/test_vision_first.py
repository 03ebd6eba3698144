"""Whole jobs with images on one rank: a tiny model learns to count red squares, by demonstrations and rewards."""

from pathlib import Path

import pytest

from tests.support.counting_images import GRPO, IMAGE_TOKENS, NUM_EVAL, grpo_overrides
from tests.support.jobs import column, read_lines, read_records, train

FEW = ("steps=2", "batch={prompts_per_step: 16, samples_per_prompt: 4, mini_batches: 1}", "data.eval.max_rows=20")


def test_demonstrations_with_images_lower_the_held_out_loss(counting: Path) -> None:
    records = read_records(counting / "sft")
    losses, of_steps = column(records, "eval/loss"), column(records, "images/tokens")
    assert losses[-1] < losses[0] / 2
    assert {*of_steps} == {32.0 * IMAGE_TOKENS}
    assert sum(column(records, "images/decoded")) == 32 * len(of_steps) + NUM_EVAL


def test_engine_and_actor_agree_on_images_after_every_sync(counting: Path, tmp_path: Path) -> None:
    records = train(GRPO, *grpo_overrides(counting), *FEW, f"output_dir={tmp_path}", num_ranks=1)
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == 2 and max(differences) <= 1e-4
    assert column(records, "images/tokens") == [16.0 * 4 * IMAGE_TOKENS] * 2
    assert column(records, "images/distinct") == [16.0] * 2
    assert sum(column(records, "images/decoded")) == 2 * 16 + 20, "once for a group of samples"
    assert not any(column(records, "images/bytes_sent"))
    assert len(column(records, "eval/score")) == 2
    assert all("<image>" in sample["prompt"] for sample in read_lines(tmp_path / "samples.jsonl"))


@pytest.mark.slow
def test_rewards_teach_a_model_to_count(counting: Path, tmp_path: Path) -> None:
    records = train(GRPO, *grpo_overrides(counting), f"output_dir={tmp_path}", num_ranks=1)
    scores = column(records, "eval/score")
    assert scores[0] <= 0.45 and scores[-1] >= 0.9
