"""Runs launch/train.py with a fault: one rank sleeps or is killed at the beginning of a task.

    torchrun tests/support/faulty_train.py TASK STEP RANK sleep|kill FOLDER [arguments of launch/train.py]

The rank writes the file FOLDER/fault when it fails.
"""

import os
import signal
import sys
import time
from pathlib import Path

from rltrain.cli.main import run_script
from rltrain.trainer import Trainer


def fall_asleep() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install_fault(task: str, step: int, rank: int, how: str, folder: Path) -> None:
    execute = Trainer._task

    def execute_or_fail(trainer: Trainer, position: int) -> None:
        entry = trainer.order[position]
        if (entry.name, entry.step, trainer.rank) == (task, step, rank):
            (folder / "fault").touch()
            {"sleep": fall_asleep, "kill": die}[how]()
        execute(trainer, position)

    Trainer._task = execute_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    task, step, rank, how, folder = sys.argv[1:6]
    install_fault(task, int(step), int(rank), how, Path(folder))
    sys.exit(run_script("train", sys.argv[6:]))
