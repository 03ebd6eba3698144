"""A folder that another job has: for the kernel a second opening of the file is another holder, in any process."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rltrain.roles.resuming import LOCK_FILE


@contextmanager
def locked(folder: Path, text: str = "") -> Iterator[None]:
    """Inside, somebody holds the lock of `folder`, and `text` is what the lock file says."""
    folder.mkdir(exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text)
        file.flush()
        yield
