"""Whole jobs that evaluate with their own engines during training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.test_resume import SAVED, STEPS, saved_and_resumed  # noqa: F401
from tests.support.jobs import QUICKSTART, REPOSITORY, Run, read_records, train, try_to_train
from tests.support.waiting_reward import RUN, STEP

WAITING = f"{{function: '{REPOSITORY}/tests/support/waiting_reward.py:once_trained', num_workers: 1}}"
HELD_UP_UNTIL = 4


def by_step(output: Path) -> dict[int, dict[str, Any]]:
    """Returns the reports of each step, merged from its records."""
    records: dict[int, dict[str, Any]] = {}
    for record in read_records(output):
        records.setdefault(record["step"], {}).update(record)
    return records


def settings(files: Path, warmed_up: Path, output: Path) -> tuple[str, ...]:
    data = f"{{path: {files}/eval.jsonl, max_rows: 3}}"
    return (
        *(f"model.path={warmed_up}", f"output_dir={output}", "checkpoint.save_hf=false", "loss.kl.coef=0"),
        f"data={{train: {{path: {files}/train.jsonl}}, max_prompt_tokens: 16}}",
        f"evaluation={{interval: 2, sets: [{{name: held, data: {data}, reward: {WAITING}}}]}}",
        *("evaluation.keep_best={metric: eval/held/score}", "evaluation.stop_at=0.5"),
        "placement={actor: 0, 'rollout, reward': 1, evaluation: 2}",
        *("actor={parallel: {tp: 1}, optimizer: {lr: 3e-3}}", "schedule={mode: asynchronous, max_staleness: 1}"),
        "batch={prompts_per_step: 4, samples_per_prompt: 4}",
    )


def test_an_evaluation_holds_up_neither_training_nor_generation(
    quickstart_files: Path, warmed_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of the first evaluation come only after a later step is trained. Another evaluation is due in between.

    So a role that waited for the scores would wait forever. The scores end the run, and the scored policy is kept.
    """
    output = tmp_path / "run"
    monkeypatch.setenv(RUN, str(output))
    monkeypatch.setenv(STEP, str(HELD_UP_UNTIL))
    train(QUICKSTART, *settings(quickstart_files, warmed_up, output), "steps=300", num_ranks=3, timeout_s=120)
    records = by_step(output)
    evaluated = {step: record for step, record in records.items() if "eval/held/score" in record}
    assert HELD_UP_UNTIL <= max(records) < 299, "the run ends early, but not before the first score"
    assert [*evaluated][:2] == [0, 2]
    assert all(record["eval/held/policy_version"] == step for step, record in evaluated.items())
    best = json.loads((output / "hf_best/best.json").read_text())
    assert best == {"step": 0, "metric": "eval/held/score", "value": 1.0}
    kept, start = load_file(output / "hf_best/model.safetensors"), load_file(warmed_up / "model.safetensors")
    assert kept.keys() == start.keys()
    assert all(torch.equal(kept[name], start[name]) for name in kept)


@pytest.mark.slow
def test_an_evaluation_that_hangs_is_named_once_nobody_gets_on(
    quickstart_files: Path, warmed_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN, str(tmp_path))
    monkeypatch.setenv(STEP, "1000000")
    done = try_to_train(
        QUICKSTART, *settings(quickstart_files, warmed_up, tmp_path), "steps=3", "timeouts.no_progress_s=4", num_ranks=3
    )
    assert done.returncode != 0
    assert "rank 2 is at run_evaluation[0] (evaluation) and has shown no progress" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
def test_a_run_that_goes_on_has_evaluated_what_was_due_before(
    saved_and_resumed: Callable[..., list[Run]],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The engines have two ranks and another TP than the rollout. Their evaluation gives the same scores."""
    settings = ("loss.kl.coef=0", "actor={parallel: {tp: 1}, optimizer: {lr: 1e-3}}", "data.eval.max_rows=64")
    settings = (*settings, "evaluation.interval=1", "evaluation.keep_best={metric: eval/score}")
    apart = ("placement={actor: 0, 'rollout, reward': 1, evaluation: 2-3}", "evaluation.parallel={tp: 2}")
    (whole, _), (resumed, _) = saved_and_resumed("configs/quickstart.yaml", (*settings, *apart), ())
    scores = {step: metrics["eval/score"] for step, metrics in whole.items()}
    assert [*scores] == [*range(STEPS + 1)] and len(set(scores.values())) > 1
    assert {step: metrics["eval/score"] for step, metrics in resumed.items()} == {
        step: scores[step] for step in range(SAVED, STEPS + 1)
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = [tmp_path / run / "hf_best/best.json" for run in ("first", "0")]
    assert json.loads(kept[0].read_text())["step"] == best
    assert kept[1].exists() == (best >= SAVED), "the checkpoint has the best value so far"
