"""Runs the RUN instructions of a Dockerfile on this machine, in order, as the current user. The working directory is
the repository.

    python tests/support/dockerfile_steps.py docker/cpu.Dockerfile

Skips instructions with apt-get, with a message, if apt-get is not installed or the user is not root.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Yields (name, arguments) of each instruction, without comments and with continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name.upper(), arguments.strip()


def main(arguments: list[str]) -> int:
    """Returns the exit status of the first failing step, or 0."""
    can_install = shutil.which("apt-get") is not None and os.geteuid() == 0
    for name, command in instructions(Path(arguments[0]).read_text()):
        if name != "RUN":
            continue
        if "apt-get" in command and not can_install:
            print(f"skipped, because it needs root and apt-get: {command}", flush=True)
            continue
        print(f"RUN {command}", flush=True)
        done = subprocess.run(["/bin/sh", "-c", command], cwd=REPOSITORY, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
