"""Programs in a sandbox try to escape, to read foreign data, and to exhaust the machine."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from rltrain.sandbox.keeper import MOST_OTHER_PROCESSES
from rltrain.sandbox.limits import MIB, Limits, Outcome
from rltrain.sandbox.sandbox import Sandbox
from tests.support.sandboxes import PROTECTING, new_mark, processes_with, sandbox_by


@pytest.fixture(params=PROTECTING)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return sandbox_by(request.param)


def printed(outcome: Outcome) -> str:
    """Returns the output of a successful program."""
    assert outcome.succeeded, outcome
    return outcome.stdout.decode().strip()


def test_a_fork_bomb_ends_with_its_program(sandbox: Sandbox) -> None:
    bomb = """
import os, time
num_children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        num_children += 1
except OSError:
    print(num_children)
"""
    mark = new_mark()
    outcome = sandbox.run_python(bomb, [mark], limits=Limits(num_processes=20))
    assert outcome.ended_by == "processes" or int(printed(outcome)) < 20 + MOST_OTHER_PROCESSES
    assert processes_with(mark) == []


def test_a_fork_bomb_of_shells(sandbox: Sandbox) -> None:
    mark = new_mark()
    # Each shell waits before it forks. The kernel's own limit does not hold root. Without this wait, a bomb can take
    # all process numbers of the machine before the keeper looks again. Other tests would then fail.
    command = ["bash", "-c", ":(){ sleep 0.03; :|:& };:; sleep 600", mark]
    outcome = sandbox.run(command, limits=Limits(num_processes=20, wall_s=0.3))
    assert outcome.ended_by in ("processes", "time")
    assert processes_with(mark) == []


def test_what_a_program_leaves_behind_is_gone(sandbox: Sandbox) -> None:
    """The daemon has its own session, no parent, and none of the pipes."""
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        time.sleep(600)
    os._exit(0)
os.wait()
print("left")
"""
    mark = new_mark()
    assert printed(sandbox.run_python(daemon, [mark])) == "left"
    assert processes_with(mark) == []


def test_one_process_cannot_have_more_memory(sandbox: Sandbox) -> None:
    outcome = sandbox.run_python("bytearray(2**28)", limits=Limits(memory_bytes=100 * MIB))
    assert outcome.status == 1 and b"MemoryError" in outcome.stderr


def test_many_processes_cannot_have_more_memory_together(sandbox: Sandbox) -> None:
    hogs = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hog = b"x" * (40 * 2**20)
        time.sleep(600)
time.sleep(600)
"""
    assert sandbox.run_python(hogs, limits=Limits(memory_bytes=100 * MIB)).ended_by == "memory"


def test_nor_memory_that_they_share(sandbox: Sandbox) -> None:
    hog = """
import mmap, time
shared = mmap.mmap(-1, 300 * 2**20)
for place in range(0, len(shared), 2**20):
    shared[place : place + 2**20] = bytes(2**20)
time.sleep(600)
"""
    assert sandbox.run_python(hog, limits=Limits(memory_bytes=100 * MIB)).ended_by == "memory"


def test_memory_that_is_shared_counts_once(sandbox: Sandbox) -> None:
    """Six processes share the same 40 MiB, long enough to be counted."""
    program = """
import os, time
data = b"x" * (40 * 2**20)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
for _ in range(5):
    os.wait()
print("done")
"""
    assert printed(sandbox.run_python(program, limits=Limits(memory_bytes=150 * MIB))) == "done"


def test_memory_that_nobody_could_count_is_refused(sandbox: Sandbox) -> None:
    outcome = sandbox.run_python("import os; os.memfd_create('hidden')")
    assert b"PermissionError" in outcome.stderr


FILL = """
import errno, sys
written = 0
try:
    for number in range(100):
        with open(f"{sys.argv[1]}/{number}", "wb", buffering=0) as file:
            for _ in range(16):
                written += file.write(bytes(65536))
except OSError as error:
    print(errno.errorcode[error.errno], written)
"""


@pytest.mark.parametrize("folder", ["/tmp/work", "/dev/shm"])
def test_filling_the_disk_ends_at_the_limit(sandbox: Sandbox, folder: str) -> None:
    reason, written = printed(sandbox.run_python(FILL, [folder], limits=Limits(written_bytes=4 * MIB))).split()
    assert reason == "ENOSPC" and int(written) <= 4 * MIB


def test_a_file_cannot_be_longer(sandbox: Sandbox) -> None:
    reason, written = printed(sandbox.run_python(FILL, ["."], limits=Limits(file_bytes=100_000))).split()
    assert reason == "EFBIG" and int(written) == 100_000


def test_nothing_else_can_be_written_to(sandbox: Sandbox) -> None:
    program = """
import os
for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", os.path.dirname(os.__file__)):
    try:
        open(os.path.join(folder, "written"), "w")
    except OSError:
        continue
    print(folder)
"""
    assert printed(sandbox.run_python(program)) == ""


def test_the_machines_loopback_is_out_of_reach(sandbox: Sandbox) -> None:
    program = """
