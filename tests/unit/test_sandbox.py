"""Running programs by each of the means: what they are given, what comes back, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.errors import SandboxError
from rltrain.runtime.machine import JobThread
from rltrain.sandbox.limits import MIB, Limits
from rltrain.sandbox.sandbox import Sandbox
from tests.unit.sandboxes import PROTECTING, new_mark, processes_with, sandbox_by, wait_for_ends

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
    assert unprotected.run_python(bomb, [mark], limits=Limits(num_processes=20)).ended_by == "processes"
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
    with pytest.raises(SandboxError, match="name its folder as readable"):
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
    """And go on when the thread that started them has ended."""
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
