"""An SGLang server as a child process: what it gets to see, and that nothing of it is left. Needs no SGLang."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltrain.errors import EngineError
from rltrain.rollout.servers.sglang_process import Server, ServerSpec
from tests.unit.server_stand_in import write_interpreter

REPOSITORY = Path(__file__).resolve().parents[2]
START_S, GONE_S = 60.0, 20.0


def make_spec(folder: Path, **args: Any) -> ServerSpec:
    return ServerSpec(
        python=write_interpreter(folder),
        model_path="a-model",
        device="cpu",
        dtype="float32",
        tp=1,
        gpus=(),
        host="127.0.0.1",
        log_path=folder / "logs" / "engine.log",
        max_running_requests=4,
        max_context_tokens=16,
        needs_tokenizer=False,
        memory_saver=False,
        fp8=False,
        draws_during_syncs=False,
        args=args,
    )


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """make_server(**args of the stand-in), ended with the test."""
    servers: list[Server] = []

    def make(**args: Any) -> Server:
        servers.append(Server(make_spec(tmp_path, **args)))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def start(server: Server, timeout_s: float = START_S) -> None:
    server.start()
    server.wait_until_ready(timeout_s, lambda: None)


def read_record(path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline_s, "the server has not started"
        time.sleep(0.02)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + GONE_S
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline_s, f"{left} of {pids} still live"
        time.sleep(0.02)


def test_the_environment_is_not_that_of_a_rank(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR"]
    dropped += ["MASTER_PORT", "TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"]
    dropped += ["TORCH_GLOO_LAZY_INIT"]
    dropped += ["PYTORCH_CUDA_ALLOC_CONF", "PYTHONHASHSEED"]
    for name in [*dropped, "PYTHONPATH"]:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    environment = read_record(tmp_path / "record")["environment"]
    assert not set(dropped) & environment.keys()
    assert environment["PYTHONPATH"] == str(REPOSITORY / "rltrain/rollout/servers/in_sglang")
    assert (environment["OMP_NUM_THREADS"], environment["NCCL_SOCKET_IFNAME"]) == ("3", "eth7")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_token_is_on_no_command_line_and_not_in_the_log(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    pids = read_record(tmp_path / "record")["pids"]
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert all(commands) and b"rltrain_supervise.py" in commands[0] and b"rltrain_serve.py" in commands[1]
    assert len(server.token) >= 32
    assert not any(server.token.encode() in command for command in commands)
    assert server.token not in server.spec.log_path.read_text()


def test_kill_leaves_nothing_and_may_be_repeated(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    record = read_record(tmp_path / "record")
    temporary = Path(record["environment"]["TMPDIR"])
    assert server.ending is None and all(map(lives, record["pids"])) and temporary.is_dir()
    for _ in range(2):
        server.kill()
        assert not any(map(lives, record["pids"]))
        assert not temporary.exists()
        assert server.ending == "was ended by its rank"


RANK = """
import sys, time
from pathlib import Path
from rltrain.rollout.servers.sglang_process import Server
from tests.unit.test_sglang_process import make_spec, start
start(Server(make_spec(Path(sys.argv[1]), record=sys.argv[2])))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_dies_with_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path), str(tmp_path / "record")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
            record = read_record(tmp_path / "record")
            assert all(map(lives, record["pids"]))
        finally:
            os.killpg(rank.pid, number)  # as torchrun ends a rank
    wait_until_gone(record["pids"])
    assert not Path(record["environment"]["TMPDIR"]).exists()


def test_a_server_that_ends_takes_along_what_it_started(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    pids = read_record(tmp_path / "record")["pids"]
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids)
    assert server.ending == "was killed by SIGKILL"


