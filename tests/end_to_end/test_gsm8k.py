"""Real prompts: GSM8K with a chat template and the math reward, actor PP=2, engine TP=2."""

import sys
from pathlib import Path

import pytest

from tests.support.jobs import REPOSITORY, column, succeed, train

NUM_ROWS, NUM_STEPS = 256, 2
GSM8K = REPOSITORY.parent / "shared/data/gsm8k/train.jsonl"


@pytest.mark.skipif(not GSM8K.exists(), reason=f"needs the GSM8K training split at {GSM8K}")
@pytest.mark.slow
def test_a_few_steps_on_real_prompts(tmp_path: Path):
    model, rows = tmp_path / "model", tmp_path / "train.jsonl"
    rows.write_text("\n".join(GSM8K.read_text().splitlines()[:NUM_ROWS]))
    make = ["tools/make_tiny_model.py", "--output", str(model), "--corpus", str(rows), "--chat-template"]
    succeed([sys.executable, *make], 120)
    records = train(
        REPOSITORY / "configs/gsm8k_tiny.yaml",
        *(f"model.path={model}", f"data.train.path={rows}", f"output_dir={tmp_path / 'run'}", f"steps={NUM_STEPS}"),
    )
    assert len(column(records, "train/loss")) == NUM_STEPS
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 1e-4
    assert column(records, "rollout/reward_errors") == [0] * NUM_STEPS
