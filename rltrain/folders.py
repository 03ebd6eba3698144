"""The folders that a run writes to: one job at a time does, and what an earlier run left there is set aside."""

import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from rltrain.errors import ConfigError, cannot_write

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
WAIT_S = 20.0
"""For a job that has been killed to be gone, so that the next one can have its folder."""
POLL_S = 0.2
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

_held: dict[Path, int] = {}
"""Locked folder -> descriptor of its lock, as long as this process lives: the kernel frees it, however that ends."""


def lock_folder(
    folder: Path, config_key: str, *, wait_s: float = WAIT_S, advance: Callable[[], None] = lambda: None
) -> None:
    """Make sure that until this process ends no other job writes to `folder`, which is made where there is none.

    Waits `wait_s` for a job that holds it, and calls `advance` meanwhile. ConfigError, naming `config_key` and that
    job, where it still does, or where the folder cannot be written. On a file system without locks only a warning.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() in _held:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot_write(folder, error, config_key, config_key) from error
    try:
        _wait_for_lock(descriptor, path, config_key, wait_s, advance)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_holder()).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise cannot_write(path, error, config_key, config_key) from error
    except ConfigError:
        os.close(descriptor)
        raise
    _held[folder.resolve()] = descriptor


def set_aside(paths: Sequence[Path], config_key: str, *, keep: bool = False, into: Path | None = None) -> Path:
    """Moves `paths`, which lie in one folder, into a new folder in it, or `into` that one. Returns where they are.

    `keep` copies them. Raises ConfigError where a file cannot be written.
    """
    parent = paths[0].parent
    folder = into or next(place for i in count(1) if not os.path.lexists(place := parent / f"earlier_{i}"))
    try:
        folder.mkdir(exist_ok=into is not None)
        for path in paths:
            target = folder / path.name
            if not keep:
                path.rename(target)
            elif path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copy2(path, target)
    except OSError as error:
        raise cannot_write(folder, error, config_key, config_key) from error
    return folder


def _wait_for_lock(descriptor: int, path: Path, config_key: str, wait_s: float, advance: Callable[[], None]) -> None:
    deadline, told = time.monotonic() + wait_s, False
    while not _try_to_lock(descriptor, path):
        holder = _holder(path)
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{config_key}: {path.parent} is in use by another job ({holder}), whose files would mix with those of "
                "this one; wait for its end, or name another folder"
            )
        if not told:
            logger.warning(
                "%s: %s is in use by another job (%s); waiting %g s for its end",
                config_key,
                path.parent,
                holder,
                wait_s,
            )
            told = True
        advance()
        time.sleep(min(POLL_S, wait_s))


def _try_to_lock(descriptor: int, path: Path) -> bool:
    """False where somebody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s cannot be locked (%s): nothing keeps a second job from writing there too", path.parent, error.strerror
        )
    return True


def _this_holder() -> dict[str, str | int]:
    return {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _holder(path: Path) -> str:
    """Who says in the lock file to have the lock, in words."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} does not say which"
