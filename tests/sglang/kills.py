"""Lists the servers of running jobs and kills one."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path


def kill_a_server(metrics: Path, num_steps: int, logs: Path, timeout_s: float) -> None:
    """Kills a server as soon as so many steps are done."""
    deadline = time.monotonic() + timeout_s
    while not metrics.exists() or len(metrics.read_text().splitlines()) < num_steps:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
    os.kill(serving(ports(logs)[-1])[0], signal.SIGKILL)


def ports(logs: Path) -> list[int]:
    """Returns the ports of the servers in the logs, one per start."""
    headers = [line for log in sorted(logs.glob("*.log")) for line in log.read_text().splitlines()]
    return [int(found[1]) for line in headers if (found := re.match(r"=====.*http://127\.0\.0\.1:(\d+)", line))]


def serving(port: int) -> list[int]:
    """Returns the processes that serve at a port, the oldest first. The others are its forks, until they rename
    themselves."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text(errors="replace")
            serves = "rltrain_serve.py" in command and "rltrain_supervise.py" not in command
            if serves and f'"port": {port},' in command:
                found.append(int(path.parent.name))
    return sorted(found)
