"""A run ends if trainer and engine drift apart, with wide and with narrow dtypes."""

import pytest

from tests.support.jobs import QUICKSTART, column, train, try_to_train

pytestmark = pytest.mark.slow

TWO_RANKS = ("placement={actor: 0, 'rollout, reward': 1}", "actor.parallel.tp=1", "loss.kl.coef=0")
COLOCATED = ("placement={'actor, rollout, reward': all}", "actor.parallel.tp=1", "loss.kl.coef=0")
SMALL = (
    *("batch={prompts_per_step: 8, samples_per_prompt: 4}", "rollout.parallel.tp=1"),
    *("data.eval=null", "evaluation.interval=0"),
)
WIDE = ("model.dtype=bfloat16", "model.residual_dtype=float32", "model.head_dtype=float32")


@pytest.fixture
def start(warm_start, tmp_path):
    return (*warm_start[:2], f"output_dir={tmp_path}", *SMALL)


def test_a_run_ends_where_trainer_and_engine_part(start):
    job = (*start, *TWO_RANKS, *WIDE, "steps=2")
    records = train(QUICKSTART, *job, "checks={max_logprob_diff: 0.05, max_kl: 0.05}", num_ranks=2)
    differences = column(records, "train/fresh_logprob_abs_diff")
    assert len(differences) == 2 and 0 < max(differences) < 0.05
    assert column(records, "train/fresh_tokens") == [1, 1]

    done = try_to_train(QUICKSTART, *job, f"checks.max_logprob_diff={differences[0] / 2}", num_ranks=2)
    assert done.returncode
    assert "step 0: the trainer's log-probs are far" in done.stderr and "checks.max_logprob_diff" in done.stderr


def test_a_run_pauses_where_trainer_and_engine_part(start, tmp_path):
    """The run is saved and ends with an error. It continues after a new start, but not after torchrun's restart."""
    job = (*start, *COLOCATED, *WIDE, "steps=2", "checkpoint.save_interval=5", "checks.action=pause")
    done = try_to_train(QUICKSTART, *job, "checks.max_logprob_diff=1e-6", num_ranks=2, restarts=1)
    assert done.returncode
    assert done.stderr.count("rltrain: step 0: the trainer's log-probs are far") == 1
    assert "checks.max_logprob_diff 1e-06 (checks.action pause)" in done.stderr
    assert f"The run is paused after step 1, saved in {tmp_path}/checkpoints/" in done.stderr
    assert "rltrain: the run is paused after step 1" in done.stderr and "torchrun has restarted it" in done.stderr
    records = train(QUICKSTART, *job, "checks.max_logprob_diff=0.05", num_ranks=2)
    assert len(column(records, "train/loss")) == 2


def test_a_run_in_float16_tells_of_its_loss_scale(start):
    """The loss scale begins too large. A resumed run continues with the adapted value."""
    job = (*start, *TWO_RANKS, "model.dtype=float16", "batch.mini_batches=4", "checkpoint.save_interval=2")
    job += ("actor.optimizer.loss_scale={initial: 16777216.0}",)
    records = train(QUICKSTART, *job, "steps=2", num_ranks=2)
    overflowed, scales = (column(records, f"train/{name}") for name in ("overflowed_updates", "loss_scale"))
    assert overflowed == column(records, "train/skipped_updates") and overflowed[0] == 4
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) < 0.05
    later = train(QUICKSTART, *job, "steps=4", num_ranks=2)[2:]
    assert column(later, "train/loss_scale")[0] <= scales[1] < 2**21
    assert column(later, "train/skipped_updates")[1] < 4 and "train/grad_norm" in later[1]
