"""Limits the number of processes of a sandbox by a control group of Linux.

The keeper only counts from time to time, and Linux's limit per user does not apply to the superuser. A control group
limits every user at once, but making one needs permissions.
"""

import contextlib
import os
import signal
import time

CONTROLLER = "pids"
LIMITS = ("memory.max", "memory.high", "cpu.max", "pids.max", "cpuset.cpus", "io.max")
"""Files of a control group of version 2. Without a limit they are empty or begin with the word max."""
REMOVE_FOR_S = 1.0


class ProcessLimit:
    """A control group around the start of a sandbox. This process is in it meanwhile, and the started processes stay in
    it.

    If the group cannot be made, `lack` has the reason and there is no limit.
    """

    def __init__(self, number: int) -> None:
        self.folder: str | None = None
        """The folder of the group in Linux's file system."""
        self.lack = ""
        self._home = ""
        self._number = number

    def __enter__(self) -> "ProcessLimit":
        try:
            self._home, parent = places(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))
            self.folder = os.path.join(parent, f"rltrain-sandbox-{os.urandom(8).hex()}")
            os.mkdir(self.folder)
            _write(f"{self.folder}/pids.max", str(self._number))
            _write(f"{self.folder}/cgroup.procs", "0")  # 0 means the writing process
        except OSError as error:
            self.remove()
            self.folder, self.lack = None, f"no control group can be made for them: {error}"
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        if self.folder is not None:
            _write(f"{self._home}/cgroup.procs", "0")
        if raised is not None:
            self.remove()

    def remove(self) -> None:
        """Removes the group and its remaining processes."""
        if self.folder is not None:
            remove_group(self.folder)


def remove_group(folder: str) -> None:
    """Removes the group if it exists, and kills its processes. Linux refuses the removal until the last process has
    ended."""
    deadline = time.monotonic() + REMOVE_FOR_S
    while os.path.isdir(folder) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return
        with contextlib.suppress(OSError):  # some may have ended
            inside = map(int, _read(f"{folder}/cgroup.procs").split())
            for process in filter(None, inside):  # 0 is a process outside this namespace
                os.kill(process, signal.SIGKILL)
        time.sleep(0.005)


def places(groups: str, mounts: str) -> tuple[str, str]:
    """Returns the folder of this process's control group, and a folder for new groups.

    `groups` and `mounts` are the texts of /proc/self/cgroup and /proc/self/mountinfo. Raises OSError if no control
    groups count processes.
    """
    of_version_1, of_version_2 = None, None
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if CONTROLLER in controllers.split(","):
            of_version_1 = path
        elif not controllers:
            of_version_2 = path
    if of_version_1 is not None:
        own, _ = _where(of_version_1, mounts, "cgroup")
        return own, own
    if of_version_2 is None:
        raise OSError("this kernel has no control groups that count processes")
    own, top = _where(of_version_2, mounts, "cgroup2")
    return own, _parent_of_version_2(own, top)


def _where(path: str, mounts: str, kind: str) -> tuple[str, str]:
    """Returns the folders of a control group and of the topmost visible group."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, top, *_ = before.split()
        found, _, options = after.split(" ", 2)
        if found == kind and (kind == "cgroup2" or CONTROLLER in options.split(",")):
            inside = os.path.relpath(path, root)
            return (top if inside == "." or inside.startswith("..") else os.path.join(top, inside)), top
    raise OSError("the control groups that count processes are not mounted")


def _parent_of_version_2(own: str, top: str) -> str:
    """Returns a folder for new groups. Except for the topmost group, a group with processes cannot have counted child
    groups. So the folder is often further up, but never outside a limit of the job."""
    folder = own
    while not _counts(folder):
        if folder == top or not _is_unlimited(folder):
            _write(f"{own}/cgroup.subtree_control", f"+{CONTROLLER}")
            return own
        folder = os.path.dirname(folder)
    return folder


def _counts(folder: str) -> bool:
    return CONTROLLER in _read(f"{folder}/cgroup.subtree_control").split()


def _is_unlimited(folder: str) -> bool:
    limits = [path for name in LIMITS if os.path.exists(path := f"{folder}/{name}")]
    return all(_read(path).split()[:1] in ([], ["max"]) for path in limits)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
