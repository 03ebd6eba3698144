"""A whole job with weighted prompts of two sources, from easy to hard."""

import json
from pathlib import Path

import pytest

from tests.support.jobs import QUICKSTART, column, read_lines, train


@pytest.mark.slow
def test_a_job_on_two_sources(quickstart_files: Path, warmed_up: Path, tmp_path: Path) -> None:
    """Checks the run's reports about both sources, and the sources recorded with its samples."""
    rows = read_lines(quickstart_files / "train.jsonl")[:64]
    easy = tmp_path / "easy.jsonl"
    easy.write_text("".join(json.dumps(row | {"level": number}) + "\n" for number, row in enumerate(rows)))
    hard = f"{easy}@[32:64]"
    records = train(
        QUICKSTART,
        f"model.path={warmed_up}",
        f"output_dir={tmp_path / 'run'}",
        f"data.train={{sources: [{{path: {easy}, weight: 3}}, {{path: '{hard}', weight: 1, name: hard}}]}}",
        *("data.eval=null", "data.curriculum={key: level, steps: 4}", "data.shuffle=false"),
        *("placement={actor: 0, 'rollout, reward': 1}", "actor.parallel.tp=1", "loss.kl.coef=0"),
        "batch={prompts_per_step: 8, samples_per_prompt: 2, mini_batches: 1}",
        *("logging.samples=16", "steps=2"),
        num_ranks=2,
    )
    assert column(records, "rollout/share/easy") == [0.75, 0.75]
    means = zip(column(records, "rollout/reward_mean/easy"), column(records, "rollout/reward_mean/hard"), strict=True)
    assert column(records, "rollout/reward_mean") == pytest.approx([0.75 * one + 0.25 * other for one, other in means])
    samples = [sample for sample in read_lines(tmp_path / "run/samples.jsonl") if sample["step"] == 0]
    for source, taken in (("easy", rows[:6]), ("hard", rows[32:34])):  # the easiest first
        prompts = [sample["prompt"] for sample in samples if sample["source"] == source]
        assert prompts == [row["prompt"] for row in taken for _ in range(2)]
