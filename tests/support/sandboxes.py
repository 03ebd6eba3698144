"""Helpers for tests of sandboxes: the sandboxes of this machine, and the remaining processes of a program."""

import os
import secrets
import select
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rltrain.sandbox.means import means
from rltrain.sandbox.sandbox import Sandbox

PROTECTING = ["kernel", *(["bubblewrap"] if shutil.which("bwrap") else [])]


def sandbox_by(name: str, **options: object) -> Sandbox:
    """Returns a sandbox, or skips the test if the machine does not support it."""
    if name != "none" and not means()[name].works:
        pytest.skip(means()[name].text)
    return Sandbox(name, **options)  # type: ignore[arg-type]


def new_mark() -> str:
    """Returns a random argument that identifies a program's processes."""
    return f"mark-{secrets.token_hex(8)}"


def processes_with(mark: str) -> list[int]:
    """Returns the ids of processes with the mark among their arguments, as seen from this process."""
    return list(_processes_with(mark.encode()))


def _processes_with(mark: bytes) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in arguments.split(b"\0"):
                yield int(folder.name)


def wait_for_ends(processes: list[int], timeout_s: float = 60.0) -> None:
    """Raises TimeoutError if a process still runs after `timeout_s`."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {process} still runs")
        finally:
            os.close(descriptor)
