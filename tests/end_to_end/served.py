"""launch/serve.py in a forked process."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen

CHECKPOINT = REPOSITORY / "tests" / "warmed_up"


@contextmanager
def served(*options: str) -> Iterator[tuple[str, str, Popen]]:
    """(URL, token, process)"""
    command = [sys.executable, "-u", "launch/serve.py", "--checkpoint", str(CHECKPOINT), *options]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, cwd=REPOSITORY, env={**FORKED_ENVIRONMENT, "PATH": "/bin"}, text=True, **streams) as process:
        try:
            first, curl = process.stdout.readline(), process.stdout.readline()
            found = re.fullmatch(r"serving warmed_up at (http://127\.0\.0\.1:\d+)/v1 \(token (\S+)\)\n", first)
            assert found and curl.startswith(f"curl {found[1]}/v1/completions -H 'Authorization: Bearer {found[2]}'")
            yield found[1], found[2], process
        finally:
            process.kill()
