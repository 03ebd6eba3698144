"""The sandbox runs programs within limits, by the means of the machine."""

import errno
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError, SandboxError
from rltrain.runtime.machine import JobThread
from rltrain.sandbox import means as machine
from rltrain.sandbox import system_calls
from rltrain.sandbox.limits import MIB, Limits
from rltrain.sandbox.means import MeansFinding, require
from rltrain.sandbox.sandbox import Sandbox
from rltrain.sandbox.system_calls import NEW_NAMESPACES
from tests.support.sandboxes import PROTECTING, new_mark, processes_with, sandbox_by, wait_for_ends

REPOSITORY = Path(__file__).resolve().parents[2]
SLEEP = "import os, time; print(os.getcwd(), flush=True); time.sleep(600)"


@pytest.fixture(params=[*PROTECTING, "none"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return sandbox_by(request.param)


@pytest.fixture
def unprotected() -> Sandbox:
    return sandbox_by("none")


def test_a_program_gets_files_arguments_and_input(sandbox: Sandbox) -> None:
    program = """
import sys, there.module
print(there.module.NAME, open("there/data").read(), sys.argv[1], sys.stdin.read())
print("error", file=sys.stderr)
sys.exit(3)
"""
    files = {"there/module.py": b"NAME = 'module'", "there/data": b"data"}
    outcome = sandbox.run_python(program, ["argument"], files=files, stdin=b"input")
    assert (outcome.stdout, outcome.stderr) == (b"module data argument input\n", b"error\n")
    assert (outcome.status, outcome.ended_by, outcome.succeeded) == (3, None, False)
    assert 0 < outcome.seconds < 60


def test_commands_of_the_system_are_found(sandbox: Sandbox) -> None:
    outcome = sandbox.run(["sh", "-c", "echo > made; ls; cat"], stdin=b"from cat")
    assert outcome.succeeded and outcome.stdout == b"made\nfrom cat"


def test_a_signal_that_ends_a_program_is_told(sandbox: Sandbox) -> None:
    outcome = sandbox.run_python("import os; os.abort()")
    expected = 128 + signal.SIGABRT if sandbox.means == "bubblewrap" else -signal.SIGABRT
    assert outcome.status == expected and outcome.ended_by is None


def test_more_than_pipes_hold_goes_in_and_out_at_once(sandbox: Sandbox) -> None:
    echo = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    data = bytes(range(256)) * 4096
    outcome = sandbox.run_python(echo, stdin=data, limits=Limits(output_bytes=2 * MIB))
    assert outcome.stdout == data and not outcome.stdout_truncated


def test_input_that_nobody_reads_is_no_error(unprotected: Sandbox) -> None:
    assert unprotected.run_python("print('done')", stdin=bytes(MIB)).stdout == b"done\n"


def test_output_is_cut_at_the_limit_and_not_before(unprotected: Sandbox) -> None:
    at_limit, beyond = (
        unprotected.run_python(f"print('x' * {n})", limits=Limits(output_bytes=1001)) for n in (1000, 1001)
    )
    assert (len(at_limit.stdout), at_limit.stdout_truncated, at_limit.ended_by) == (1001, False, None)
    assert (len(beyond.stdout), beyond.stdout_truncated, beyond.ended_by) == (1001, True, "output")


def test_means_none_still_limits_and_ends_everything(unprotected: Sandbox) -> None:
    mark = new_mark()
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(600)\nprint('left')"
    assert unprotected.run_python(daemon, [mark]).stdout == b"left\n"
    assert unprotected.run_python(SLEEP, [mark], limits=Limits(wall_s=0.3)).ended_by == "time"
    assert b"MemoryError" in unprotected.run_python("bytearray(2**28)", limits=Limits(memory_bytes=100 * MIB)).stderr
    assert unprotected.run_python("while True: pass", limits=Limits(cpu_s=0.1)).ended_by == "cpu"
    bomb = "import os, time\nfor _ in range(100):\n  if os.fork() == 0: time.sleep(600)\ntime.sleep(600)"
    outcome = unprotected.run_python(bomb, [mark], limits=Limits(num_processes=20))
    assert outcome.ended_by == "processes" or b"Resource temporarily unavailable" in outcome.stderr
    assert processes_with(mark) == []


def test_means_none_protects_from_nothing_else(
    unprotected: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "a-secret")
    (tmp_path / "checkpoint").write_text("weights")
    program = "import os, sys; print(open(sys.argv[1]).read(), os.environ.get('API_TOKEN'))"
    assert unprotected.run_python(program, [str(tmp_path / "checkpoint")]).stdout == b"weights None\n"


def test_a_link_that_a_program_leaves_is_not_followed(unprotected: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    outcome = unprotected.run_python(
        "import os, sys; os.symlink(sys.argv[1], 'link'); print(os.getcwd())", [str(tmp_path)]
    )
    assert not Path(outcome.stdout.decode().strip()).exists()
    assert (tmp_path / "precious").read_text() == "kept"


def test_limits_are_numbers_above_0() -> None:
    with pytest.raises(ValueError, match="'wall_s': 0.*expected numbers above 0"):
        Limits(wall_s=0)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "", "a//b", ".", "a\0b"])
def test_files_cannot_be_given_elsewhere(unprotected: Sandbox, name: str) -> None:
    with pytest.raises(ValueError, match="within the program's folder"):
        unprotected.run(["true"], files={name: b""})


def test_a_program_that_is_not_there_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="there is no program 'no-such-program'"):
        sandbox.run(["no-such-program"])


