"""A role is a class and a declaration: the order, the exchange, memory, metrics and checkpoints follow from them."""

import json
import sys
from pathlib import Path

from tests.support.jobs import run

PLACEMENT = "placement={'actor': 0, 'rollout, reward': 1, 'adviser': '0-1'}"


def advise(output: Path, warmed_up: Path, data_overrides: list[str], *overrides: str) -> list[dict[str, float]]:
    """The metrics of a job of two steps whose adviser lives on both ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = [
        "steps=2",
        "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}",
        "actor.parallel.tp=1",
        "data.train.max_rows=1024",
    ]
    settings += [f"model.path={warmed_up}", f"output_dir={output}", "loss.kl.coef=0", *data_overrides]
    command = [*torchrun, "tests/support/new_role_train.py", "--config", "configs/quickstart.yaml", *settings]
    done = run([*command, PLACEMENT, "checkpoint.save_interval=1", *overrides], 200)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_role_that_nobody_knew_takes_its_place(tmp_path: Path, warmed_up: Path, data_overrides: list[str]) -> None:
    pipelined = "schedule={mode: pipelined, chunks: 2}"
    records = advise(tmp_path, warmed_up, data_overrides, pipelined, "data.eval=null")
    steps = [record for record in records if "train/loss" in record]
    assert len(steps) == 2
    for record in steps:
        assert record["perf/adviser_logprobs_s"] >= 0
        assert record["train/reference_kl"] > 1, "the actor is sure of most tokens, and the adviser of none"
    assert [*tmp_path.glob("checkpoints/step_*2")], "all of its ranks came to the boundary"
