"""A job whose reward is the sum of functions of several forms, with columns of the prompt file."""

import json
from pathlib import Path
from typing import Any

import pytest

from rltrain.observability.names import documented
from tests.end_to_end.test_refusals import refusal
from tests.support.jobs import QUICKSTART, column, read_lines, train

FUNCTIONS = """\
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "additions" and extra_info["digits"] == 3
    return {"score": len(solution_str), "digits": sum(c.isdigit() for c in solution_str)}


def length_of_groups(completions, solution, completion_ids, **columns):
    assert len(completions) in (1, 4) and len(set(solution)) == 1
    return [float(len(ids)) for ids in completion_ids]


def whole_row(response, row):
    return float(set(row) >= {"prompt", "label", "solution", "data_source", "extra_info"})
"""


def with_columns(path: Path, output: Path) -> Path:
    rows = read_lines(path)[:32]
    more = {"data_source": "additions", "extra_info": {"digits": 3}}
    output.write_text("".join(json.dumps({**row, "solution": row["label"], **more}) + "\n" for row in rows))
    return output


def settings(folder: Path, quickstart_files: Path, *parts: dict[str, Any]) -> list[str]:
    (folder / "own.py").write_text(FUNCTIONS)
    reward = {"functions": parts, "num_workers": 1, "timeout_s": 60}
    return [
        *(f"model.path={quickstart_files}/model", f"output_dir={folder / 'run'}", "steps=2", "loss.kl.coef=0"),
        "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}",
        *("placement={'actor, rollout, reward': 0-1}", "actor.parallel.tp=1", "checkpoint.save_hf=false"),
        *("logging={progress: false, samples: 2}", f"reward={json.dumps(reward)}"),
    ]


pytestmark = pytest.mark.slow


def test_a_job_with_functions_of_several_forms(quickstart_files: Path, tmp_path: Path) -> None:
    parts = [
        {"function": f"{tmp_path}/own.py:compute_score", "weight": 0.01},
        {"function": f"{tmp_path}/own.py:length_of_groups", "weight": 0.1, "name": "length"},
        {"function": f"{tmp_path}/own.py:whole_row", "weight": 2.0},
        {"function": "exact_match", "options": {"after": ","}},
    ]
    files = [
        f"data.{key}.path={with_columns(quickstart_files / f'{key}.jsonl', tmp_path / f'{key}.jsonl')}"
        for key in ("train", "eval")
    ]
    records = train(QUICKSTART, *settings(tmp_path, quickstart_files, *parts), *files, num_ranks=2)
    assert all(documented(name) for record in records for name in record.keys() - {"step", "time_s"})
    assert column(records, "rollout/reward_whole_row") == [1.0, 1.0]
    assert column(records, "eval/reward_whole_row")[0] == 1.0
    for step in (record for record in records if "rollout/reward_mean" in record):
        means = [step[f"rollout/reward_{name}"] for name in ("compute_score", "length", "whole_row", "exact_match")]
        weighted = sum(weight * mean for weight, mean in zip((0.01, 0.1, 2.0, 1.0), means, strict=True))
        assert step["rollout/reward_mean"] == pytest.approx(weighted, rel=1e-5)
        assert means[1] == pytest.approx(step["rollout/response_length_mean"]), "as many ids as tokens"
        assert means[0] >= step["rollout/reward_compute_score_digits"] > 0
        assert step["rollout/reward_errors"] == step["rollout/reward_timeouts"] == 0


def test_a_column_that_a_function_lacks_ends_the_job_at_its_start(quickstart_files: Path, tmp_path: Path) -> None:
    part = {"function": f"{tmp_path}/own.py:compute_score"}
    train_file = f"data.train.path={quickstart_files}/train.jsonl"
    own = settings(tmp_path, quickstart_files, part)
    message = refusal(QUICKSTART, *own, train_file, "data.eval=null", num_ranks=2)
    assert "has no column 'data_source', which reward.functions.0.function" in message, message
    assert "its columns are prompt, response, label" in message
