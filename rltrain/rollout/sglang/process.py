"""An SGLang server as a child process that never outlives its rank."""

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable

from rltrain.errors import EngineError, cannot_write
from rltrain.rollout.sglang.arguments import server_arguments
from rltrain.rollout.sglang.spec import SERVER_FOLDER, ServerSpec, server_environment
from rltrain.runtime.messages import family_of

TOKEN_VARIABLE = "RLTRAIN_SGLANG_TOKEN"
POLL_S = 0.1
ANSWER_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 30.0
LOG_TAIL_LINES, LOG_LINE_CHARS = 20, 300


class Server:
    """One server, started as often as need be; every start has a port and a token of its own."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.url = ""
        self.token = ""
        self.num_starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._log_start_bytes = 0
        self._reserved: list[socket.socket] = []

    def start(self) -> None:
        """Start the server and return at once. From the main thread: the kernel ends it when its starter's thread ends.

        Raises ValueError while it runs, ConfigError where the log cannot be written.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("start() in another thread than the main one, with whose end the server would be killed")
        if self._process is not None and self._process.poll() is None:
            raise ValueError("start() of a server that runs")
        self._release_ports()
        self._reserved = [_reserve_port(self.spec.host), _reserve_port("")]
        port, rendezvous_port = (reserved.getsockname()[1] for reserved in self._reserved)
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        self.url, self.token = f"http://{host}:{port}", secrets.token_urlsafe(32)
        self.num_starts += 1
        self._killed = False
        arguments = json.dumps(server_arguments(self.spec, port, rendezvous_port))
        serve = [self.spec.python, str(SERVER_FOLDER / "rltrain_serve.py"), arguments]
        supervise = [sys.executable, str(SERVER_FOLDER / "rltrain_supervise.py"), str(os.getpid())]
        environment = server_environment(self.spec) | {TOKEN_VARIABLE: self.token}
        try:
            self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.spec.log_path.open("ab") as log:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                log.write(f"===== {now}: start {self.num_starts}, {self.url}: {arguments}\n".encode())
                log.flush()
                self._log_start_bytes = log.tell()
                # A session of its own: who kills the rank's process group must not kill the supervisor, which then
                # has the rest of the tree to kill.
                self._process = subprocess.Popen(
                    [*supervise, *serve],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise cannot_write(self.spec.log_path, error) from error

    def wait_until_ready(self, timeout_s: float, advance: Callable[[], None]) -> None:
        """Until the server takes requests; of an engine over several nodes, on all but the first, while it lives.

        `advance` is called whenever something has been added to the log; `timeout_s` runs while nothing is. Raises
        EngineError with the end of the log when the server ends or the time is up, after which it does not run.
        """
        size_bytes, since_s = -1, time.monotonic()
        while True:
            ending = self.ending
            if ending is not None:
                self.kill()
                raise EngineError(f"{self._failed(f'{ending} before it took requests')}{self._log_tail()}")
            if self.spec.node_rank > 0 or self._answers():
                self._release_ports()
                return
            now_bytes = self.spec.log_path.stat().st_size
            if now_bytes != size_bytes:
                size_bytes, since_s = now_bytes, time.monotonic()
                advance()
            elif time.monotonic() - since_s > timeout_s:
                self.kill()
                raise EngineError(
                    f"{self._failed(f'has not got ready, and added nothing to its log for {timeout_s:g} s')} "
                    f"({self.spec.config_key}.start_timeout_s: raise it for a larger model or a slower disk)"
                    f"{self._log_tail()}"
                )
            time.sleep(POLL_S)

    @property
    def ending(self) -> str | None:
        """None while the server runs, else how it ended: "ended with exit status 1"."""
        if self._process is None:
            return "has not been started"
        status = self._process.poll()
        if status is None:
            return None
        if self._killed:
            return "was ended by its rank"
        if status < 0:
            return f"lost its supervisor to {_signal_name(-status)}"
        return f"was killed by {_signal_name(status - 128)}" if status > 128 else f"ended with exit status {status}"

    def kill(self) -> None:
        """End the server and every process that it has started; they are gone when this returns. May be repeated.

        Raises EngineError where the kernel does not let go of them.
        """
        self._release_ports()
        if self._process is None or self._process.poll() is not None:
            return
        self._killed = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill_group(self._process)

    def _kill_group(self, supervisor: subprocess.Popen[bytes]) -> None:
        """For a supervisor that hangs, or waits for a process that the kernel holds: all that is in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        try:
            supervisor.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{self._failed(f'is still there {2 * KILL_TIMEOUT_S:g} s after it was killed')} as process "
                f"{supervisor.pid}; its device hangs: look at the machine's kernel log"
            ) from error

    def _answers(self) -> bool:
        request = urllib.request.Request(f"{self.url}/model_info", headers={"Authorization": f"Bearer {self.token}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):  # URLError, HTTPError and timeouts are OSErrors
            return False

    def _failed(self, what: str) -> str:
        return f"{self.spec.config_key}: the server of {self.spec.model_path} (start {self.num_starts}) {what}"

    def _log_tail(self) -> str:
        with self.spec.log_path.open("rb") as log:
            log.seek(self._log_start_bytes)
            lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        shown = "\n".join(f"  {line[:LOG_LINE_CHARS]}" for line in lines) if lines else "  (nothing)"
        return (
            f"; what it was given is in {self.spec.config_key}.args. The end of its log, {self.spec.log_path}:\n{shown}"
        )

    def _release_ports(self) -> None:
        for reserved in self._reserved:
            reserved.close()
        self._reserved = []


def _reserve_port(host: str) -> socket.socket:
    """A socket on a free port, "" being every address: held, so that no other process is given the port.

    The server can have it all the same: it too sets SO_REUSEADDR, and this socket never listens.
    """
    family = family_of(host)
    reserved = socket.socket(family)
    reserved.bind((host, 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
