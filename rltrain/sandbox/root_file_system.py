"""Makes the file system of a sandboxed program, by the kernel or by bubblewrap."""

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

# Makes the file system that a sandboxed program has, in the mount namespace of this process.

WRITABLE_FOLDER, WORK_FOLDER, SHARED_MEMORY = "/tmp", "/tmp/work", "/tmp/shm"
DEVICES = ("null", "zero", "full", "random", "urandom")
STREAMS = {"/dev/fd": "", "/dev/stdin": "/0", "/dev/stdout": "/1", "/dev/stderr": "/2"}
"""Links to what lies below /proc/self/fd."""
OLD_ROOT = "/old"
ROOT_BYTES = 2**20
"""Enough for folders and mount points."""


def make_root(visible: Iterable[tuple[str, str, bool]], written_bytes: int, num_files: int, uid: int) -> None:
    """A new root: what is `visible`, read-only (see visible_files.Visible), devices that give nothing away, /proc, a
    few files of /etc, and /tmp, which is memory of `written_bytes` at most and alone may be written to.

    /proc is left out where the kernel refuses a new one, which it does where parts of the machine's are covered.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={ROOT_BYTES},mode=755")
    os.mkdir("/tmp" + OLD_ROOT)
    pivot_root("/tmp", "/tmp" + OLD_ROOT)
    os.chdir("/")
    _mount_proc()
    _make_writable_folder(written_bytes, num_files, uid)  # first, since what is visible may lie in it
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
    """Files of /etc that programs expect, and their texts."""
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


# The command line that makes the same sandbox by bubblewrap.

UID = 1000


def command(spec: dict[str, Any], contents: list[bytes], pause: "Pause | None") -> tuple[list[str], list[int]]:
    """The command, and the descriptors that it is to have, for files, the filter of system calls, and the pause."""
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
    """Before bubblewrap's program begins: somebody else can do something in its network meanwhile."""

    def __init__(self) -> None:
        self._told, self.tells = os.pipe2(0)
        self.waits, self._go = os.pipe2(0)

    def listen(self, port: int, keeper: socket.socket) -> None:
        """Once it waits, give `keeper` a socket that listens at `port` in its network, and let it begin.

        Raises OSError where it ends instead, or does not let anybody in.
        """
        from rltrain.sandbox.relay import hand_over_listener  # imports much that other sandboxes do without

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
            raise PermissionError("bubblewrap lets nobody into the network that it made")
        os.write(self._go, b"g")
        os.close(self._go)
