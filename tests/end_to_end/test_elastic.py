"""Runs resumed with more or fewer ranks than their checkpoint was saved by."""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rltrain.checkpoint.run_folder import name_of
from tests.end_to_end.test_resume import PARTIAL
from tests.forked.popen import FORKED_ENVIRONMENT, Popen, ranks_of
from tests.support.jobs import QUICKSTART, REPOSITORY, Run, reported, train
from tests.support.tolerances import EPS_OF_ACTOR, near
from tests.support.torchrun import free_port

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES, STEPS = 4, 4, 5


class Elastic:
    """A job started repeatedly by one command, each time with all available ranks."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder, self.overrides = folder, overrides

    def go_on(self, num_ranks: int, *, after: int = 0) -> Run:
        """Deletes the checkpoints after step `after`, resumes to the end, and returns the reports of the whole run."""
        for step in range(after + 1, STEPS + 1):
            shutil.rmtree(self.folder / "checkpoints" / name_of(step), ignore_errors=True)
        train(QUICKSTART, *self.overrides, f"output_dir={self.folder}", num_ranks=num_ranks, timeout_s=120)
        return self.whole(STEPS)

    def whole(self, steps: int) -> Run:
        """Returns the reports of a run of so many steps. Every step and every sample must be reported once."""
        metrics, ids = reported(self.folder)
        assert list(metrics) == [*range(steps)]
        counts = Counter(number for of_step in ids.values() for number in of_step)
        assert counts == Counter(range(steps * PROMPTS * SAMPLES))
        return metrics, ids


@pytest.fixture
def elastic(warm_start: list[str], tmp_path: Path) -> Elastic:
    overrides = [
        *(*warm_start, f"steps={STEPS}", "logging.sample_ids=true", "data.train.max_rows=512", "data.eval=null"),
        f"batch={{prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}, mini_batches: 2}}",
        *("checkpoint={save_hf: false, save_interval: 1, keep: 0}", EPS_OF_ACTOR),
    ]
    return Elastic(tmp_path / "run", overrides)


def test_replicas_of_the_actor_come_and_go(elastic: Elastic) -> None:
    """The actor has one replica, then three. Samples from a checkpoint's weights are equal. Updates are equal except
    for the order of sums."""
    elastic.overrides += ["placement={'rollout, reward': 0, 'actor, reference': rest}", "actor.parallel.tp=1"]
    (first, first_ids), (second, second_ids) = elastic.go_on(2), elastic.go_on(4, after=3)
    assert [second[step] for step in range(3)] == [first[step] for step in range(3)]
    assert second[3] == near(first[3], tokens=PROMPTS * SAMPLES, rel=1e-4, abs=1e-4)
    assert all(sorted(second_ids[step]) == sorted(first_ids[step]) for step in range(STEPS))


def test_engines_that_work_ahead_come_and_go(elastic: Elastic) -> None:
    """Two engines, then one, then two: unfinished responses and experience in flight continue on the remaining
    engines."""
    elastic.overrides += ["placement={'actor, reference': 0-1, 'rollout, reward': rest}", PARTIAL]
    elastic.overrides.append("rollout.max_running_requests=6")
    first, second, third = [elastic.go_on(num_ranks, after=after)[0] for num_ranks, after in ((4, 0), (3, 1), (4, 3))]
    assert second[0] == first[0] and [second[step] for step in (1, 2)] == [third[step] for step in (1, 2)]
    assert {metrics["train/lr"] for metrics in first.values()} == {metrics["train/lr"] for metrics in third.values()}


KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=3"
"""Settings of torchrun: a node is lost after 6 missed keep-alives of 1 s each, but a slow one is not. torchrun waits 3
s for others to come back."""
LIMIT_S = 120


def test_a_job_that_loses_a_node_goes_on_by_itself_on_those_that_are_left(elastic: Elastic, tmp_path: Path) -> None:
    """Three agents act as three nodes. The first has torchrun's rendezvous.

    Ranks of two nodes train together, so the remaining ranks notice the loss at once.
    """
    steps, config = 12, ["--config=configs/quickstart.yaml", f"output_dir={elastic.folder}"]
    placed = ["placement={'rollout, reward': 0, 'actor, reference': rest}", "actor.parallel.tp=1", f"steps={steps}"]
    placed.append("timeouts.no_progress_s=30")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=2"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    environment = {**os.environ, **FORKED_ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = []
    for node in range(3):
        rendezvous = f"--rdzv-conf=is_host={int(node == 0)},{KEEP_ALIVE}"
        command = [*torchrun, rendezvous, "launch/train.py", *config, *elastic.overrides, *placed]
        with (tmp_path / f"node{node}").open("wb") as log:
            agents.append(Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log))
    left, other, lost = agents
    checkpoints, job = elastic.folder / "checkpoints", elastic.folder / "job.json"
    try:
        deadline = time.monotonic() + LIMIT_S
        while len([*checkpoints.glob("step_*")]) < 2:
            assert time.monotonic() < deadline and left.poll() is None, (tmp_path / "node0").read_text()
            time.sleep(0.02)
        assert json.loads(job.read_text())["world_size"] == 3
        for process in (lost.pid, *ranks_of(lost.pid).values()):
            os.kill(process, signal.SIGKILL)
        statuses = [agent.wait(LIMIT_S) for agent in (left, other)]
    finally:
        for agent in agents:
            agent.kill()
    told = "".join((tmp_path / f"node{node}").read_text() for node in range(2))  # the first agent to notice reports it
    assert statuses == [0, 0], told
    assert told.count("\nrltrain: ") == 1 and "\nrltrain: killed" in told and "resuming after step" in told, told
    assert json.loads(job.read_text())["world_size"] == 2
    elastic.whole(steps)
