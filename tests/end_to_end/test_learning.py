"""The reports of the quickstart's GRPO on its four processes are correct.

`.ci/run` runs the whole quickstart and checks that the model learns. test_fsdp.py checks it for backend fsdp.
"""

import math
from pathlib import Path

import pytest

from rltrain.observability.names import documented
from tests.support.jobs import QUICKSTART, column, read_lines, train

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def grpo(warm_start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    return folder, train(QUICKSTART, *warm_start, f"output_dir={folder}", f"steps={STEPS}")


def test_every_step_reports_what_users_look_for_and_engine_and_actor_agree_after_every_sync(grpo):
    differences = column(grpo[1], "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS and max(differences) <= 1e-4
    of_training = "loss ppo_kl pg_clipfrac grad_norm lr entropy reference_kl train_rollout_logprob_abs_diff"
    of_work = "step_time_s rollout_tokens_per_s train_tokens_per_s weight_sync_s"
    expected = {f"train/{name}" for name in of_training.split()} | {f"perf/{name}" for name in of_work.split()}
    expected |= {"rollout/reward_mean", "rollout/response_length_mean"}
    for record in grpo[1][:STEPS]:
        assert not expected - record.keys(), record
        assert all(documented(name) for name in record.keys() - {"step", "time_s"}), record
        assert all(math.isfinite(record[name]) for name in expected)


def test_the_checkpoint_reproduces_the_reported_accuracy_in_transformers(grpo, quickstart_files):
    """Greedy decoding of held-out problems by transformers scores the same as the job reported."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, records = Path(grpo[0], "hf"), grpo[1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = read_lines(quickstart_files / "eval.jsonl")
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    with torch.no_grad():
        output = model.generate(prompts, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    score = sum(a.rpartition(",")[2] == row["label"] for a, row in zip(answers, rows, strict=True)) / len(rows)
    assert score == pytest.approx(column(records, "eval/score")[-1], abs=2 / len(rows))
