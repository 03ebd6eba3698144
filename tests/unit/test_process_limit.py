"""Control groups with a limit on the number of a sandbox's processes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.sandbox.limits import Limits
from rltrain.sandbox.process_limit import ProcessLimit, places
from tests.support.sandboxes import PROTECTING, new_mark, processes_with, sandbox_by

VERSION_1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / {top}/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 {root} {top}/pids rw,relatime shared:9 - cgroup cgroup rw,pids
"""
VERSION_2 = "41 31 0:38 / {top} rw,relatime - cgroup2 cgroup2 rw\n"


def can_be_made() -> bool:
    with ProcessLimit(100) as limit:
        pass
    limit.remove()
    return limit.folder is not None


@pytest.fixture
def groups() -> None:
    if not can_be_made():
        pytest.skip("no control group can be made here")


BOMB = """
import os, time
from rltrain.sandbox.process_limit import ProcessLimit
with ProcessLimit(5) as limit:
    started = []
    try:
        while len(started) < 100:
            if (process := os.fork()) == 0:
                time.sleep(600)
            started.append(process)
    except BlockingIOError:
        pass
    for process in started:
        os.kill(process, 9)
        os.waitpid(process, 0)
limit.remove()
print(len(started), os.path.exists(limit.folder))
"""


def test_linux_starts_no_more(groups: None) -> None:
    """The limit of five allows the program and four more. Afterwards the program leaves the group, and its folder is
    removed."""
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "4 False\n"


def group_of(process: int) -> Path:
    """Returns the folder of a process's group. The group of its limited processes is below it."""
    own, _ = places(*(Path(f"/proc/{of}").read_text() for of in (f"{process}/cgroup", "self/mountinfo")))
    return Path(own)


@pytest.mark.parametrize("means", [*PROTECTING, "none"])
@pytest.mark.parametrize("keeper_is_killed", [False, True])
def test_a_sandbox_is_in_a_group_that_goes_with_it(groups: None, means: str, keeper_is_killed: bool) -> None:
    mark = new_mark()
    with sandbox_by(means).start(
        ["sh", "-c", "echo started; sleep 600; :", mark], limits=Limits(num_processes=7)
    ) as running:
        assert running.stdout.readline() == b"started\n"
        [folder] = {group_of(process) for process in processes_with(mark)}
        assert 7 <= int((folder / "pids.max").read_text()) <= 7 + 5
        assert group_of(running._keeper.pid) == group_of(os.getpid()) != folder
        if keeper_is_killed:
            os.kill(running._keeper.pid, signal.SIGKILL)
    assert not folder.exists() and processes_with(mark) == []


def test_a_group_of_version_1_is_made_inside_the_own(tmp_path: Path) -> None:
    groups = "9:name=systemd:/a\n8:cpu,pids:/docker/x/job\n0::/\n"
    assert places(groups, VERSION_1.format(top=tmp_path, root="/docker/x")) == (f"{tmp_path}/pids/job",) * 2
    assert places(groups, VERSION_1.format(top=tmp_path, root="/other")) == (f"{tmp_path}/pids",) * 2


def tree(top: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return VERSION_2.format(top=top)


@pytest.mark.parametrize(
    ("counted", "limits", "expected"),
    [
        ("a/job", {}, "a/job"),
        ("a", {"a/job/memory.max": "max\n", "a/job/cpu.max": "max 100000\n", "a/job/cpuset.cpus": "\n"}, "a"),
        ("", {}, "."),
        ("a", {"a/job/memory.max": "1000000\n"}, "a/job"),
        ("a", {"a/job/cpu.max": "50000 100000\n"}, "a/job"),
        ("", {"a/cpuset.cpus": "0-3\n"}, "a/job"),
        ("nowhere", {}, "a/job"),
    ],
)
def test_a_group_of_version_2_is_made_where_processes_are_counted_within_the_jobs_limits(
    tmp_path: Path, counted: str, limits: dict[str, str], expected: str
) -> None:
    folders = ("", "a", "a/job")
    counts = {f"{folder}/cgroup.subtree_control".lstrip("/"): "cpu memory\n" for folder in folders}
    counts[f"{counted}/cgroup.subtree_control".lstrip("/")] = "cpu memory pids\n"
    mounts = tree(tmp_path, {**counts, **limits})
    own, parent = places("0::/a/job\n", mounts)
    assert own == f"{tmp_path}/a/job" and Path(parent) == tmp_path / expected
    asked = expected == "a/job" and counted != "a/job"
    assert ("+pids" in (tmp_path / "a/job/cgroup.subtree_control").read_text()) == asked


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        ("1:cpu:/\n", "", "has no control groups that count processes"),
        ("8:pids:/\n", VERSION_2.format(top="/sys"), "are not mounted"),
        ("0::/\n", VERSION_2.format(top="/nowhere"), "No such file or directory"),
    ],
)
def test_where_there_is_none_it_is_an_error(groups: str, mounts: str, expected: str) -> None:
    with pytest.raises(OSError, match=re.escape(expected)):
        places(groups, mounts)
