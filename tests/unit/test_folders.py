"""One job at a time writes to a folder, and what an earlier one left there is set aside."""

import errno
import fcntl
import json
import logging
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rltrain.errors import ConfigError
from rltrain.roles import resuming
from rltrain.roles.resuming import LOCK_FILE, NO_LOCKS, lock_folder, set_aside
from tests.unit.held_lock import locked

HOLDER = {"host": "node7", "pid": 1234, "since": "2026-01-02 03:04:05 +0000"}


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """What this process has locked, none of it after the test."""
    held: dict[Path, int] = {}
    monkeypatch.setattr(resuming, "_held", held)
    return held


def release(held: dict[Path, int]) -> None:
    for descriptor in held.values():
        os.close(descriptor)
    held.clear()


def test_a_folder_is_made_and_held_with_its_holder_written_down(tmp_path: Path, held: dict[Path, int]) -> None:
    folder = tmp_path / "new" / "run"
    lock_folder(folder, "output_dir")
    with (folder / LOCK_FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder = json.loads((folder / LOCK_FILE).read_text())
    assert (holder["host"], holder["pid"]) == (platform.node(), os.getpid())
    lock_folder(folder / ".", "checkpoint.dir", wait_s=0)
    assert list(held) == [folder], "a process that has it has it under every name"
    release(held)
    lock_folder(folder, "output_dir", wait_s=0)


@pytest.mark.parametrize(
    "text, holder",
    [
        (json.dumps(HOLDER), "process 1234 on node7 since 2026-01-02 03:04:05 +0000"),
        ("", "{path} does not say which"),
        ("[]", "{path} does not say which"),
    ],
)
def test_a_second_job_is_refused_with_the_first_ones_name(tmp_path: Path, text: str, holder: str) -> None:
    with locked(tmp_path, text), pytest.raises(ConfigError) as refused:
        lock_folder(tmp_path, "output_dir", wait_s=0)
    named = holder.format(path=tmp_path / LOCK_FILE)
    assert str(refused.value).startswith(f"output_dir: {tmp_path} is in use by another job ({named}), whose files")
    lock_folder(tmp_path, "output_dir", wait_s=0)


def test_it_waits_for_a_job_that_is_about_to_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waited = threading.Event()

    def hold() -> None:
        with locked(tmp_path, json.dumps(HOLDER)):
            holds.set()
            assert waited.wait(20)

    holds, thread = threading.Event(), threading.Thread(target=hold)
    thread.start()
    assert holds.wait(20)
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, "output_dir", wait_s=60, advance=waited.set)
    thread.join()
    assert caplog.text.count("is in use by another job (process 1234 on node7 since") == 1, "the wait is told once"


def test_a_job_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\nfrom rltrain.roles.resuming import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1]), 'output_dir')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] != os.getpid()
    lock_folder(tmp_path, "output_dir", wait_s=0)


@pytest.mark.parametrize("number", sorted(set(NO_LOCKS)))
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(resuming.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, "output_dir", wait_s=0)
    assert f"{tmp_path} cannot be locked" in caplog.text


def test_a_lock_that_cannot_be_written_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(resuming.os, "pwrite", full)
    with pytest.raises(ConfigError, match=f"checkpoint.dir: cannot write {tmp_path}/{LOCK_FILE}: No space left"):
        lock_folder(tmp_path, "checkpoint.dir", wait_s=0)
    monkeypatch.undo()
    lock_folder(tmp_path, "checkpoint.dir", wait_s=0)


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_set_aside_gets_a_new_folder_each_time(tmp_path: Path, keep: bool) -> None:
    paths = [tmp_path / "metrics.jsonl", tmp_path / "trace"]
    (tmp_path / "earlier_2").symlink_to("nowhere")
    for number in (1, 3):
        paths[0].write_text(f"{number}")
        paths[1].mkdir(exist_ok=True)
        (paths[1] / "rank0.json").write_text(f"{number}")
        folder = set_aside(paths, "output_dir", keep=keep)
        assert folder == tmp_path / f"earlier_{number}"
        assert [(folder / name).read_text() for name in ("metrics.jsonl", "trace/rank0.json")] == [f"{number}"] * 2
        assert [path.exists() for path in paths] == [keep, keep]
    paths[0].unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="output_dir: cannot write .*earlier_4: No such file"):
        set_aside(paths, "output_dir", keep=keep)
