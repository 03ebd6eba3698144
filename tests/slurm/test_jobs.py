"""The shipped scripts on a real Slurm: jobs that finish, are preempted, warned, cancelled, or lose one of two nodes."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster

LIMIT_S = 200.0


class Job:
    """A job of a script in launch/slurm, with one rank on each of two nodes."""

    def __init__(self, cluster: Cluster, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()):
        self.cluster, self.log, self.output = cluster, folder / "log", folder / "out"
        given = ("--nodes=2", "--gpus-per-node=1", f"--output={self.log}", *options)
        environment = {"RANKS_PER_NODE": "1", "RLTRAIN_PYTHON": sys.executable, "OUTPUT_DIR": str(folder / "seeds")}
        self.number = cluster.submit(f"launch/slurm/{script}.sbatch", *arguments, options=given, **environment)

    @property
    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def steps(self) -> list[int]:
        """Returns the steps in metrics.jsonl, in order."""
        path = self.output / "metrics.jsonl"
        records = map(json.loads, path.read_text().splitlines()) if path.exists() else []
        return [record["step"] for record in records if "train/loss" in record or "perf/step_s" in record]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, f"no {what} in {LIMIT_S:g} s:\n{self.told}\n{self.cluster.logs()}"
            time.sleep(0.2)

    def state(self) -> str:
        return self.cluster.facts(self.number)["JobState"]

    def restarts(self) -> int:
        return int(self.cluster.facts(self.number)["Restarts"])

    def going_on(self) -> int:
        """Returns the number of resumes from a checkpoint."""
        return self.told.count("resuming after step")


@pytest.fixture
def training(warmed_up: Path, data_overrides: list[str], tmp_path: Path) -> list[str]:
    """Returns the arguments of the quickstart's job in its smallest form."""
    return [
        f"--config={REPOSITORY}/configs/quickstart.yaml",
        f"model.path={warmed_up}",
        f"output_dir={tmp_path}/out",
        *data_overrides,
        "placement={'actor, reference, rollout, reward': all}",
        "actor.parallel.tp=1",
        "batch={prompts_per_step: 2, samples_per_prompt: 2, mini_batches: 1}",
        "data.train.max_rows=512",
        "data.eval=null",
        "checkpoint={save_interval: 1, save_hf: false}",
    ]


def test_the_doctor_knows_nodes_by_their_place_in_slurms_list(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "doctor", "--mb", "1", "--shared", str(tmp_path))
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    assert "between nodes 0-1 (n1, n2)" in job.told and "shared by all 2 nodes" in job.told, job.told
    assert "nodes differ" not in job.told and "Traceback" not in job.told


def test_a_run_for_a_seed_finishes_and_is_accounted_for(cluster: Cluster, tmp_path: Path, training: list[str]) -> None:
    job = Job(cluster, tmp_path, "seeds", *training, "steps=2", options=("--array=3-3",))
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    assert job.state() == "COMPLETED", job.told
    assert (tmp_path / "seeds/seed_3/checkpoints/latest").read_text().split("_")[-1].strip("0\n") == "2"
    [line] = cluster.accounting(job.number)
    assert "JobState=COMPLETED" in line and "NodeList=n[1-2]" in line and "NodeCnt=2" in line


def test_a_job_that_loses_a_node_is_queued_again_and_goes_on(
    cluster: Cluster, tmp_path: Path, training: list[str]
) -> None:
    """One node trains. The other has inference and is switched off."""
    job = Job(cluster, tmp_path, "train_beside_inference", *training, "steps=30", options=("--requeue",))
    job.until(lambda: len(job.steps()) >= 3, "third step")
    cluster.power_off(2)
    job.until(lambda: job.restarts() == 1, "requeueing")
    cluster.restart_controller()
    cluster.boot(2)
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    assert job.state() == "COMPLETED" and job.going_on() == 1, job.told
    assert job.steps() == [*range(30)], "no step is lost or repeated"


@pytest.mark.slow
def test_with_a_range_of_nodes_it_goes_on_with_those_that_are_left(
    cluster: Cluster, tmp_path: Path, training: list[str]
) -> None:
    job = Job(cluster, tmp_path, "requeue", *training, "steps=30", options=("--nodes=1-2",))
    job.until(lambda: len(job.steps()) >= 3, "third step")
    assert cluster.facts(job.number)["NumNodes"] == "2", job.told
    cluster.power_off(2)
    job.until(lambda: job.restarts() == 1, "requeueing")
    cluster.restart_controller()
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"), "end")
    assert job.state() == "COMPLETED" and job.going_on() == 1, job.told
    assert cluster.facts(job.number)["NumNodes"] == "1", job.told
    assert job.steps() == [*range(30)], "no step is lost or repeated"
    cluster.boot(2)


@pytest.mark.slow
def test_a_job_is_queued_again_when_preempted_and_warned_but_not_when_cancelled(
    cluster: Cluster, tmp_path: Path, training: list[str]
) -> None:
    limits = ("--time=2", "--signal=B:USR1@45")  # Slurm checks every 30 s: the signal comes 45 to 75 s after the start
    job = Job(cluster, tmp_path, "requeue", *training, "steps=100000", options=limits)
    job.until(lambda: len(job.steps()) >= 2, "second step")
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent", "--wrap=true")
    other = int(cluster.run("sbatch", "--parsable", *urgent))
    job.until(lambda: job.going_on() == 1, "second life")
    assert cluster.facts(other)["JobState"] == "COMPLETED" and job.restarts() == 1
    assert job.told.count("the job saves at the end of its step") == 1, job.told
    job.until(lambda: job.going_on() == 2, "third life")
    assert job.restarts() == 2 and job.told.count("SIGUSR1: the job saves at the end of its step") >= 1, job.told
    reached = len(job.steps())
    job.until(lambda: len(job.steps()) > reached, "step of the third life")
    cluster.run("scancel", str(job.number))
    job.until(lambda: job.state() == "CANCELLED" and "SIGTERM" in job.told, "cancellation")
    job.until(
        lambda: any("JobState=CANCELLED" in line for line in cluster.accounting(job.number)), "line of accounting"
    )
    steps = job.steps()
    assert steps == [*range(len(steps))], "no step is lost or repeated"
    assert job.restarts() == 2 and "was killed" not in job.told