def test_a_program_that_cannot_be_seen_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.touch()
    with pytest.raises(SandboxError, match="Add its folder to the readable paths"):
        sandbox_by("kernel").run([str(script)])


@pytest.mark.parametrize("means", ["kernel", "none"])
def test_what_is_no_program_is_an_error(means: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("not a program")
    for path in (script, tmp_path):
        path.chmod(0o755)
    with pytest.raises(SandboxError, match="Exec format error"):
        sandbox_by(means, readable=[str(tmp_path)]).run([str(script)])


def test_files_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(SandboxError, match="No space left"):
        sandbox_by("kernel").run(["true"], files={"large": bytes(2 * MIB)}, limits=Limits(written_bytes=MIB))


def test_readable_folders_are_seen_and_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("data")
    tmp_path.chmod(0o755)
    sandbox = sandbox_by("kernel", readable=[str(tmp_path)])
    outcome = sandbox.run(["sh", "-c", f"cat {tmp_path}/data; rm {tmp_path}/data; touch {tmp_path}/new"])
    assert outcome.stdout == b"data" and outcome.stderr.count(b"Read-only file system") == 2


def test_installed_packages_can_be_had() -> None:
    program = (
        "import os, sys, importlib.util; print(importlib.util.find_spec('pytest') and os.path.exists(sys.argv[1]))"
    )
    assert sandbox_by("kernel", installed_packages=True).run_python(program, [sys.prefix]).stdout == b"True\n"
    if sys.prefix != sys.base_prefix:
        assert (
            sandbox_by("kernel").run_python("import os, sys; print(os.path.exists(sys.argv[1]))", [sys.prefix]).stdout
            == b"False\n"
        )


def test_a_program_can_be_talked_to(sandbox: Sandbox) -> None:
    adder = "import sys\nfor line in sys.stdin:\n  print(eval(line), flush=True)"
    with sandbox.start([sandbox.python, "-c", adder]) as running:
        for question, answer in (b"1 + 1\n", b"2\n"), (b"3 * 4\n", b"12\n"):
            running.stdin.write(question)
            assert running.stdout.read(100) == answer
        outcome = running.communicate(b"5\n")
    assert (outcome.stdout, outcome.status) == (b"5\n", 0)


def test_closing_ends_a_program(sandbox: Sandbox) -> None:
    mark = new_mark()
    with sandbox.start([sandbox.python, "-c", SLEEP, mark]) as running:
        assert running.stdout.read(100).startswith(b"/")
        assert processes_with(mark)
    assert processes_with(mark) == []
    running.close()


def test_programs_run_beside_each_other_in_threads(unprotected: Sandbox) -> None:
    """They continue after the end of their starting thread."""
    started = []
    echo = "import sys; print(sys.stdin.read())"
    threads = [JobThread(target=lambda: started.append(unprotected.start(["python3", "-c", echo]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [running.communicate(b"%d" % n).stdout for n, running in enumerate(started)] == [
        b"0\n",
        b"1\n",
        b"2\n",
        b"3\n",
    ]


CALLER = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
from rltrain.sandbox.sandbox import Sandbox
sandbox = Sandbox(sys.argv[1])
with sandbox.start([sandbox.python, "-c", {SLEEP!r}, sys.argv[2]]) as running:
    print(running.stdout.read(100).decode(), end="", flush=True)
    running.communicate()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_program_ends_with_its_caller(sandbox: Sandbox, number: signal.Signals) -> None:
    mark = new_mark()
    command = [sys.executable, "-c", CALLER, sandbox.means, mark]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as caller:
        assert caller.stdout is not None and caller.stdout.readline().startswith(b"/")
        left = processes_with(mark)
        assert len(left) > 1
        caller.send_signal(number)
        caller.wait(timeout=60)
    wait_for_ends(left)
    assert processes_with(mark) == []


def test_a_program_ends_with_its_keeper(sandbox: Sandbox) -> None:
    mark = new_mark()
    with sandbox.start([sandbox.python, "-c", SLEEP, mark]) as running:
        folder = Path(running.stdout.read(100).decode().strip())
        left = processes_with(mark)
        os.kill(running._keeper.pid, signal.SIGKILL)
        outcome = running.communicate()
    assert outcome.ended_by == "lost"
    wait_for_ends(left)
    if sandbox.means == "none":
        assert not folder.exists()


ALLOWED = "allowed"
OTHER_PROCESSOR = 0x40000003


def verdict(machine: str, number: int, *arguments: int, internet: bool = False, processor: int | None = None) -> str:
    """Returns the kernel's answer to a call: "allowed", "killed" or the name of an error."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    processor = system_calls.ARCHITECTURES[machine] if processor is None else processor
    data = struct.pack("=iIQ6Q", number - 2**32 if number >= 2**31 else number, processor, 0, *words)
    code = system_calls.as_bytes(system_calls.program(machine, internet))
    accumulator = place = 0
    while True:
        operation, if_held, if_not, operand = struct.unpack_from("=HBBI", code, 8 * place)
        place += 1
        if operation == system_calls.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == system_calls.RETURN:
            if operand == system_calls.ALLOW:
                return ALLOWED
            return "killed" if operand == system_calls.KILL_PROCESS else errno.errorcode[operand & 0xFFFF]
        else:
            held = {
                system_calls.JUMP_IF_EQUAL: accumulator == operand,
                system_calls.JUMP_IF_GREATER_EQUAL: accumulator >= operand,
                system_calls.JUMP_IF_ANY_BIT: accumulator & operand != 0,
            }[operation]
            place += if_held if held else if_not


MACHINES = pytest.mark.parametrize(("column", "machine"), list(enumerate(system_calls.ARCHITECTURES)))


@MACHINES
@settings(max_examples=150, derandomize=True, deadline=None)
@given(number=st.integers(0, 500), argument=st.integers(0, 2**64 - 1))
def test_what_is_denied_fails_and_all_else_goes_on(column: int, machine: str, number: int, argument: int) -> None:
    denied = {numbers[column] for numbers in system_calls.DENIED.values()}
    if number in denied:
        assert verdict(machine, number, argument) == "EPERM"
    elif number not in {numbers[column] for numbers in system_calls.LOOKED_AT.values()}:
        assert verdict(machine, number, argument) == ALLOWED


@MACHINES
def test_every_denied_call_is_denied(column: int, machine: str) -> None:
    numbers = [numbers[column] for numbers in system_calls.DENIED.values() if numbers[column] != -1]
    assert len({*numbers}) == len(numbers)
    assert {verdict(machine, number) for number in numbers} == {"EPERM"}


@MACHINES
@settings(max_examples=100, derandomize=True, deadline=None)
@given(flags=st.integers(0, 2**32 - 1))
@example(flags=17)
@example(flags=0x3D0F00)  # the flags of a new thread
def test_no_process_is_made_in_new_namespaces(column: int, machine: str, flags: int) -> None:
    is_new = any(flags & flag for flag in NEW_NAMESPACES.values())
    assert verdict(machine, system_calls.LOOKED_AT["clone"][column], flags) == ("EPERM" if is_new else ALLOWED)


@MACHINES
@settings(max_examples=100, derandomize=True, deadline=None)
@given(family=st.integers(0, 50), internet=st.booleans())
def test_sockets_are_made_for_few_families(column: int, machine: str, family: int, internet: bool) -> None:
    allowed = {1, 2, 10} if internet else {1}
    found = verdict(machine, system_calls.LOOKED_AT["socket"][column], family, internet=internet)
    assert found == (ALLOWED if family in allowed else "EPERM")


@MACHINES
def test_nobody_types_on_a_terminal_for_somebody_else(column: int, machine: str) -> None:
    ioctl = system_calls.LOOKED_AT["ioctl"][column]
    assert {verdict(machine, ioctl, 0, request) for request in (0x5412, 0x541C, 0x5412 + 2**32)} == {"EPERM"}
    assert verdict(machine, ioctl, 0x5412, 0x5401) == ALLOWED


def test_calls_by_another_table_are_none() -> None:
    """The numbers of 32-bit calls on a 64-bit kernel, and of x32's calls, have other meanings."""
    assert verdict("x86_64", 0, processor=OTHER_PROCESSOR) == "killed"
    assert verdict("x86_64", 0x40000000 + 101) == "ENOSYS"
    assert verdict("x86_64", system_calls.LOOKED_AT["clone3"][0]) == "ENOSYS"


WORKS, FAILS = MeansFinding(works=True, text=""), MeansFinding(works=False, text="no namespaces")


@pytest.mark.parametrize(
    ("setting", "bubblewrap", "kernel", "expected"),
    [
        ("auto", WORKS, WORKS, "bubblewrap"),
        ("auto", FAILS, WORKS, "kernel"),
        ("kernel", WORKS, WORKS, "kernel"),
        ("none", FAILS, FAILS, "none"),
    ],
)
def test_a_setting_takes_what_works(
    monkeypatch: pytest.MonkeyPatch, setting: str, bubblewrap: MeansFinding, kernel: MeansFinding, expected: str
) -> None:
    monkeypatch.setattr(machine, "means", lambda: {"bubblewrap": bubblewrap, "kernel": kernel})
    assert require(setting) == expected


def test_without_means_it_refuses_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "means", lambda: {"bubblewrap": FAILS, "kernel": FAILS})
    with pytest.raises(ConfigError, match="a.b: auto: .*bubblewrap: no namespaces; kernel: .*or a.b: none for limits"):
        require("auto", key="a.b")
    monkeypatch.setattr(machine, "means", lambda: {"bubblewrap": FAILS, "kernel": WORKS})
    with pytest.raises(ConfigError, match="or sandbox: kernel, which works here"):
        require("bubblewrap")
    with pytest.raises(ConfigError, match="'docker' is unknown; expected one of auto, bubblewrap, kernel, none"):
        require("docker")


FINDINGS = """
import json
from rltrain.sandbox.means import means
from rltrain.sandbox.sandbox import Sandbox
found = means()["kernel"]
outcome = Sandbox("kernel").run(["ls", "/"]) if found.works else None
print(json.dumps([found.works, found.text, outcome and outcome.stdout.decode().split()]))
"""


def findings_in(preparation: str) -> Any:
    """Returns the findings about the kernel's means in new user namespaces, after shell commands there."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode:
        pytest.skip("no user namespace to prepare such a machine in")
    script = f'{preparation} && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", sys.executable, "-c", FINDINGS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


def test_a_machine_without_user_namespaces_is_recognised() -> None:
    works, text, _ = findings_in("echo 0 > /proc/sys/user/max_user_namespaces")
    assert not works and "user.max_user_namespaces" in text


def test_a_container_whose_proc_is_covered_has_sandboxes_without_one() -> None:
    sandbox_by("kernel")
    works, text, there = findings_in("mount -t tmpfs none /proc/fs")
    assert works and "no /proc" in text
    assert "proc" not in there and "usr" in there


WITHOUT_USER_NAMESPACES = f"""
import os, socket
from pathlib import Path
from rltrain.sandbox.system_calls import clone
ours, theirs = socket.socketpair()
pid = clone(["user", "mount"])
if pid:
    for kind in ("uid_map", "gid_map"):
        Path(f"/proc/{{pid}}/{{kind}}").write_text("0 0 65536")
    ours.send(b"m")
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
theirs.recv(1)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
{FINDINGS}
print(Sandbox("kernel").run(["sh", "-c", "id -u; cat /proc/self/status"]).stdout.decode())
"""


def test_the_superuser_needs_no_user_namespace() -> None:
    """Its programs then run as the user nobody."""
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user")
    sandbox_by("kernel")
    command = [sys.executable, "-c", WITHOUT_USER_NAMESPACES]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    findings, uid, *status = done.stdout.splitlines()
    assert json.loads(findings)[0], findings
    assert uid == "65534" and {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "Seccomp:\t2"} <= {*status}


AS_ANOTHER_USER = """
import json, sys
from rltrain.sandbox.limits import Limits
from rltrain.sandbox.sandbox import Sandbox
sandbox = Sandbox("kernel")
def run(program, **limits):
    return sandbox.run_python(program, limits=Limits(**limits))
bomb = run("import os, time\\nwhile True:\\n  if os.fork() == 0: time.sleep(600)", num_processes=20)
hog = "m = mmap.mmap(-1, 2**28)\\nwhile m.tell() < 2**28: m.write(bytes(2**20))"
shared = run(f"import mmap, time\\n{hog}\\ntime.sleep(600)", memory_bytes=10**8)
secret = run(f"print(open({sys.argv[1]!r}).read())")
users = run("import os; print(os.getuid(), os.getgid(), os.listdir('.'))")
uncounted = []
for means in ("kernel", "none"):
    with Sandbox(means).start(["true"]) as running:
        uncounted.append(running.uncounted)
print(json.dumps([bomb.stderr.decode(), shared.ended_by, secret.stderr.decode(), users.stdout.decode(), uncounted]))
"""


def test_an_ordinary_user_has_the_same_sandbox(tmp_path: Path) -> None:
    """If the tests run as the superuser, another user makes some attempts here. Otherwise all tests have an ordinary
    user."""
    if os.geteuid() != 0:
        pytest.skip("this is an ordinary user")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no Python that every user can run")
    secret = tmp_path / "secret"
    secret.write_text("a-secret")
    os.chown(secret, 12345, 12345)
    done = subprocess.run(
        [python, "-c", AS_ANOTHER_USER, str(secret)],
        cwd=REPOSITORY,
        user=12345,
        group=12345,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bomb, shared, secret_error, users, (of_kernel, of_none) = json.loads(done.stdout)
    assert "BlockingIOError" in bomb
    assert shared == "memory"
    assert "FileNotFoundError" in secret_error
    assert users == "1000 1000 ['program.py']\n"
    assert of_kernel == "" and of_none.startswith("no control group can be made for them: ")


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Yields the port of a server. It answers each connection with its whole input, once the input has ended."""
    server = socket.create_server(("127.0.0.1", 0), backlog=100)
    thread = JobThread(target=echo, args=(server,))
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)  # this ends its accept
    server.close()
    thread.join(timeout=60)


def echo(server: socket.socket) -> None:
    while True:
        try:
            connected, _ = server.accept()
        except OSError:
            return
        with connected:
            connected.sendall(connected.makefile("rb").read())


ASK = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
for number, connection in enumerate(connections):
    connection.sendall(bytes([number]) * int(sys.argv[3]))
    connection.shutdown(socket.SHUT_WR)
for number, connection in enumerate(connections):
    received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received == bytes([number]) * int(sys.argv[3]), len(received)
print("equal")
"""


@pytest.mark.parametrize(("num_connections", "num_bytes"), [(1, 2_000_000), (40, 1000)])
@pytest.mark.parametrize("means", [*PROTECTING, "none"])
def test_the_port_is_reached(echo_port: int, means: str, num_connections: int, num_bytes: int) -> None:
    sandbox = sandbox_by(means)
    command = [sandbox.python, "-c", ASK, str(echo_port), str(num_connections), str(num_bytes)]
    outcome = sandbox.run(command, host_port=echo_port, limits=Limits(wall_s=60))
    assert outcome.stdout == b"equal\n", outcome


@pytest.mark.parametrize("means", PROTECTING)
def test_nothing_else_is_reached(echo_port: int, means: str) -> None:
    program = """
import socket, sys
other_port = int(sys.argv[1])
for address in [("127.0.0.1", other_port), ("127.0.0.2", other_port), ("192.0.2.1", 80)]:
    try:
        socket.create_connection(address, timeout=5)
    except OSError as error:
        print(error.strerror)
names = open("/proc/net/dev").read().split("\\n")[2:-1]
print(*(name.split(":")[0].strip() for name in names))
"""
    sandbox = sandbox_by(means)
    with socket.create_server(("127.0.0.1", 0)) as other:
        command = [sandbox.python, "-c", program, str(other.getsockname()[1])]
        outcome = sandbox.run(command, host_port=echo_port)
    refused = ["Connection refused"] * 2 + ["Network is unreachable"]
    assert outcome.stdout.decode().splitlines() == [*refused, "lo"], outcome


def test_where_nobody_listens_the_connection_ends() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    program = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=30) as connection:
    try:
        print(connection.recv(1))
    except ConnectionResetError:
        print(b"")
"""
    sandbox = sandbox_by("kernel")
    assert sandbox.run([sandbox.python, "-c", program, str(port)], host_port=port).stdout == b"b''\n"
