"""A tiny Qwen3-MoE learns by supervised steps, its experts dealt out to ranks: the whole job, as a user starts it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.jobs import REPOSITORY, column, run

STEPS, SAVED, ROWS = 16, 8, 32
SMALL = (
    f"steps={STEPS}",
    f"data.train.max_rows={ROWS}",  # all of them in every step
    f"batch.prompts_per_step={ROWS}",
    "actor.optimizer.warmup_steps=2",
    f"checkpoint.save_interval={SAVED}",
    "placement.actor=0-1",
    "actor.parallel.ep=2",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("experts")
    tool = [sys.executable, "tools/make_quickstart.py", "--output", str(folder), "--experts", "8"]
    done = run([*tool, "--train-rows", str(ROWS), "--eval-rows", "1"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_it_learns_goes_on_bit_for_bit_and_loads_in_transformers(start: Path, tmp_path: Path) -> None:
    first, second, exported = (tmp_path / name for name in ("first", "second", "exported"))
    paths = [f"data.train.path={start}/train.jsonl", *SMALL]
    jobs = [
        [*paths, f"model.path={start}/model", f"output_dir={first}"],
        [
            *paths,
            f"model.path={start}/model",
            f"output_dir={second}",
            f"checkpoint.resume={first}/checkpoints/step_{SAVED:07d}",
        ],
        [*paths, f"model.path={first}/hf", f"output_dir={exported}", "steps=1", "checkpoint.save_hf=false"],
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    config = str(REPOSITORY / "configs/quickstart_moe_sft.yaml")
    script = ["tests/support/consecutive_jobs.py", config, str(tmp_path / "jobs.json")]
    done = run([*torchrun, *script], timeout_s=300)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"

    losses = column(records(first), "train/loss")
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    assert trained(records(second))[-(STEPS - SAVED) :] == trained(records(first))[SAVED:]
    (loss,) = column(records(exported), "train/loss")
    assert loss == pytest.approx(loss_of_transformers(first / "hf", start / "train.jsonl"), rel=1e-4)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def trained(of: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What each step reported of training."""
    kept = [{name: value for name, value in record.items() if name.startswith("train/")} for record in of]
    return [record for record in kept if record]


@torch.no_grad()
def loss_of_transformers(path: Path, data: Path) -> float:
    """Mean negative log-likelihood of the rows' response tokens, the end of sequence among them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total, count = 0.0, 0
    for line in data.read_text().splitlines()[:ROWS]:
        row = json.loads(line)
        prompt, response = (tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "response"))
        response.append(tokenizer.eos_token_id)
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        total += float(cross_entropy(logits, torch.tensor(response), reduction="sum"))
        count += len(response)
    return total / count
