"""The quickstart's GRPO on its four processes: what is reported is so.

`.ci/run` runs the whole quickstart and checks that the model learns, which test_fsdp.py does for backend fsdp.
"""

import json
import math
from pathlib import Path

import pytest

from rltrain.observability.names import documented
from tests.support.jobs import REPOSITORY, column, train

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def grpo(warmed_up, data_overrides, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    records = train(
        REPOSITORY / "configs/quickstart.yaml",
        f"model.path={warmed_up}",
        f"output_dir={folder}",
        f"steps={STEPS}",
        *data_overrides,
    )
    return folder, records


def test_engine_and_actor_agree_right_after_every_sync(grpo):
    differences = column(grpo[1], "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == STEPS
    assert max(differences) <= 1e-4


def test_every_step_reports_what_users_look_for(grpo):
    expected = {
        "train/loss",
        "train/ppo_kl",
        "train/pg_clipfrac",
        "train/grad_norm",
        "train/lr",
        "train/entropy",
        "train/reference_kl",
        "train/train_rollout_logprob_abs_diff",
        "rollout/reward_mean",
        "rollout/response_length_mean",
        "perf/step_time_s",
        "perf/rollout_tokens_per_s",
        "perf/train_tokens_per_s",
        "perf/weight_sync_s",
    }
    for record in grpo[1][:STEPS]:
        assert not expected - record.keys(), record
        assert all(documented(name) for name in record.keys() - {"step", "time_s"}), record
        assert all(math.isfinite(record[name]) for name in expected)


def test_the_checkpoint_reproduces_the_reported_accuracy_in_transformers(grpo, quickstart_files):
    """Greedy decoding by transformers of held-out problems scores what the job reported on them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, records = Path(grpo[0], "hf"), grpo[1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (quickstart_files / "eval.jsonl").read_text().splitlines()]
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    with torch.no_grad():
        output = model.generate(prompts, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    score = sum(a.rpartition(",")[2] == row["label"] for a, row in zip(answers, rows, strict=True)) / len(rows)
    assert score == pytest.approx(column(records, "eval/score")[-1], abs=2 / len(rows))
