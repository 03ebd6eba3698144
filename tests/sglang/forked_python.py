"""A stand-in for the interpreter of SGLang's environment.

It runs scripts in forks of one process with SGLang imported. This saves 20 s of CPU time per server. To its caller the
stand-in is the server: it has the same exit status, and killing it kills the server.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.forked.popen import NO_THREADS, REPOSITORY, ask

START_TIMEOUT_S = 600.0
SCRIPT = """#!{own_python} -IS
import sys
sys.path.insert(0, {repository!r})
from tests.sglang.forked_python import run_forked
run_forked({python!r}, {socket!r})
"""


@contextlib.contextmanager
def forked_python(python: str, environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Yields the path of the stand-in. The forks have imported SGLang in `environment`, with its output in
    `folder`/zygote.log."""
    script, socket = folder / "python", folder / "socket"
    repository = str(REPOSITORY)
    script.write_text(
        SCRIPT.format(own_python=sys.executable, repository=repository, python=python, socket=str(socket))
    )
    script.chmod(0o700)
    with (
        (folder / "zygote.log").open("wb") as log,
        subprocess.Popen(
            [python, "-W", "ignore", "-m", "tests.sglang.zygote", str(socket)],
            cwd=REPOSITORY,
            env=environment | NO_THREADS,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as zygote,
    ):
        wait_until_it_listens(zygote, socket)
        yield str(script)
        assert zygote.stdin is not None
        zygote.stdin.close()


def wait_until_it_listens(zygote: subprocess.Popen[bytes], socket: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not socket.exists():
        ended = zygote.poll() is not None
        if ended or time.monotonic() > deadline:
            zygote.kill()
            log = socket.with_name("zygote.log")
            said = log.read_text()[-4000:] if log.exists() else ""
            raise RuntimeError(f"SGLang's zygote {'ended' if ended else 'does not listen'}: {said}")
        time.sleep(0.05)


def run_forked(python: str, socket: str) -> None:
    """Runs the arguments of this process as `python` would. This is the program of the stand-in."""
    command = sys.argv[1:]
    if command[0].startswith("-"):
        os.execv(python, [python, *command])
    request = {
        "command": command,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "new_session": False,
        "parent": os.getpid(),
    }
    with ask(socket, request, [0, 1, 2]) as asked:
        asked.recv(1024)
        code = json.loads(asked.recv(1024))["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def forks_of(asker: int, python: str) -> list[int]:
    """Returns the processes forked for the process `asker`, if `python` is a stand-in: one while it runs."""
    socket = Path(python).with_name("socket")
    if not socket.exists():
        return []
    with ask(str(socket), {"ranks_of": asker}, []) as asked:
        return [*json.loads(asked.recv(65536)).values()]
