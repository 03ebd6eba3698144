"""launch/train.py under torchrun --max-restarts, of which one rank is killed in every attempt.

torchrun --max-restarts N tests/end_to_end/killed_train.py KILLS FOLDER, then the arguments of launch/train.py. KILLS is
a JSON list with one object per attempt: {"moment", "step", "rank", "delay_s"}. A moment is a task of the order, "write"
(of a rank's files of a checkpoint, by its thread) or "complete" (of a checkpoint, by the actor's leader). The rank dies
`delay_s` after it has begun that, or at the end of it, and leaves the file FOLDER/kill_<attempt>.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltrain.checkpoint.run import writer
from rltrain.checkpoint.run.folder import CheckpointFolder, name_of
from rltrain.command import main
from rltrain.trainer import Trainer


class Kill:
    """What is to happen to this rank in this attempt."""

    def __init__(self, moment: str, step: int, delay_s: float, mark: Path) -> None:
        self.moment, self.step, self.delay_s, self.mark = moment, step, delay_s, mark

    def during(self, moment: str, step: int, call: Callable[[], Any]) -> Any:
        """`call`, in which this process dies if the moment has come."""
        if (moment, step) != (self.moment, self.step):
            return call()
        threading.Thread(target=self._die_later, daemon=True).start()
        call()
        self._die()

    def _die_later(self) -> None:
        time.sleep(self.delay_s)
        self._die()

    def _die(self) -> None:
        self.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def install(kill: Kill) -> None:
    execute, write, complete = Trainer._task, writer.write_files, CheckpointFolder.complete
    step_of = {f".{name_of(step)}.partial": step for step in range(1000)}

    def execute_or_die(trainer: Trainer, position: int) -> None:
        entry = trainer.order[position]
        kill.during(entry.name, entry.step, lambda: execute(trainer, position))

    def write_or_die(folder: Path, files: Any) -> Any:
        return kill.during("write", step_of[folder.name], lambda: write(folder, files))

    def complete_or_die(folder: CheckpointFolder, step: int, *arguments: Any) -> None:
        kill.during("complete", step, lambda: complete(folder, step, *arguments))

    Trainer._task = execute_or_die  # type: ignore[method-assign]
    writer.write_files = write_or_die  # type: ignore[attr-defined]
    CheckpointFolder.complete = complete_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    kills, attempt = json.loads(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(kills) and kills[attempt]["rank"] == int(os.environ["RANK"]):
        now = kills[attempt]
        install(Kill(now["moment"], now["step"], now["delay_s"], Path(sys.argv[2], f"kill_{attempt}")))
    sys.exit(main(sys.argv[3:]))
