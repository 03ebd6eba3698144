"""Cases for test_stopping.py: ranks listen for signals in a job. One is killed or asked to stop."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.errors import ConfigError
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.stopping import StopRequest
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import join_world

NUM_RANKS = 3
FAULT_FILE = "fault"


def listen(folder: str = ".", within_s: float = 60.0) -> StopRequest:
    world = join_world(60.0)
    job_store = JobStore(world, guarded=True)
    job_store.heartbeat.start()
    Watchdog(job_store.heartbeat, job_store.observer, world.background, Path(folder), interval_s=0.2).start()
    stop = StopRequest(
        world.rank,
        world.background,
        job_store.observer,
        saves=True,
        within_s=within_s,
        last_resort=lambda: "nothing is left",
    )
    stop.listen()
    dist.barrier()
    return stop


def killed(folder: str) -> None:
    """Rank 2 is killed while rank 0 waits in a collective for the sleeping rank 1. No connection between these two
    breaks."""
    listen(folder)
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        time.sleep(0.5)
        Path(folder, FAULT_FILE).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1), group=pair)


def overdue(folder: str) -> None:
    """Rank 1 is asked to stop, and no boundary comes."""
    listen(folder, within_s=1.0)
    if dist.get_rank() == 1:
        Path(folder, FAULT_FILE).touch()
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def refused(folder: str) -> None:
    """Rank 0 ends the job while the others wait for it in a barrier. The barrier reports broken connections."""
    stop = listen(folder)
    if dist.get_rank() == 0:
        time.sleep(0.5)
        Path(folder, FAULT_FILE).touch()
        stop.ending.by(ConfigError("steps: got many"))
    dist.monitored_barrier()


def signalled_in_a_collective() -> list[str | None]:
    """Rank 0 is asked to stop while its main thread is inside a receive. The receive ends only after rank 1 has seen
    the request."""
    stop, message = listen(), torch.zeros(1)
    if dist.get_rank() == 0:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        dist.recv(message, src=1)
    elif dist.get_rank() == 1:
        deadline, boundary = time.monotonic() + 10, 0
        while stop.verdict(boundary) is None and time.monotonic() < deadline:
            boundary += 1
            time.sleep(0.05)
        dist.send(message + boundary, dst=0)
    verdicts = [] if dist.get_rank() else [stop.verdict(int(message)), stop.verdict(int(message) - 1)]
    stop.close()
    return verdicts
