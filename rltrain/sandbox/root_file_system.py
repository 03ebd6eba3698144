"""The file system of a sandboxed program, made by the kernel or by bubblewrap."""

import errno
import json
import os
import socket
from collections.abc import Iterable
from typing import Any

from rltrain.sandbox import system_calls
from rltrain.sandbox.system_calls import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    join_namespace,
    make_read_only,
    mount,
    pivot_root,
    unmount,
)

# The file system in the mount namespace of this process.

WRITABLE_FOLDER, WORK_FOLDER, SHARED_MEMORY = "/tmp", "/tmp/work", "/tmp/shm"
DEVICES = ("null", "zero", "full", "random", "urandom")
STREAMS = {"/dev/fd": "", "/dev/stdin": "/0", "/dev/stdout": "/1", "/dev/stderr": "/2"}
"""Symbolic links to paths below /proc/self/fd."""
OLD_ROOT = "/old"
ROOT_BYTES = 2**20
"""Enough bytes for folders and mount points."""


def make_root(visible: Iterable[tuple[str, str, bool]], written_bytes: int, num_files: int, uid: int) -> None:
    """Makes a new root. It has the paths in `visible` read-only (see sandbox.Visible), harmless devices, /proc, and a
    few files of /etc. Only /tmp is writable, as memory of at most `written_bytes`.

    /proc is missing if the kernel refuses a new one. That happens if parts of the machine's /proc are covered.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={ROOT_BYTES},mode=755")
    os.mkdir("/tmp" + OLD_ROOT)
    pivot_root("/tmp", "/tmp" + OLD_ROOT)
    os.chdir("/")
    _mount_proc()
    _make_writable_folder(written_bytes, num_files, uid)  # first, because visible paths can be inside it
    for path, source, is_link in visible:
        _show(path, source, is_link)
    _make_devices()
    _write_names(uid)
    unmount(OLD_ROOT)
    os.rmdir(OLD_ROOT)
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount_proc() -> None:
    os.mkdir("/proc")
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        os.rmdir("/proc")


def _show(path: str, source: str, is_link: bool) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    original = OLD_ROOT + source
    if is_link:
        os.symlink(source, path)
    elif os.path.isdir(original):
        os.mkdir(path)
        mount(original, path, None, MS_BIND | MS_REC)
        make_read_only(path)
    else:
        _bind_file(original, path)
        make_read_only(path)


def _bind_file(original: str, path: str) -> None:
    with open(path, "w"):
        mount(original, path, None, MS_BIND)


def _make_devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        _bind_file(f"{OLD_ROOT}/dev/{name}", f"/dev/{name}")
    os.symlink(SHARED_MEMORY, "/dev/shm")
    for path, target in STREAMS.items():
        os.symlink(f"/proc/self/fd{target}", path)


def _make_writable_folder(written_bytes: int, num_files: int, uid: int) -> None:
    os.mkdir(WRITABLE_FOLDER)
    options = f"size={written_bytes},nr_inodes={num_files},mode=755"
    mount("tmpfs", WRITABLE_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for folder in (WORK_FOLDER, SHARED_MEMORY):
        os.mkdir(folder)
    for folder in (WRITABLE_FOLDER, WORK_FOLDER, SHARED_MEMORY):
        os.chown(folder, uid, uid)


def names(uid: int) -> dict[str, str]:
    """Returns paths and texts of the files in /etc that programs expect."""
    return {
        "/etc/passwd": f"program:x:{uid}:{uid}::{WORK_FOLDER}:/bin/sh\n",
        "/etc/group": f"program:x:{uid}:\n",
        "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    }


def _write_names(uid: int) -> None:
    os.makedirs("/etc", exist_ok=True)
    for path, text in names(uid).items():
        with open(path, "w") as file:
            file.write(text)


# The same sandbox by bubblewrap.

UID = 1000


def command(spec: dict[str, Any], contents: list[bytes], pause: "Pause | None") -> tuple[list[str], list[int]]:
    """Returns bubblewrap's command, and its file descriptors for files, the filter of system calls, and the pause."""
    descriptors: list[int] = []

    def readable(content: bytes) -> str:
        descriptor = os.memfd_create("given")
        os.set_inheritable(descriptor, True)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        descriptors.append(descriptor)
        return str(descriptor)

    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
    arguments += ["--uid", str(UID), "--gid", str(UID)]
    arguments += ["--proc", "/proc"]
    for name in DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    arguments += ["--symlink", SHARED_MEMORY, "/dev/shm"]
    for path, target in STREAMS.items():
        arguments += ["--symlink", f"/proc/self/fd{target}", path]
    arguments += ["--size", str(spec["limits"]["written_bytes"]), "--tmpfs", WRITABLE_FOLDER]
    arguments += ["--dir", WORK_FOLDER, "--dir", SHARED_MEMORY]
    for path, source, is_link in spec["visible"]:
        arguments += ["--symlink" if is_link else "--ro-bind", source, path]
    given = {f"{WORK_FOLDER}/{name}": content for (name, _), content in zip(spec["files"], contents, strict=True)}
    for path, content in {**given, **{path: text.encode() for path, text in names(UID).items()}}.items():
        arguments += ["--file", readable(content), path]
    arguments += ["--remount-ro", "/", "--chdir", WORK_FOLDER]
    filtered = system_calls.as_bytes(
        system_calls.program(os.uname().machine, internet_sockets=spec["host_port"] is not None)
    )
    arguments += ["--seccomp", readable(filtered)]
    if pause is not None:
        arguments += ["--info-fd", str(pause.tells), "--block-fd", str(pause.waits)]
        descriptors += [pause.tells, pause.waits]
    return [spec["bubblewrap"], *arguments, "--", *spec["command"]], descriptors


class Pause:
    """A pause before bubblewrap's program begins, to open a socket in its network."""

    def __init__(self) -> None:
        self._told, self.tells = os.pipe2(0)
        self.waits, self._go = os.pipe2(0)

    def listen(self, port: int, keeper: socket.socket) -> None:
        """Waits for the pause, sends `keeper` a socket that listens at `port` in the program's network, and ends the
        pause.

        Raises OSError if bubblewrap ends instead, or its network cannot be joined.
        """
        from rltrain.sandbox.relay import hand_over_listener  # slow to import, and other sandboxes do not need it

        with open(self._told) as told:
            said = told.read()
        if not said:
            raise ChildProcessError("bubblewrap ended before its program began")
        process = json.loads(said)["child-pid"]
        helper = os.fork()
        if helper == 0:
            try:
                for kind in ("user", "net"):
                    join_namespace(f"/proc/{process}/ns/{kind}")
                hand_over_listener(port, keeper)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(helper, 0)[1]:
            raise PermissionError("the network made by bubblewrap cannot be joined")
        os.write(self._go, b"g")
        os.close(self._go)
