"""Whole jobs that roll out on SGLang, one of its servers per engine."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, sample_ids, train

IN_MANY_PARTS = ("weight_sync.verify=true", "rollout.sglang.staging_mb=0.1")
SMALL = ("actor.parallel.tp=1", "data.eval=null", "batch={prompts_per_step: 8, samples_per_prompt: 4, mini_batches: 2}")
TIMEOUT_S = 800


@pytest.fixture
def overrides(sglang_python: str, quickstart_files: Path, data_overrides: list[str]) -> list[str]:
    return [
        "rollout.engine=sglang",
        f"rollout.sglang.python={sglang_python}",
        f"model.path={quickstart_files}/model",
        *data_overrides,
        *SMALL,
    ]


def test_the_engine_draws_from_the_weights_that_it_was_sent(overrides, tmp_path):
    """Log-probs of its tokens equal the actor's, after every update, with weights that arrive in many parts."""
    records = train(
        REPOSITORY / "configs/quickstart.yaml",
        *overrides,
        *IN_MANY_PARTS,
        "placement={'actor, reference, rollout, reward': 0}",
        f"output_dir={tmp_path}",
        "steps=3",
        num_ranks=1,
        timeout_s=TIMEOUT_S,
    )
    assert_engine_and_actor_agree(records, 3)
    assert len(column(records, "perf/weight_sync_verify_s")) == 3


def assert_engine_and_actor_agree(records, steps):
    differences = column(records, "train/train_rollout_logprob_abs_diff_max")
    assert len(differences) == steps
    assert max(differences) <= 1e-4


def test_weights_change_while_responses_run(overrides, tmp_path):
    """Every token says which version drew it, within the limit, and no sample is lost or used twice."""
    steps = 6
    records = train(
        REPOSITORY / "configs/quickstart.yaml",
        *overrides,
        "placement={'actor, reference': 0, rollout: 1, reward: 2}",
        f"output_dir={tmp_path}",
        f"steps={steps}",
        "schedule={mode: asynchronous, max_staleness: 1, partial_rollouts: true, on_stale: mask}",
        "loss.old_logprobs=actor",
        "logging.sample_ids=true",
        num_ranks=3,
        timeout_s=TIMEOUT_S,
    )
    assert len(column(records, "train/loss")) == steps
    ids = [i for step in sample_ids(tmp_path).values() for i in step]
    assert len(ids) == len(set(ids)) == steps * 8 * 4


def test_a_server_that_is_killed_is_started_again(overrides, tmp_path):
    """With the weights that it had, on a rank apart from the actor's: the run goes on as if nothing had happened."""
    steps = 8
    killer = threading.Thread(target=kill_a_server, args=(tmp_path / "metrics.jsonl", 2, tmp_path / "engines"))
    killer.start()
    records = train(
        REPOSITORY / "configs/quickstart.yaml",
        *overrides,
        *IN_MANY_PARTS,
        "placement={'actor, reference': 0, 'rollout, reward': 1}",
        f"output_dir={tmp_path}",
        f"steps={steps}",
        num_ranks=2,
        timeout_s=TIMEOUT_S,
    )
    killer.join()
    assert_engine_and_actor_agree(records, steps)
    assert len(ports(tmp_path / "engines")) == 2, "one start, and one more after the kill"


def kill_a_server(metrics: Path, num_steps: int, logs: Path) -> None:
    """As soon as so many steps are done."""
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_steps:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    os.kill(serving(ports(logs)[-1])[0], signal.SIGKILL)


def ports(logs: Path) -> list[int]:
    """Of the servers that logs tell of, one per start."""
    headers = [line for log in sorted(logs.glob("*.log")) for line in log.read_text().splitlines()]
    return [int(found[1]) for line in headers if (found := re.match(r"=====.*http://127\.0\.0\.1:(\d+)", line))]


def serving(port: int) -> list[int]:
    """The processes that were started to serve at a port."""
    return [
        pid for pid, command in commands().items() if "rltrain_serve.py" in command and f'"port": {port},' in command
    ]


def commands() -> dict[int, str]:
    """What every process of SGLang's Python was started with."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if words[0] == os.environ["RLTRAIN_SGLANG_PYTHON"]:
                found[int(path.parent.name)] = " ".join(words)
    return found
