"""Runs an untrusted program with limits, without a network, and with no files except the given ones.

Failures of the program appear in its Outcome. Exceptions mean that there is no sandbox.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from rltrain.errors import SandboxError
from rltrain.sandbox.limits import ENDED, ERROR, STARTED, Limits, Outcome, in_order, receive, send
from rltrain.sandbox.process_limit import remove_group
from rltrain.sandbox.root_file_system import WORK_FOLDER, WRITABLE_FOLDER

# A program in a sandbox, in its caller.

START_TIMEOUT_S = 120.0
KEEPER_GRACE_S = 30.0
"""Additional seconds for a keeper after its program's time, on an overloaded machine."""
READ_BYTES = 65536


class Running:
    """A running program: pipes to it, and its end.

    It is a context manager. At its end all processes of the program are gone. They also end if this process ends in any
    way. Not thread-safe.
    """

    def __init__(
        self,
        keeper: "subprocess.Popen[bytes]",
        to_keeper: socket.socket,
        limits: Limits,
        spec: dict[str, Any],
        contents: Sequence[bytes],
    ) -> None:
        """Waits until the keeper has started the program. Raises SandboxError if it fails."""
        assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
        self.stdin: IO[bytes] = keeper.stdin
        self.stdout: IO[bytes] = keeper.stdout
        self.stderr: IO[bytes] = keeper.stderr
        self._keeper = keeper
        self._to_keeper = to_keeper
        self._limits = limits
        self._ended: dict[str, Any] | None = None
        self._folder = spec["folder"] if spec["means"] == "none" else None
        self._group: str | None = None
        self.uncounted = ""
        """The reason why the kernel does not limit the number of processes. Empty if it does."""
        try:
            to_keeper.settimeout(START_TIMEOUT_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the keeper's answer has the reason
                send(to_keeper, spec, contents)
            self._take_message()
        except BaseException:
            self.close()
            raise
        if self._ended is not None:
            self.close()
            raise SandboxError("the keeper process ended before it started the program")
        to_keeper.settimeout(KEEPER_GRACE_S)
        self._latest_end = time.monotonic() + limits.wall_s + KEEPER_GRACE_S

    def communicate(self, stdin: bytes = b"") -> Outcome:
        """Writes the whole input, and collects the output until the program has ended."""
        try:
            return self._communicate(stdin)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the program and all its processes, if they still run."""
        try:
            if self._ended is None:
                self._ask_to_end("caller")
            while self._ended is None:
                self._take_message(raises=False)
        finally:
            self._keeper.kill()
            self._keeper.wait()
            if self._folder is not None:  # in case the keeper could not
                shutil.rmtree(self._folder, ignore_errors=True)
            if self._group is not None:
                remove_group(self._group)
            for opened in (self.stdin, self.stdout, self.stderr, self._to_keeper):
                opened.close()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _communicate(self, stdin: bytes) -> Outcome:
        stdout, stderr = (_Output(self._limits.output_bytes) for _ in range(2))
        with selectors.DefaultSelector() as selector:
            selector.register(self._to_keeper, selectors.EVENT_READ, lambda: self._take_message())
            selector.register(self.stdout, selectors.EVENT_READ, lambda: self._read(self.stdout, stdout))
            selector.register(self.stderr, selectors.EVENT_READ, lambda: self._read(self.stderr, stderr))
            os.set_blocking(self.stdin.fileno(), False)
            given = _Input(stdin, self.stdin)
            selector.register(self.stdin, selectors.EVENT_WRITE, given.write)
            while selector.get_map():
                # After its end, only the remaining output is read.
                wait_s = 0.0 if self._ended else max(0.0, self._latest_end - time.monotonic())
                ready = selector.select(wait_s)
                for key, _ in ready:
                    if not key.data():
                        selector.unregister(key.fileobj)
                if self._ended and not ready:
                    break
                if not ready:
                    self._lose()
                if given.is_complete:
                    self.stdin.close()
        return self._outcome(stdout, stderr)

    def _read(self, stream: IO[bytes], output: "_Output") -> bool:
        """Returns whether there can be more output."""
        received = os.read(stream.fileno(), READ_BYTES)
        if received and output.add(received):
            self._ask_to_end("output")
        return bool(received)

    def _ask_to_end(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # the keeper is already ending
            send(self._to_keeper, {"end": reason})

    def _take_message(self, raises: bool = True) -> bool:
        """Returns whether there can be more messages."""
        try:
            message = receive(self._to_keeper)
        except TimeoutError:
            message = None
        if message is None:
            self._lose()
        elif STARTED in message:
            self._group, self.uncounted = message[STARTED]["group"], message[STARTED]["uncounted"]
        elif ENDED in message:
            self._ended = message
        elif raises and ERROR in message:
            raise SandboxError(f"the sandbox or its program cannot start: {message[ERROR]}")
        return self._ended is None

    def _lose(self) -> None:
        """Marks the program as lost and kills the keeper. The kernel ends the program with it."""
        self._keeper.kill()
        self._ended = {ENDED: "lost", "status": -signal.SIGKILL, "seconds": 0.0}

    def _outcome(self, stdout: "_Output", stderr: "_Output") -> Outcome:
        assert self._ended is not None
        reached = "output" if stdout.truncated or stderr.truncated else None
        return Outcome(
            status=self._ended["status"],
            stdout=bytes(stdout.kept),
            stderr=bytes(stderr.kept),
            ended_by=reached or self._ended[ENDED],
            seconds=self._ended["seconds"],
            stdout_truncated=stdout.truncated,
            stderr_truncated=stderr.truncated,
        )


class _Output:
    """The first `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept = bytearray()
        self.truncated = False

    def add(self, received: bytes) -> bool:
        """Appends the bytes. Returns True the first time that they exceed the limit."""
        room = self.limit - len(self.kept)
        self.kept += received[:room]
        first = len(received) > room and not self.truncated
        self.truncated |= len(received) > room
        return first


class _Input:
    """Bytes for a non-blocking pipe."""

    def __init__(self, content: bytes, pipe: IO[bytes]) -> None:
        self.unwritten = memoryview(content)
        self.pipe = pipe
        self.is_complete = False

    def write(self) -> bool:
        """Returns whether there is more to write and the pipe still has a reader."""
        try:
            self.unwritten = self.unwritten[os.write(self.pipe.fileno(), self.unwritten[:READ_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.unwritten = self.unwritten[:0]
        self.is_complete = not self.unwritten
        return not self.is_complete


# Files of the machine readable by a sandboxed program.

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
LINKER = ("/etc/ld.so.cache", "/etc/alternatives")
PROGRAMS = ("/usr/local/bin", "/usr/bin", "/bin")


class Visible(NamedTuple):
    """A file or folder at `path` in the sandbox. It is a symbolic link to `source`, or the machine's `source`
    itself."""

    path: str
    source: str
    is_link: bool = False


def interpreter(installed_packages: bool) -> str:
    """Returns the path of this process's Python, with or without the packages of its environment."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return sys.executable if installed_packages else os.path.realpath(base)


def visible_paths(installed_packages: bool, further: Sequence[str]) -> list[Visible]:
    """Returns the programs and libraries of the system and of Python, and the paths in `further`. With
    `installed_packages` it includes those of this process's environment. Missing paths and paths inside others are
    omitted."""
    links = [Visible(path, os.readlink(path), is_link=True) for path in SYSTEM if os.path.islink(path)]
    paths = [path for path in SYSTEM if not os.path.islink(path)]
    paths += [*LINKER, *_of_python(sys.base_prefix), *_of_python(os.path.realpath(sys.base_prefix)), *further]
    if installed_packages:
        paths += [*_of_python(sys.prefix), os.path.join(sys.prefix, "pyvenv.cfg")]
    there = sorted({os.path.abspath(path) for path in paths if os.path.exists(path)})
    shown = [*there, *(link.path for link in links)]
    outermost = [path for path in there if not any(path.startswith(other + "/") for other in shown)]
    return [*links, *(Visible(path, os.path.realpath(path)) for path in outermost)]


def _of_python(prefix: str) -> list[str]:
    return [os.path.join(prefix, folder) for folder in ("bin", "lib", "lib64")]


LAUNCHER = Path(__file__).with_name("launcher.py")
PROGRAM_FILE = "program.py"
MEANS = ("bubblewrap", "kernel", "none")


class Sandbox:
    """Starts programs by one of the means. `means.require` finds a working one.

    - `readable`: further paths of the machine, read-only at the same place. The programs and libraries of the system
      and of Python are always readable.
    - `installed_packages`: programs can import the packages of this process.

    With means "none" a program is a plain process with limits. It sees everything visible to this process.
    """

    def __init__(self, means: str, *, readable: Sequence[str] = (), installed_packages: bool = False) -> None:
        if means not in MEANS:
            raise ValueError(f"means {means!r}; expected one of {MEANS}")
        self.means = means
        self.python = interpreter(installed_packages)
        self._visible = visible_paths(installed_packages, readable)
        self._search_path = (os.path.dirname(self.python), *PROGRAMS)

    def run_python(
        self,
        text: str,
        arguments: Sequence[str] = (),
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Runs the text of a Python program in a folder with `files`."""
        files = {**(files or {}), PROGRAM_FILE: text.encode(errors="surrogatepass")}
        command = [self.python, "-s", "-B", PROGRAM_FILE, *arguments]
        return self.run(command, files=files, stdin=stdin, environment=environment, limits=limits)

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        host_port: int | None = None,
    ) -> Outcome:
        """Runs a program to its end. The arguments are those of `start`."""
        with self.start(command, files=files, environment=environment, limits=limits, host_port=host_port) as running:
            return running.communicate(stdin)

    def start(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        host_port: int | None = None,
    ) -> Running:
        """Starts a program and returns its pipes.

        - `command`: the program's name in PATH or its path on this machine, followed by its arguments.
        - `files`: maps names in its writable working folder to contents.
        - `environment`: its variables. It inherits none from this process.
        - `host_port`: the only reachable port of this machine's loopback, at 127.0.0.1 with the same number.

        Raises SandboxError if the sandbox cannot be made or the program is not in it.
        """
        limits, files = limits or Limits(), files or {}
        folder = WORK_FOLDER if self.means != "none" else _new_folder()
        environment = {**self._base_environment(folder), **(environment or {})}
        names, contents = in_order(files)
        spec = {
            "means": self.means,
            "bubblewrap": shutil.which("bwrap"),
            "command": [self._found(command[0], environment["PATH"]), *command[1:]],
            "environment": environment,
            "files": names,
            "visible": self._visible,
            "folder": folder,
            "limits": vars(limits),
            "host_port": host_port,
            "caller": os.getpid(),
        }
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = self._launch(theirs)
            except BaseException:
                ours.close()
                raise
        return Running(process, ours, limits, spec, contents)

    def _launch(self, channel_end: socket.socket) -> "subprocess.Popen[bytes]":
        """Starts the keeper in a new session, so that signals of a terminal do not reach it."""
        number = channel_end.fileno()
        return subprocess.Popen(
            [interpreter(installed_packages=False), "-I", "-S", str(LAUNCHER), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=[number],
            env={},
            cwd="/",
            start_new_session=True,
        )

    def _base_environment(self, folder: str) -> dict[str, str]:
        return {
            "PATH": ":".join(self._search_path),
            "HOME": folder,
            "TMPDIR": folder if self.means == "none" else WRITABLE_FOLDER,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",  # the cores are the job's
        }

    def _found(self, program: str, search_path: str) -> str:
        path = program if "/" in program else shutil.which(program, path=search_path)
        if path is None or not os.path.isfile(path):
            raise SandboxError(f"there is no program {program!r} in {search_path}")
        path = os.path.abspath(path)
        shown = [visible.path for visible in self._visible]
        if self.means != "none" and not any(path == other or path.startswith(other + "/") for other in shown):
            raise SandboxError(
                f"the program {path} is not readable in the sandbox; expected it below {', '.join(shown)}. Add "
                "its folder to the readable paths"
            )
        return path


def _new_folder() -> str:
    """Returns a path for the keeper's folder. The keeper creates it and removes it at the end."""
    import tempfile  # slow to import, and only needed here

    return os.path.join(tempfile.gettempdir(), f"sandbox-{os.urandom(16).hex()}")
