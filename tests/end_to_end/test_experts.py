"""A tiny Qwen3-MoE learns by supervised steps, with its experts divided among ranks: the whole job of a user."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.jobs import REPOSITORY, column, learnt, read_lines, succeed, train_each

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
    succeed([*tool, "--train-rows", str(ROWS), "--eval-rows", "1"], timeout_s=60)
    return folder


@pytest.mark.slow
def test_it_learns_goes_on_bit_for_bit_and_loads_in_transformers(start: Path, tmp_path: Path) -> None:
    first, paths = tmp_path / "first", [f"data.train.path={start}/train.jsonl", *SMALL]
    whole = [*paths, f"model.path={start}/model"]
    jobs = {
        "first": whole,
        "second": [*whole, f"checkpoint.resume={first}/checkpoints/step_{SAVED:07d}"],
        "exported": [*paths, f"model.path={first}/hf", "steps=1", "checkpoint.save_hf=false"],
    }
    found = train_each(REPOSITORY / "configs/quickstart_moe_sft.yaml", jobs, tmp_path, num_ranks=2)

    losses = column(found["first"], "train/loss")
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]
    assert learnt(found["second"], "train")[-(STEPS - SAVED) :] == learnt(found["first"], "train")[SAVED:]
    (loss,) = column(found["exported"], "train/loss")
    assert loss == pytest.approx(loss_of_transformers(first / "hf", start / "train.jsonl"), rel=1e-4)


@torch.no_grad()
def loss_of_transformers(path: Path, data: Path) -> float:
    """Returns the mean negative log-likelihood of the rows' response tokens and their end of sequence."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total, count = 0.0, 0
    for row in read_lines(data)[:ROWS]:
        prompt, response = (tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "response"))
        response.append(tokenizer.eos_token_id)
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        total += float(cross_entropy(logits, torch.tensor(response), reduction="sum"))
        count += len(response)
    return total / count
