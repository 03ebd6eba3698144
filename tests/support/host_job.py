"""A job on several hosts (network namespaces) with one torchrun agent each, and its faults."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.forked.namespaces import NAMESPACES
from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen
from tests.support.hosts import Hosts

Fault = dict[str, Any]
"""A fault as in killed_train.py, with two more keys.

- "host": by default the host of the rank.
- "kind": "cut" (the host's cable), "slow" (the cable carries "mbit_per_s" from then on), "kill" or "stop" (the rank at
  the moment), "kill agent" or "stop agent" (of the host).

A cut or a stop with "heals_s" ends after so many seconds. With "for_good" a held rank never continues.
"""

JOINS_WITHIN_S = "RLTRAIN_TEST_JOINS_WITHIN_S"
"""Environment variable: the time limit of the start in seconds, if it differs from the default."""

LOOK_S = 0.005
MESSAGE = re.compile(r"^rltrain: (.*(?:\n  .*)*)", re.MULTILINE)


def script(faults: Sequence[Fault], folder: Path) -> list[str]:
    told = [{"delay_s": 0.0, **fault, "told": True} for fault in faults]
    return [str(REPOSITORY / "tests/support/killed_train.py"), json.dumps(told), str(folder)]


def small_job(folder: Path, files: Path, num_hosts: int, *more: str) -> list[str]:
    """Returns the arguments of a small job with its output in `folder`; the first half of the hosts trains.

    `files` is the folder of the quickstart's data.
    """
    half = num_hosts // 2
    trains = "0" if half == 1 else f"0-{half - 1}"
    draws = "1" if half == 1 else f"{half}-{num_hosts - 1}"
    return [
        f"--config={REPOSITORY}/configs/quickstart.yaml",
        f"model.path={REPOSITORY}/tests/warmed_up",
        f"data.train.path={files}/train.jsonl",
        "data.eval=null",
        "data.train.max_rows=512",
        f"placement={{'actor, reference': '{trains}', 'rollout, reward': '{draws}'}}",
        "actor.parallel.tp=1",
        "actor.optimizer.decay=constant",
        "batch={prompts_per_step: 4, samples_per_prompt: 4, mini_batches: 1}",
        "checkpoint={save_interval: 1, save_hf: false}",
        "logging.sample_ids=true",
        f"output_dir={folder}/run",
        *more,
    ]


class HostJob:
    """A running job. `logs` has one file per host and `agents` one process per host, in the order of hosts."""

    joins_within_s = 30.0

    def __init__(
        self, hosts: Hosts, folder: Path, arguments: Sequence[str], faults: Sequence[Fault] = (), restarts: int = 0
    ) -> None:
        """Starts the job. `folder` must not exist yet."""
        folder.mkdir(parents=True)
        self.hosts, self.folder, self.faults = hosts, folder, faults
        self.happened: dict[int, float] = {}
        """Number of a fault -> its time by time.monotonic."""
        self.logs = [folder / f"n{number}.log" for number in hosts.numbers]
        self.agents = [self._start(number, [*script(faults, folder), *arguments], restarts) for number in hosts.numbers]
        self.ended: dict[int, float] = {}
        """Host -> time by time.monotonic when its last process ended. A stopped process counts as ended."""
        self._to_do: list[tuple[float, Callable[[], None]]] = []

    def run(self, limit_s: float) -> None:
        """Causes the faults when their moments come. Returns once everything has ended, or `limit_s` after the start or
        the last fault."""
        latest = time.monotonic()
        while time.monotonic() < latest + limit_s and len(self.ended) < len(self.agents):
            if (number := len(self.happened)) < len(self.faults) and (self.folder / f"kill_{number}").exists():
                self._do(number)
                latest = self.happened[number]
            self._do_what_is_due()
            self._see_who_has_ended()
            time.sleep(LOOK_S)
        for _, act in self._to_do:
            act()
        self._to_do.clear()

    @property
    def statuses(self) -> list[int | None]:
        return [agent.poll() for agent in self.agents]

    def left(self) -> dict[int, set[int]]:
        """Returns host -> processes still running there, without those stopped by a fault."""
        found = {number: self.hosts.processes(number) for number in self.hosts.numbers}
        return {number: running for number, pids in found.items() if (running := {p for p in pids if _runs(p)})}

    def close(self) -> None:
        """Kills all processes on the hosts and connects all cables again."""
        for number in self.hosts.numbers:
            for process in self.hosts.processes(number):
                _signal(process, signal.SIGKILL)
            self.hosts.mend(number)
        for fault in self.faults[: len(self.happened)]:
            if fault["kind"] == "slow":
                self.hosts.unlimit(fault["host"])
        for agent in self.agents:
            agent.wait(10)

    def output(self, host: int) -> str:
        return self.logs[host - 1].read_text(errors="replace")

    def messages(self, host: int) -> list[str]:
        return MESSAGE.findall(self.output(host))

    def _start(self, number: int, program: list[str], restarts: int) -> Popen:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts.numbers)}"]
        torchrun += [f"--node-rank={number - 1}", "--nproc-per-node=1", "--master-addr=n1", "--master-port=23456"]
        environment = {**os.environ, **FORKED_ENVIRONMENT, NAMESPACES: self.hosts.namespaces(number)}
        environment[JOINS_WITHIN_S] = str(self.joins_within_s)
        with self.logs[number - 1].open("wb") as log:
            return Popen(
                [*torchrun, f"--max-restarts={restarts}", *program],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def _do(self, number: int) -> None:
        fault = self.faults[number]
        host = fault.get("host", fault["rank"] + 1)
        rank = int((self.folder / f"kill_{number}").read_text())
        agent = self.agents[host - 1].pid
        self.happened[number] = time.monotonic()
        match fault["kind"]:
            case "cut":
                self.hosts.cut(host)
            case "slow":
                self.hosts.limit(host, fault["mbit_per_s"])
            case "kill" | "stop" as how:
                _signal(rank, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
            case "kill agent" | "stop agent" as how:
                _signal(agent, {"kill agent": signal.SIGKILL, "stop agent": signal.SIGSTOP}[how])
        if "heals_s" in fault:
            heal = {"cut": lambda: self.hosts.mend(host), "stop": lambda: _signal(rank, signal.SIGCONT)}
            self._to_do.append((time.monotonic() + fault["heals_s"], heal[fault["kind"]]))
        if not fault.get("for_good"):
            (self.folder / f"done_{number}").touch()

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for due in [entry for entry in self._to_do if entry[0] <= now]:
            self._to_do.remove(due)
            due[1]()

    def _see_who_has_ended(self) -> None:
        for host, agent in zip(self.hosts.numbers, self.agents, strict=True):
            agent_ended = agent.poll() is not None or _is_stopped(agent.pid)
            if host not in self.ended and agent_ended and not any(map(_runs, self.hosts.processes(host))):
                self.ended[host] = time.monotonic()


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _is_stopped(process: int) -> bool:
    return _state(process) == "T"


def _runs(process: int) -> bool:
    return _state(process) not in ("T", "Z", "X")


def _signal(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return
