"""A role is a class and a declaration: the order, the exchange, memory, metrics and checkpoints follow from them."""

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.jobs import run

PLACEMENT = "placement={'actor': 0, 'rollout, reward': 1, 'adviser': '0-1'}"


def advise(output: Path, warmed_up: Path, data_overrides: list[str], *overrides: str) -> list[dict[str, float]]:
    """The metrics of a job of three steps whose adviser lives on both ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = [
        "steps=3",
        "batch.prompts_per_step=4",
        "batch.mini_batches=1",
        "actor.parallel.tp=1",
        "data.train.max_rows=1024",
    ]
    settings += [f"model.path={warmed_up}", f"output_dir={output}", "loss.kl.coef=0", *data_overrides]
    command = [*torchrun, "tests/end_to_end/new_role_train.py", "--config", "configs/quickstart.yaml", *settings]
    done = run([*command, PLACEMENT, "checkpoint.save_interval=1", *overrides], 200)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["sequential", "pipelined"])
def test_a_role_that_nobody_knew_takes_its_place(
    mode: str, tmp_path: Path, warmed_up: Path, data_overrides: list[str]
) -> None:
    chunks = "schedule.chunks=2" if mode == "pipelined" else "schedule.chunks=1"
    records = advise(tmp_path, warmed_up, data_overrides, f"schedule.mode={mode}", chunks, "data.eval=null")
    steps = [record for record in records if "train/loss" in record]
    assert len(steps) == 3
    for record in steps:
        assert record["perf/adviser_logprobs_s"] >= 0
        assert record["train/reference_kl"] > 1, "the actor is sure of most tokens, and the adviser of none"
    assert [*tmp_path.glob("checkpoints/step_*3")], "all of its ranks came to the boundary"
