import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked.popen import FORKED_ENVIRONMENT, REPOSITORY, Popen

CHECKPOINT = REPOSITORY / "tests" / "warmed_up"


@contextmanager
def served(*options: str, checkpoint: Path = CHECKPOINT) -> Iterator[tuple[str, str, Popen]]:
    """Runs launch/serve.py in a forked process and yields (URL, token, process)."""
    command = [sys.executable, "-u", "launch/serve.py", "--checkpoint", str(checkpoint), *options]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, cwd=REPOSITORY, env={**FORKED_ENVIRONMENT, "PATH": "/bin"}, text=True, **streams) as process:
        try:
            first, curl = process.stdout.readline(), process.stdout.readline()
            found = re.fullmatch(rf"serving {checkpoint.name} at (http://127\.0\.0\.1:\d+)/v1 \(token (\S+)\)\n", first)
            assert found and curl.replace("/chat/", "/").startswith(
                f"curl {found[1]}/v1/completions -H 'Authorization: Bearer {found[2]}'"
            )
            yield found[1], found[2], process
        finally:
            process.kill()
