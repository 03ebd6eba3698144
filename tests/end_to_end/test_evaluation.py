"""Evaluation sets in whole jobs: during training, and for a checkpoint alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import QUICKSTART, column, read_lines, succeed, torchrun, train

STEPS = 4


def sets_of(files: Path) -> str:
    data = f"{{path: {files}/eval.jsonl, max_rows: 12}}"
    sampled = f"{{name: sampled, data: {data}, sampling: {{temperature: 1.0}}, samples_per_prompt: 4}}"
    return (
        f"evaluation.sets=[{sampled}, {{name: short, data: {data}, sampling: {{max_response_tokens: 3}}, interval: 0}}]"
    )


@pytest.fixture(scope="module")
def trained(quickstart_files: Path, warmed_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (records, folder) of a run whose engine is a step ahead and gets weights in flight."""
    output = tmp_path_factory.mktemp("evaluation") / "run"
    records = train(
        QUICKSTART,
        *(f"model.path={warmed_up}", f"output_dir={output}", sets_of(quickstart_files), f"steps={STEPS}"),
        f"data={{train: {{path: {quickstart_files}/train.jsonl}}, max_prompt_tokens: 16}}",
        *("evaluation.interval=2", "evaluation.keep_best={metric: eval/sampled/pass@2}", "evaluation.stop_at=2"),
        *("placement={actor: 0, 'rollout, reward': 1}", "loss.kl.coef=0"),
        "actor={parallel: {tp: 1}, optimizer: {lr: 3e-3}}",
        *("schedule={mode: asynchronous, max_staleness: 1}", "batch={prompts_per_step: 4, samples_per_prompt: 4}"),
        num_ranks=2,
    )
    return records, output


def best_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "hf_best/best.json").read_text())


def test_sets_are_evaluated_beside_training_and_the_best_policy_is_kept(trained: Any) -> None:
    records, output = trained
    by_step = {record["step"]: record for record in records}
    assert [step for step, record in by_step.items() if "eval/sampled/pass@2" in record] == [0, 2, 4]
    assert [step for step, record in by_step.items() if "eval/short/score" in record] == [0, 4]
    assert column(records, "eval/sampled/policy_version") == [0, 2, 4], "each evaluation uses the weights of its step"
    assert set(column(records, "eval/short/response_length_mean")) == {3}
    assert max(column(records, "train/staleness_max")) == 1
    passed = {step: record["eval/sampled/pass@2"] for step, record in by_step.items() if step % 2 == 0}
    first_best = max(passed, key=lambda step: (passed[step], -step))
    assert best_of(output) == {"step": first_best, "metric": "eval/sampled/pass@2", "value": passed[first_best]}
    assert not (output / "hf_candidate").exists()
    shown = read_lines(output / "evaluation_samples/rank1.jsonl")
    assert len(shown) == 4 * 4 * 3 + 4 * 2, "of the first four prompts of each set"


def evaluate(files: Path, checkpoint: Path, output: Path, num_ranks: int) -> dict[str, Any]:
    """Runs launch/evaluate.py with the same config and returns its output."""
    script = ["launch/evaluate.py", "--checkpoint", str(checkpoint), "--output", str(output)]
    data = "data={train: {path: nowhere.jsonl}, max_prompt_tokens: 16}"
    done = succeed([*torchrun(num_ranks), *script, "--config", str(QUICKSTART), data, sets_of(files)], timeout_s=200)
    assert "pass@2" in done.stdout and str(output / "evaluation.json") in done.stdout
    written: dict[str, Any] = json.loads((output / "evaluation.json").read_text())
    return written


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.by_command_line), 2])
def test_a_checkpoint_alone_scores_what_it_scored_in_training_on_any_number_of_ranks(
    trained: Any, quickstart_files: Path, tmp_path: Path, num_ranks: int
) -> None:
    records, output = trained
    evaluated = evaluate(quickstart_files, output / "hf_best", tmp_path, num_ranks)
    assert evaluated["checkpoint"] == str(output / "hf_best")
    in_training = next(record for record in records if record["step"] == best_of(output)["step"])
    of_sampled = evaluated["sets"]["sampled"]
    assert "pass@4" in of_sampled
    for metric in of_sampled:
        assert of_sampled[metric] == pytest.approx(in_training[f"eval/sampled/{metric}"]), metric
    assert of_sampled["prompts"] == evaluated["sets"]["short"]["prompts"] == 12
    samples = [read_lines(path) for path in (tmp_path / "evaluation_samples").glob("rank*.jsonl")]
    assert len(samples) == num_ranks and sum(map(len, samples)) == 12 * 4 + 12, "all of them, of all ranks"
