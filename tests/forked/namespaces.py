"""Entering the namespaces of another process, as a host's: setns(2), which Python 3.11 has no call for."""

import ctypes
import os
import platform
from pathlib import Path

NAMESPACES = "RLTRAIN_TEST_NAMESPACES"
"""Environment variable: the folder in /proc with the namespaces in which a forked process, and those that it starts,
are to run. Where it is not set they stay where the zygote is."""

KINDS = ("net", "uts", "mnt")


def enter(folder: str) -> None:
    """From here on this process, which must have one thread, is on the host whose network, name and mounts these are.
    Its process number stays what it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(Path(folder, kind), os.O_RDONLY) for kind in KINDS]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns to {folder}")
        os.close(file)
    platform._uname_cache = None  # type: ignore[attr-defined] # the name of the zygote's host
