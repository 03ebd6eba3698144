"""Whole jobs that evaluate by engines of their own, beside training."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, train

CONFIG = REPOSITORY / "configs/quickstart.yaml"
STEPS = 6


def settings(files: Path, warmed_up: Path, output: Path, *more: str) -> tuple[str, ...]:
    data = f"{{path: {files}/eval.jsonl, max_rows: 12}}"
    sampled = f"{{name: sampled, data: {data}, sampling: {{temperature: 1.0}}, samples_per_prompt: 4}}"
    return (
        f"model.path={warmed_up}",
        f"output_dir={output}",
        f"data={{train: {{path: {files}/train.jsonl}}, max_prompt_tokens: 16}}",
        f"evaluation={{interval: 2, sets: [{sampled}]}}",
        "evaluation.keep_best={metric: eval/sampled/pass@2}",
        "placement={actor: 0, 'rollout, reward': 1, evaluation: 2}",
        "actor={parallel: {tp: 1}, optimizer: {lr: 3e-3}}",
        "loss.kl.coef=0",
        "schedule={mode: asynchronous, max_staleness: 1}",
        "batch={prompts_per_step: 4, samples_per_prompt: 4}",
        f"steps={STEPS}",
        *more,
    )


def test_main(quickstart_files: Path, warmed_up: Path, tmp_path: Path) -> None:
    records = train(CONFIG, *settings(quickstart_files, warmed_up, tmp_path / "run"), num_ranks=3)
    print(json.dumps(records, indent=1))
    assert column(records, "eval/sampled/policy_version") == [0, 2, 4, 6]
