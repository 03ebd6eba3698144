"""Runs that are killed, stopped, or lose a checkpoint continue as if nothing had happened, or report the problem."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rltrain.checkpoint.run_folder import name_of
from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, SETTING, Popen, ranks_of
from tests.support.jobs import SHORT, Run, read_records, reported

STEPS = 6
STOPS_WITHIN_S = 15.0
"""Seconds from a signal to the end of these small jobs, on a busy machine."""

Kill = dict[str, Any]


class Stand:
    """A folder for repeated starts of the same job. It has two ranks: the actor on 0 and the engine on 1."""

    ranks = 2
    rendezvous: tuple[str, ...] = ("--standalone",)
    layout = ("placement={'actor, reference': 0, 'rollout, reward': 1}", "actor.parallel.tp=1")

    def __init__(self, folder: Path, paths: list[str]) -> None:
        self.folder, self.paths = folder, paths
        self.checkpoints = folder / "checkpoints"

    def start(
        self, *overrides: str, script: Sequence[str] = ("launch/train.py",), torchrun: tuple[str, ...] = ()
    ) -> "Job":
        launcher = [sys.executable, "-m", "torch.distributed.run", *self.rendezvous, f"--nproc-per-node={self.ranks}"]
        small = "batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 2}"
        run = ["--config", "configs/quickstart.yaml", *self.paths, *self.layout, small, f"steps={STEPS}"]
        settings = [*SHORT, "logging.sample_ids=true", "checkpoint.save_interval=2"]
        return Job([*launcher, *torchrun, *script, *run, *settings, f"output_dir={self.folder}", *overrides])

    def run(self, *overrides: str, kills: Sequence[Kill] = (), timeout_s: float = 120) -> str:
        """Returns the output of a job that must succeed."""
        script = ["tests/support/killed_train.py", json.dumps(kills), str(self.folder)]
        job = self.start(*overrides, script=script, torchrun=(f"--max-restarts={len(kills)}",))
        status, output = job.end(timeout_s)
        assert status == 0, output
        return output

    def refusal(self, *overrides: str) -> str:
        """Returns the output of a job that must end with a single message about a user's mistake."""
        job = self.start(*overrides)
        status, output = job.end(timeout_s=60)
        assert status == 1 and re.search(r"exitcode +: 2 ", output), output
        assert output.count("rltrain: ") == 1, output
        message = output.split("rltrain: ")[1].splitlines()[0]
        summary = output.split("Root Cause (first observed failure):")[1]
        assert "<NO_OTHER_FAILURES>" in output and f"traceback : {message}\n" in summary, output
        return output

    def reported(self) -> Run:
        steps = [record["step"] for record in read_records(self.folder)]
        assert steps == sorted(set(steps)), "each step is reported once"
        return reported(self.folder)

    def steps_done(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0


class Job:
    """A torchrun agent and its ranks."""

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, **FORKED_ENVIRONMENT, "PYTHONWARNINGS": "ignore"}
        self.agent = Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rank(self, rank: int) -> int:
        """Returns the process id of a rank."""
        return ranks_of(self.agent.pid)[rank]

    def wait_until(self, happened: Callable[[], bool], timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.agent.poll() is None, self.agent.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Returns the exit status and the output. Fails the test if the job runs longer than `timeout_s`."""
        try:
            output, _ = self.agent.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.agent.terminate()
            output, _ = self.agent.communicate()
            raise AssertionError(f"still running after {timeout_s} s:\n{output}") from None
        return self.agent.returncode, output


@pytest.fixture
def stand(warm_start: list[str], tmp_path: Path) -> Stand:
    return Stand(tmp_path, warm_start)


@pytest.fixture(scope="module")
def whole(warm_start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Returns the folder of a job that has run to its end, undisturbed."""
    stand = Stand(tmp_path_factory.mktemp("undisturbed"), warm_start)
    stand.run()
    return stand


@pytest.fixture(scope="module")
def undisturbed(whole: Stand) -> Run:
    values, ids = whole.reported()
    assert len(ids) == STEPS and len({values[step]["train/grad_norm"] for step in ids}) == STEPS
    return values, ids


# moment -> (its rank, its approximate seconds)
MOMENTS = {
    "generate": (1, 0.1),
    "update": (0, 0.1),
    "weight_sync": (1, 0.005),
    "write": (1, 0.01),
    "complete": (0, 0.01),
}


def random_kills(seed: int, number: int) -> list[Kill]:
    """Returns `number` kills with every kind of moment. Each is within the remaining work after the kills before it.

    The job must save a checkpoint after every step.
    """
    chance = random.Random(seed)
    kinds = [list(MOMENTS)[i % len(MOMENTS)] for i in range(number)]
    chance.shuffle(kinds)
    kills, step = [], 1
    for moment in kinds:
        rank, seconds = MOMENTS[moment]
        if moment in ("weight_sync", "write"):
            rank = chance.randrange(2)
        if moment in ("write", "complete"):
            step += 1
        kills.append({"moment": moment, "step": step, "rank": rank, "delay_s": chance.uniform(0, seconds)})
    return kills


def killed(stand: Stand, kills: list[Kill], *overrides: str) -> str:
    """Returns the output of a run that must continue after all `kills`."""
    output = stand.run(*overrides, kills=kills, timeout_s=60 * (len(kills) + 1))
    missed = [kills[i] for i in range(len(kills)) if not (stand.folder / f"kill_{i}").exists()]
    assert not missed, output
    assert not list(stand.checkpoints.glob(".step_*")), "leftovers of a killed save are removed"
    return output


@pytest.mark.slow
def test_experience_on_its_way_survives_kills(stand: Stand, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The engine is two steps ahead. Both ranks' messages and collectives share a process group."""
    ahead = "schedule={mode: asynchronous, max_staleness: 2, in_flight_sync: false}"
    whole = Stand(tmp_path_factory.mktemp("whole"), stand.paths)
    whole.run(ahead)
    moments = [("update", 3, 0, 0.05), ("weight_sync", 3, 1, 0.002), ("generate", 5, 1, 0.05), ("write", 4, 1, 0.001)]
    killed(stand, [dict(zip(("moment", "step", "rank", "delay_s"), moment, strict=True)) for moment in moments], ahead)
    assert stand.reported() == whole.reported()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_loses_ranks_at_twenty_random_moments_equals_an_undisturbed_one(
    stand: Stand, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Stand(tmp_path_factory.mktemp("whole"), stand.paths)
    whole.run("steps=12")
    killed(stand, random_kills(seed=0, number=20), "steps=12", "checkpoint.save_interval=1")
    assert stand.reported() == whole.reported()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a separate file system with room for one and a half checkpoints."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_leaves_the_checkpoint_before(stand: Stand, undisturbed: Run, small_disk: Path) -> None:
    setting = f"checkpoint.dir={small_disk}"
    output = stand.refusal(setting)
    assert re.search(r"checkpoint of step 4 could not be saved: rank \d could not write to .*: No space left", output)
    assert f"the checkpoint in {small_disk / name_of(2)} is complete" in output
    assert sorted(path.name for path in small_disk.iterdir()) == ["latest", "lock", name_of(2)]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert "resuming after step 2" in stand.run(setting)
    assert stand.reported() == undisturbed


def flip_a_byte(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


@pytest.mark.slow  # tests/unit/test_resuming.py has every kind of damage
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(whole: Stand, stand: Stand, undisturbed: Run) -> None:
    shutil.copytree(whole.folder, stand.folder, dirs_exist_ok=True)
    (stand.checkpoints / ".step_0000008.partial").mkdir()
    damaged = stand.checkpoints / name_of(6) / "actor" / "rank_00000.safetensors"
    flip_a_byte(damaged)
    output = stand.run()
    assert f"the checkpoint of step 6 cannot be used: {damaged} is damaged" in output
    assert f"resuming after step 4, from {stand.checkpoints / name_of(4)}" in output
    assert stand.reported() == undisturbed
    assert not list(stand.checkpoints.glob(".*")), "leftovers are removed"


def to_the_agent(job: Job, number: signal.Signals) -> None:
    job.agent.send_signal(number)


def to_everyone(job: Job, number: signal.Signals) -> None:
    """Sends the signal to all processes, as Ctrl-C in a terminal does. torchrun then sends its ranks another one."""
    for process in (job.agent.pid, job.rank(0), job.rank(1)):
        os.kill(process, number)


def to_one_rank(job: Job, number: signal.Signals) -> None:
    os.kill(job.rank(1), number)


AS_A_USER = [pytest.mark.slow, pytest.mark.by_command_line]


@pytest.mark.parametrize(
    "number, send, status",
    [
        pytest.param(signal.SIGTERM, to_the_agent, 1, marks=AS_A_USER, id="SIGTERM to torchrun"),
        pytest.param(signal.SIGUSR1, to_the_agent, 1, marks=pytest.mark.slow, id="SIGUSR1 to torchrun"),
        pytest.param(signal.SIGINT, to_everyone, 1, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, to_one_rank, 0, id="SIGTERM to a rank"),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_ends(
    stand: Stand,
    undisturbed: Run,
    number: signal.Signals,
    send: Callable[[Job, signal.Signals], None],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = stand.start(torchrun=("--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",))
    job.wait_until(lambda: stand.steps_done() > 0)
    send(job, number)
    ended, output = job.end(timeout_s=STOPS_WITHIN_S)
    assert ended == status, output
    assert output.count(f"{number.name}: the job saves at the end of its step") == 1, output
    stopped = re.search(rf"{number.name}: stopped after step (\d+), saved in {stand.checkpoints}", output)
    assert stopped and 0 < int(stopped[1]) < STEPS, output
    assert "rltrain: " not in output and "exitcode" not in output and str(REPOSITORY / "rltrain") not in output
    monkeypatch.delenv(SETTING, raising=False)  # the next run may be forked
    assert f"resuming after step {stopped[1]}" in stand.run()
    assert stand.reported() == undisturbed


@pytest.mark.slow
def test_a_step_that_does_not_end_in_time_ends_the_run(stand: Stand) -> None:
    asleep = ["tests/support/faulty_train.py", "generate", "3", "1", "sleep", str(stand.folder)]
    job = stand.start("checkpoint.stop_within_s=2", script=asleep)
    job.wait_until((stand.folder / "fault").exists)
    to_the_agent(job, signal.SIGTERM)
    status, output = job.end(timeout_s=STOPS_WITHIN_S)
    assert status != 0
    assert output.count("rltrain: ") == 1, output
    assert "rltrain: SIGTERM: the step did not end within checkpoint.stop_within_s = 2 s" in output
    assert f"the checkpoint in {stand.checkpoints / name_of(2)} is complete" in output
