"""Mistakes end the job within seconds: one clear message, a non-zero exit, no traceback from deep inside."""

import re
import sys

import pytest

from tests.support.jobs import QUICKSTART, REPOSITORY, dry_run, run, try_to_train


@pytest.fixture(scope="module")
def overrides(quickstart_files, data_overrides, tmp_path_factory):
    paths = [f"model.path={quickstart_files}/model", f"output_dir={tmp_path_factory.mktemp('refused')}"]
    return [*paths, *data_overrides, "steps=1", "data.train.max_rows=1024", "evaluation.interval=0"]


# mistake -> (its overrides, words of the message)
REFUSED = {
    "a rank named twice": (["placement.rollout='2,2-3'"], ["placement", "rank 2 is named twice"]),
    "a rank out of the world": (["placement.rollout=2-7"], ["placement", "rank 7 does not exist", "0-3"]),
    "a needed role that is not placed": (["placement={actor: 0-1, rollout: 2-3}"], ["reward", "placement"]),
    "a range that tp x pp does not divide": (["placement.actor=0-2"], ["actor", "3 ranks", "tp 2"]),
    "a tp that does not divide heads": (["placement.rollout=1-3", "rollout.parallel.tp=3"], ["tp", "3", "heads"]),
    "an unknown key": (["rollout.sampling.temprature=1"], ["temprature", "temperature"]),
    "a wrong type": (["steps=many"], ["steps", "many"]),
}
MISSING_CHECKPOINT = (["model.path=nowhere"], ["nowhere"])


@pytest.mark.parametrize("mistake", REFUSED)
def test_the_dry_run_refuses(mistake, overrides):
    wrong, words = REFUSED[mistake]
    done = dry_run(QUICKSTART, *overrides, *wrong, world_size=4)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_the_dry_run_needs_no_checkpoint(overrides):
    done = dry_run(QUICKSTART, *overrides, *MISSING_CHECKPOINT[0], world_size=4)
    assert done.returncode == 0
    assert "bytes unknown: nowhere/config.json does not exist yet" in done.stdout


def refusal(config, *overrides, num_ranks=4):
    """Returns the message of a job that must fail with one message and no traceback except torchrun's own."""
    done = try_to_train(config, *overrides, num_ranks=num_ranks)
    assert done.returncode != 0
    assert done.stderr.count("rltrain: ") == 1, done.stderr
    assert str(REPOSITORY / "rltrain") not in done.stderr
    return done.stderr.split("rltrain: ")[1]


OUT_OF_ONE = (["placement={'actor, reference': 0, 'rollout, reward': 0-7}"], ["placement", "rank 7 does not exist"])


@pytest.mark.parametrize(
    ("wrong", "words", "num_ranks"),
    [
        pytest.param(*OUT_OF_ONE, 1, id="placement", marks=[pytest.mark.by_command_line, pytest.mark.slow]),
        pytest.param(*REFUSED["an unknown key"], 4, id="key"),
        pytest.param(*MISSING_CHECKPOINT, 4, id="checkpoint"),
    ],
)
def test_the_job_refuses_with_one_message(wrong, words, num_ranks, overrides):
    message = refusal(QUICKSTART, *overrides, *wrong, num_ranks=num_ranks)
    assert all(word in message for word in words)


def test_a_reward_that_always_fails_ends_the_job_with_its_first_traceback(overrides):
    """Two ranks score the samples before the first update."""
    reward = "reward={function: 'tests.support.user_rewards:without_answer', num_workers: 1}"
    small = ["batch={prompts_per_step: 4, samples_per_prompt: 2, mini_batches: 1}", "data.eval=null"]
    placement = ["placement={'actor, rollout, reward': 0-1}", "actor.parallel.tp=1", "loss.kl.coef=0"]
    message = refusal(QUICKSTART, *overrides, reward, *small, *placement, num_ranks=2)
    assert "failed on 8 of 8 samples of score[0]" in message and "reward.max_failures" in message, message
    file = re.escape(str(REPOSITORY / "tests/support/user_rewards.py"))
    first = rf'Traceback \(most recent call last\):\n  File "{file}", line \d+, in without_answer\n'
    assert re.search(first, message) and "\nKeyError: 'answer'\n" in message, message


def test_a_wrong_choice_of_native_code_is_refused(overrides, monkeypatch):
    monkeypatch.setenv("RLTRAIN_NATIVE", "yes")
    message = refusal(QUICKSTART, *overrides)
    assert message.startswith("RLTRAIN_NATIVE is 'yes'; expected one of auto, off, require"), message


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_the_job(overrides):
    diverging = ["steps=9", "data.eval=null", "evaluation.stop_at=null", "placement={actor: 0-3}"]
    message = refusal(REPOSITORY / "configs/quickstart_sft.yaml", *overrides, *diverging, "actor.optimizer.lr=1e30")
    assert "is nan" in message or "is inf" in message


def test_started_without_torchrun_it_says_how_to_start():
    done = run([sys.executable, "launch/train.py", "--config", str(QUICKSTART)], 60)
    assert done.returncode == 2 and "torchrun" in done.stderr


def test_the_dry_run_describes_the_job(overrides):
    done = dry_run(QUICKSTART, *overrides, world_size=4)
    assert done.returncode == 0, done.stderr
    for words in ("disaggregated", "colocated", "tp 2 x pp 1", "weight_sync[0]", "no deadlock", "bytes on the wire"):
        assert words in done.stdout