def test_a_server_dies_with_its_supervisor(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(record=str(tmp_path / "record"))
    start(server)
    record = read_record(tmp_path / "record")
    supervisor, *others = record["pids"]
    try:
        os.kill(supervisor, signal.SIGKILL)
        wait_until_gone([supervisor, others[0]])
        assert server.ending == "lost its supervisor to SIGKILL"
    finally:
        for pid in filter(lives, others[1:]):  # of SGLang's processes each watches its parent
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(record["environment"]["TMPDIR"])


def test_a_server_that_ends_while_it_starts_shows_its_log(make_server: Callable[..., Server]) -> None:
    server = make_server(lines=100, exit=3)
    server.start()
    with pytest.raises(EngineError) as error:
        server.wait_until_ready(START_S, lambda: None)
    message = str(error.value)
    assert "rollout.sglang: the server of a-model (start 1) ended with exit status 3 before" in message
    assert "rollout.sglang.args" in message and str(server.spec.log_path) in message
    assert "line 99" in message and "line 80" in message and "line 79" not in message
    assert server.ending == "ended with exit status 3"


def test_an_interpreter_that_is_not_there_is_in_the_log(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    Path(spec.python).unlink()
    server = Server(spec)
    server.start()
    with pytest.raises(EngineError, match=f"cannot run {spec.python}"):
        server.wait_until_ready(START_S, lambda: None)


def test_the_start_timeout_runs_only_while_the_log_does_not_grow(make_server: Callable[..., Server]) -> None:
    timeout_s, num_lines, line_s = 1.5, 12, 0.2
    server = make_server(lines=num_lines, line_s=line_s)
    advances: list[float] = []
    server.start()
    began_s = time.monotonic()
    server.wait_until_ready(timeout_s, lambda: advances.append(time.monotonic()))
    assert time.monotonic() - began_s > num_lines * line_s > timeout_s
    assert len(advances) > num_lines / 2


def test_a_silent_start_runs_out_of_time(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(lines=3, silent=True, record=str(tmp_path / "record"))
    server.start()
    pids = read_record(tmp_path / "record")["pids"]
    with pytest.raises(
        EngineError, match=r"added nothing to its log for 1\.5 s \(rollout\.sglang\.start_timeout_s"
    ) as e:
        server.wait_until_ready(1.5, lambda: None)
    assert "line 2" in str(e.value)
    assert not any(map(lives, pids))


def test_an_answer_that_is_not_http_is_none_yet(make_server: Callable[..., Server]) -> None:
    server = make_server(garbled=2)
    start(server)
    assert server.ending is None


def test_a_start_may_follow_an_end(make_server: Callable[..., Server]) -> None:
    server = make_server(lines=1)
    assert server.ending == "has not been started"
    start(server)
    first = server.url, server.token
    with pytest.raises(ValueError, match="that runs"):
        server.start()
    server.kill()
    start(server)
    assert server.ending is None
    assert server.token != first[1] and server.url.startswith("http://127.0.0.1:")
    headers = [line for line in server.spec.log_path.read_text().splitlines() if line.startswith("=====")]
    assert [f"start {n}, " in header for n, header in enumerate(headers, 1)] == [True, True]


def test_only_the_main_thread_starts_servers(make_server: Callable[..., Server]) -> None:
    server, raised = make_server(), []

    def in_thread() -> None:
        try:
            server.start()
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert raised and "main" in raised[0] and server.ending == "has not been started"


def test_nobody_else_gets_the_ports_of_a_server_that_starts(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(silent=True, record=str(tmp_path / "record"))
    server.start()
    own = read_record(tmp_path / "record")["given"]["own"]
    ports = [own["port"], own["nccl_port"]]
    assert server.url.endswith(f":{ports[0]}") and ports[0] != ports[1]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    server.kill()
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_another_node_is_ready_while_its_process_lives(tmp_path: Path) -> None:
    fields = vars(make_spec(tmp_path, silent=True, record=str(tmp_path / "record")))
    server = Server(ServerSpec(**fields | {"node_rank": 1, "num_nodes": 2, "rendezvous": "10.0.0.1:4000", "tp": 16}))
    try:
        start(server)
        own = read_record(tmp_path / "record")["given"]["own"]
        assert (own["nnodes"], own["node_rank"], own["dist_init_addr"], own["tp_size"]) == (2, 1, "10.0.0.1:4000", 16)
    finally:
        server.kill()
