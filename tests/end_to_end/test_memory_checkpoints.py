"""Two nodes keep checkpoints in memory, each also those of the other. A run that loses a node continues from there."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest

from rltrain.checkpoint.run_folder import name_of
from tests.end_to_end.test_faults import STEPS, Job, Stand, undisturbed, whole  # noqa: F401 - fixtures
from tests.forked.popen import ranks_of
from tests.support.jobs import Run
from tests.support.torchrun import free_port

pytestmark = pytest.mark.slow

LIMIT_S = 60
SAVED_AT = 5
"""The last step before the fault. The disk has the step before it."""
DISK_AT = 4
IN_MEMORY = "checkpoint.memory={interval: 1, folder: $NODE_MEMORY}"
HELD = {"moment": "generate", "step": SAVED_AT, "rank": 1, "held": True, "told": True}


class TwoNodes(Stand):
    """Two agents with one rank each. A folder of each represents its memory."""

    ranks, rendezvous = 1, ()

    def __init__(self, folder: Path, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder / "run", paths)
        self.folder.mkdir()
        self.memories = [folder / f"memory{node}" for node in range(2)]
        self.monkeypatch = monkeypatch

    def start_both(self) -> list[Job]:
        port, jobs = free_port(), []
        for node, memory in enumerate(self.memories):
            self.monkeypatch.setenv("NODE_MEMORY", str(memory))
            torchrun = ("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
            script = ["tests/support/killed_train.py", json.dumps([HELD]), str(self.folder)]
            jobs.append(self.start(IN_MEMORY, script=script, torchrun=torchrun))
        return jobs

    def lose_node(self, node: int, harm: Callable[[], None] = lambda: None) -> None:
        """Kills both agents and ranks once both memories have the checkpoint of step SAVED_AT, then deletes the memory
        of `node`.

        `harm` is called between the two.
        """
        jobs = self.start_both()
        deadline = time.monotonic() + LIMIT_S
        while not all(self.in_memory(n, SAVED_AT) for n in range(2)) and time.monotonic() < deadline:
            if not all(job.agent.poll() is None for job in jobs):
                break
            time.sleep(0.05)
        came_there = all(self.in_memory(n, SAVED_AT) for n in range(2))
        for job in jobs:
            for process in (job.agent.pid, *ranks_of(job.agent.pid).values()):
                with suppress(ProcessLookupError):
                    kill(process, signal.SIGKILL)
        told = [job.end(LIMIT_S)[1] for job in jobs]
        assert came_there, "\n".join(told)
        harm()
        shutil.rmtree(self.memories[node])

    def go_on(self) -> str:
        """Returns the first node's output after both have ended."""
        jobs = self.start_both()
        ended = [job.end(LIMIT_S) for job in jobs]
        assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
        return ended[0][1]

    def in_memory(self, node: int, step: int) -> list[Path]:
        return [*self.memories[node].glob(f"*/{name_of(step)}")]


@pytest.fixture
def nodes(warm_start: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    return TwoNodes(tmp_path, warm_start, monkeypatch)


def test_a_run_whose_node_is_lost_goes_on_from_the_others_memory(nodes: TwoNodes, undisturbed: Run) -> None:  # noqa: F811
    nodes.lose_node(0)
    assert (nodes.checkpoints / name_of(DISK_AT)).exists() and not (nodes.checkpoints / name_of(SAVED_AT)).exists()
    told = nodes.go_on()
    assert f"resuming after step {SAVED_AT}, from {nodes.memories[0]}" in told, told
    assert nodes.reported() == undisturbed and nodes.steps_done() == STEPS + 1
    assert not [*nodes.memories[0].iterdir(), *nodes.memories[1].iterdir()], "it is given back at the end"


def test_a_killed_rank_of_one_node_needs_no_disk(warm_start: list[str], tmp_path: Path, undisturbed: Run) -> None:  # noqa: F811
    stand = Stand(tmp_path / "run", warm_start)
    stand.folder.mkdir()
    memory = f"checkpoint={{save_hf: false, save_interval: 0, save_every_s: 0, memory: {{folder: {tmp_path}/memory}}}}"
    kills = [{"moment": "update", "step": 3, "rank": 0, "delay_s": 0.1}]
    told = stand.run(memory, kills=kills)
    assert re.search(rf"resuming after step [23], from {tmp_path}/memory/.*, in the nodes' memory", told), told
    assert stand.reported() == undisturbed and not stand.checkpoints.exists()
