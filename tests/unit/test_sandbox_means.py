"""What a machine can do is found out and said; what it cannot do is refused unless told otherwise."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltrain.errors import ConfigError
from rltrain.sandbox import means as machine
from rltrain.sandbox.means import MeansFinding, require
from tests.unit.sandboxes import sandbox_by

REPOSITORY = Path(__file__).resolve().parents[2]
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
    with pytest.raises(ConfigError, match="a.b: auto: .*bubblewrap: no namespaces; kernel: .*a.b: none runs them"):
        require("auto", key="a.b")
    monkeypatch.setattr(machine, "means", lambda: {"bubblewrap": FAILS, "kernel": WORKS})
    with pytest.raises(ConfigError, match="or env.sandbox: kernel, which works here"):
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
    """What the kernel's means are found to do in namespaces of a user of its own, after a shell's commands there."""
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
    """Its programs are nobody's then."""
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
print(json.dumps([bomb.stderr.decode(), shared.ended_by, secret.stderr.decode(), users.stdout.decode()]))
"""


def test_an_ordinary_user_has_the_same_sandbox(tmp_path: Path) -> None:
    """Where the tests run as the superuser another user runs some attempts; else all tests are an ordinary user's."""
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
    bomb, shared, secret_error, users = json.loads(done.stdout)
    assert "BlockingIOError" in bomb
    assert shared == "memory"
    assert "FileNotFoundError" in secret_error
    assert users == "1000 1000 ['program.py']\n"
