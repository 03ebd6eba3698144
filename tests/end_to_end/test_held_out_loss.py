"""SFT with the actor alone reports the loss of held-out demonstrations, and acts on it."""

import json
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, column, read_lines, read_records, train_in_turn
from tests.support.tolerances import ADAM_EPS

NUM_ROWS = 21
"""A number of rows not divisible by two or four ranks."""


def loss_by_transformers(model_path: Path, rows: list[dict[str, str]]) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_path), AutoModelForCausalLM.from_pretrained(model_path)
    losses = []
    for row in rows:
        prompt, response = (tokenizer(row[key], add_special_tokens=False).input_ids for key in ("prompt", "response"))
        ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model.eval()(ids).logits[0, :-1].log_softmax(-1)
        losses.append(-logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0])
    return float(torch.cat(losses).mean())


@pytest.mark.slow
def test_it_is_that_of_transformers_and_ends_training(
    warmed_up: Path, quickstart_files: Path, warm_start: list[str], tmp_path: Path
) -> None:
    same = [
        *(*warm_start, f"data.eval.max_rows={NUM_ROWS}", "placement={actor: all}"),
        *("steps=4", "batch.prompts_per_step=8", "checkpoint.save_interval=1"),
        f"actor.optimizer={{lr: 1e-3, warmup_steps: 0, decay: constant, eps: {ADAM_EPS}}}",
    ]
    keeping = "evaluation={interval: 1, keep_best: {metric: eval/loss, mode: max}}"
    runs = {
        "megatron": ["actor.parallel={tp: 2}", keeping, "steps=2"],
        "resumed": ["actor.parallel={tp: 2}", keeping, f"output_dir={tmp_path / 'megatron'}"],
        "fsdp": ["actor.backend=fsdp", "actor.parallel={tp: 1}", "evaluation={interval: 1}"],
        "stopped": ["actor.parallel={pp: 2, tp: 1}", "evaluation={interval: 1, stop_at: 10}"],
    }
    folders = {name: tmp_path / ("megatron" if name == "resumed" else name) for name in runs}
    jobs = {name: [*same, *overrides] for name, overrides in runs.items()}
    train_in_turn(REPOSITORY / "configs/quickstart_sft.yaml", jobs, tmp_path, num_ranks=2)
    losses = {name: column(read_records(folder), "eval/loss") for name, folder in folders.items()}
    rows = read_lines(quickstart_files / "eval.jsonl")[:NUM_ROWS]
    assert losses["megatron"][0] == pytest.approx(loss_by_transformers(warmed_up, rows), rel=1e-4)
    assert len(losses["resumed"]) == 5 and losses["resumed"] == pytest.approx(losses["fsdp"], rel=1e-3)
    assert losses["stopped"] == pytest.approx(losses["fsdp"][:1], rel=1e-4), "10 is reached before the first step"
    best = json.loads((folders["resumed"] / "hf_best/best.json").read_text())
    assert best["step"] == losses["resumed"].index(max(losses["resumed"])) and best["metric"] == "eval/loss"
