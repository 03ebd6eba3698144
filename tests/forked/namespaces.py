"""Enters the namespaces of another process, such as those of a host: setns(2). Python 3.11 has no call for it."""

import ctypes
import os
import platform
from pathlib import Path

NAMESPACES = "RLTRAIN_TEST_NAMESPACES"
"""Environment variable: the folder in /proc with the namespaces for a forked process and its children.

Without it they stay in the namespaces of the zygote.
"""

KINDS = ("net", "uts", "mnt")


def enter(folder: str) -> None:
    """Moves this process to the host with these namespaces of network, name and mounts.

    The process must have one thread. Its process id does not change.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(Path(folder, kind), os.O_RDONLY) for kind in KINDS]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns to {folder}")
        os.close(file)
    platform._uname_cache = None  # type: ignore[attr-defined] # the name of the zygote's host