import socket, sys
port, name = int(sys.argv[1]), "\\0" + sys.argv[2]
for family, address in [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name)]:
    try:
        socket.socket(family).connect(address)
    except OSError as error:
        print(type(error).__name__)
"""
    name = new_mark()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        outcome = sandbox.run_python(program, [str(server.getsockname()[1]), name])
    assert printed(outcome).split() == ["PermissionError", "ConnectionRefusedError"]


def test_there_are_no_sockets_but_those_within_the_sandbox(sandbox: Sandbox) -> None:
    program = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
    try:
        socket.socket(family, socket.SOCK_DGRAM)
    except PermissionError:
        print("refused")
print(len(socket.socketpair()))
"""
    assert printed(sandbox.run_python(program)).split() == ["refused"] * 5 + ["2"]


def test_signals_reach_nobody_outside(sandbox: Sandbox) -> None:
    program = f"""
import os, signal
targets = [os.getppid(), 1, {os.getpid()}, -1]
for target in targets:
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
print("sent")
"""
    assert printed(sandbox.run_python(program)) == "sent"


def test_other_processes_are_not_to_be_seen(sandbox: Sandbox) -> None:
    program = "import os; print(sum(name.isdigit() for name in os.listdir('/proc')), os.getpid())"
    assert printed(sandbox.run_python(program)).split() == ["2", "2"]


def test_the_checkpoint_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_text("weights")
    checkpoint.chmod(0o644)
    program = """
import os, sys
path = sys.argv[1]
os.symlink(path, "link")
os.symlink("/", "root")
for way in (path, "link", "root" + path, "../.." + path, "/proc/self/root" + path, "/proc/1/root" + path):
    try:
        print(open(way).read())
    except OSError:
        pass
"""
    assert printed(sandbox.run_python(program, [str(checkpoint)])) == ""


def test_the_machines_folders_are_not_there(sandbox: Sandbox) -> None:
    """Only the folders of Python are there."""
    there = {*printed(sandbox.run_python("import os; print(*os.listdir('/'))")).split()}
    of_python = {path.split("/")[1] for path in (sys.base_prefix, os.path.realpath(sys.base_prefix))}
    assert (there & {"home", "var", "sys", "run", "mnt", "srv", "opt", "boot"}) <= of_python


def test_the_environment_cannot_be_read(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "a-secret")
    program = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    seen = printed(sandbox.run_python(program, environment={"GIVEN": "value"}))
    assert "'GIVEN': 'value'" in seen and "a-secret" not in seen


def test_open_files_of_the_caller_are_not_handed_down(sandbox: Sandbox, tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w") as file:
        os.set_inheritable(file.fileno(), True)
        program = "import os; print(*[fd for fd in range(1024) if os.path.exists(f'/proc/self/fd/{fd}')])"
        assert printed(sandbox.run_python(program)) == "0 1 2"


def test_endless_output_is_cut_and_its_program_ended(sandbox: Sandbox) -> None:
    outcome = sandbox.run_python("while True: print('x' * 1000)", limits=Limits(output_bytes=50_000))
    assert outcome.ended_by == "output" and len(outcome.stdout) == 50_000
    assert outcome.stdout_truncated and not outcome.stderr_truncated


def test_a_program_that_does_not_end_is_killed(sandbox: Sandbox) -> None:
    program = """
import signal, time
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(600)
"""
    outcome = sandbox.run_python(program, limits=Limits(wall_s=0.3))
    assert (outcome.ended_by, outcome.status) == ("time", -signal.SIGKILL)


def test_processors_are_limited_for_all_processes_together(sandbox: Sandbox) -> None:
    program = """
import os
for _ in range(3):
    os.fork()
while True:
    pass
"""
    assert sandbox.run_python(program, limits=Limits(cpu_s=0.2)).ended_by == "cpu"


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    program = """
import resource
for limit in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError:
        print("refused")
"""
    assert printed(sandbox.run_python(program)).split() == ["refused"] * 4


def test_nobody_becomes_the_superuser_or_makes_namespaces(sandbox: Sandbox) -> None:
    program = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
new_user_namespace = 0x10000000
calls = {
    "setuid": lambda: libc.setuid(0),
    "unshare": lambda: libc.unshare(new_user_namespace),
    "clone": lambda: libc.syscall(220 if os.uname().machine == "aarch64" else 56, new_user_namespace | 17, 0, 0, 0, 0),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "umount": lambda: libc.umount2(b"/usr", 2),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
    "sethostname": lambda: libc.sethostname(b"x", 1),
}
for name, call in calls.items():
    print(name, call(), errno.errorcode.get(ctypes.get_errno()))
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(*(status[name].strip() for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")))
"""
    *calls, state = printed(sandbox.run_python(program)).splitlines()
    assert [line.split()[1:] for line in calls[1:]] == [["-1", "EPERM"]] * 7
    assert calls[0].split()[1] == "-1"
    assert state == "0000000000000000 0000000000000000 1 2"
