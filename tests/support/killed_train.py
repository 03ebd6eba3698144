"""Runs launch/train.py under torchrun --max-restarts, with one fault after the other.

    torchrun --max-restarts N tests/support/killed_train.py FAULTS FOLDER [arguments of launch/train.py]

FAULTS is a JSON list of {"moment", "step", "rank", "delay_s"} in the order of the faults. A moment is one of these:

- a task of the order
- "write": the thread of a rank writes its files of a checkpoint
- "complete": the actor's leader completes a checkpoint
- "join" (before the ranks meet), "connect" (before process groups are made) or "build" (of the roles), with step 0

The rank writes FOLDER/kill_<n> and dies, `delay_s` after the beginning of the moment or at its end. With "told": true
it writes its process id there and lives: the reader of the file decides about the fault. With "held": true it waits for
FOLDER/done_<n> before it begins.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rltrain import trainer as job
from rltrain.checkpoint import run_writer
from rltrain.checkpoint.run_folder import CheckpointFolder, name_of
from rltrain.cli.main import run_script
from rltrain.cli.train import begin_as_rank
from rltrain.trainer import Trainer
from tests.support.host_job import JOINS_WITHIN_S

LOOK_S, HELD_AT_MOST_S = 0.002, 60.0


class Faults:
    """The faults of a rank. The next fault is the first without a file, even after restarts by torchrun."""

    def __init__(self, faults: Sequence[dict[str, Any]], rank: int, folder: Path) -> None:
        self.faults, self.rank, self.folder = faults, rank, folder
        self._marking = threading.Lock()

    def during(self, moment: str, step: int, call: Callable[[], Any]) -> Any:
        """Runs `call` and causes the next fault during it if this is its moment."""
        number = next((i for i in range(len(self.faults)) if not self._mark(i).exists()), None)
        if number is None:
            return call()
        fault = self.faults[number]
        if (moment, step, self.rank) != (fault["moment"], fault["step"], fault["rank"]):
            return call()
        if fault.get("held"):
            self._happen(number)
            self._await(self.folder / f"done_{number}")
            return call()
        threading.Thread(target=self._happen_later, args=(number, fault["delay_s"]), daemon=True).start()
        result = call()
        self._happen(number)
        return result

    def _happen_later(self, number: int, delay_s: float) -> None:
        time.sleep(delay_s)
        self._happen(number)

    def _happen(self, number: int) -> None:
        with self._marking:
            if not self._mark(number).exists():
                new = self._mark(number).with_suffix(".new")
                new.write_text(str(os.getpid()))
                new.rename(self._mark(number))
        if not self.faults[number].get("told"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _await(self, file: Path) -> None:
        deadline = time.monotonic() + HELD_AT_MOST_S
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _mark(self, number: int) -> Path:
        return self.folder / f"kill_{number}"


def install(faults: Faults) -> None:
    execute, write, complete = Trainer._task, run_writer.write_files, CheckpointFolder.complete
    join, connect, build = job.join_within, job.start_process_groups, Trainer.__init__
    step_of = {f".{name_of(step)}.partial": step for step in range(1000)}

    def execute_or_fail(trainer: Trainer, position: int) -> None:
        entry = trainer.order[position]
        faults.during(entry.name, entry.step, lambda: execute(trainer, position))

    def write_or_fail(folder: Path, files: Any) -> Any:
        return faults.during("write", step_of[folder.name], lambda: write(folder, files))

    def complete_or_fail(folder: CheckpointFolder, step: int, *arguments: Any) -> None:
        faults.during("complete", step, lambda: complete(folder, step, *arguments))

    Trainer._task = execute_or_fail  # type: ignore[method-assign]
    run_writer.write_files = write_or_fail  # type: ignore[attr-defined]
    CheckpointFolder.complete = complete_or_fail  # type: ignore[method-assign]
    job.join_within = lambda limit_s: faults.during("join", 0, lambda: join(limit_s))
    job.start_process_groups = lambda world: faults.during("connect", 0, lambda: connect(world))
    Trainer.__init__ = lambda self, *given: faults.during(  # type: ignore[method-assign]
        "build", 0, lambda: build(self, *given)
    )


if __name__ == "__main__":
    begin_as_rank()
    job.RENDEZVOUS_TIMEOUT_S = float(os.environ.get(JOINS_WITHIN_S, job.RENDEZVOUS_TIMEOUT_S))
    install(Faults(json.loads(sys.argv[1]), int(os.environ["RANK"]), Path(sys.argv[2])))
    sys.exit(run_script("train", sys.argv[3:]))
