"""Decoded images of a node, in files that all of its ranks share.

An image is a file below a key. A rank holds an image by a hard link in its folder. A file disappears with its last
link, so ranks need no agreement on the end of its use.
"""

import fcntl
import os
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rltrain.errors import ConfigError, cannot_write
from rltrain.runtime.machine import SHARED_MEMORY, free_bytes

Pixels = NDArray[np.uint8]
"""An image in RGB, shape [frames, height, width, 3]."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Pillow's names of the accepted formats of encoded images. It has others, some of which start programs."""

HEADER = struct.Struct("<8sqiii4x")
"""The first bytes of a file: MAGIC, the last step of use, frames, height, width. Pixels follow."""
MAGIC = b"rltimage"
STEP = struct.Struct("<q")
STEP_AT = len(MAGIC)

KEY, FOLDER_KEY = "data.images", "data.images.folder"
LOOK_S = 0.002
"""Seconds between two looks at a lock."""
ROOM = 4e9
"""Free bytes of shared memory for a store there by default."""
IN_USE, CHANGES, FETCHES = "in_use", "changes", "fetches"
"""Files for locks. A process has the first locked as long as it uses the folder, the second while it changes it, and
the third while it fetches images from another node."""


class ImageMissing(LookupError):  # noqa: N818 - names what happened; never shown to users
    """The store has no files of `keys`."""

    def __init__(self, keys: Iterable[int]) -> None:
        self.keys = [*keys]
        super().__init__(f"no decoded images with keys {self.keys}")


class _Put(NamedTuple):
    """A file that this rank has put: its size, and its last known step of use."""

    num_bytes: int
    step: int


class ImageStore:
    """A rank's view of the decoded images of its node. Its methods may be called from several threads.

    An image stays for `keep_steps` steps after its last use, and longer while a rank holds it. Then it stays as one of
    the unused images of the rank that put it. These may take `cache_bytes`. The longest unused are removed first.
    Ranks may be at most `keep_steps` steps apart.
    """

    def __init__(self, folder: Path, rank: int, *, keep_steps: int, cache_bytes: float) -> None:
        self.folder, self.own = folder, folder / f"rank-{rank}"
        self.keep_steps, self.cache_bytes = keep_steps, cache_bytes
        self._held: dict[int, int] = {}
        self._put: dict[int, _Put] = {}
        self._guard = threading.Lock()
        with _explained(folder):
            shutil.rmtree(self.own, ignore_errors=True)
            self.own.mkdir()
            self._in_use: int | None = _locked_file(folder / IN_USE, fcntl.LOCK_SH)
        self._fetches: int | None = None

    @classmethod
    def open(cls, name: str, rank: int, *, folder: str | None, keep_steps: int, cache_bytes: float) -> Self:
        """Opens the store `name`, and creates it if no process uses it. The name is that of the job on this node.

        `folder` is data.images.folder. Stores of ended processes are removed first. Raises ConfigError if the folder
        cannot be used.
        """
        with ExitStack() as stack:
            parents = [_parent(Path(base)) for base in _bases(folder)]
            stack.enter_context(_explained(parents[0]))
            for parent in sorted(parents):
                stack.callback(os.close, _locked_file(parent / CHANGES, fcntl.LOCK_EX))
                _remove_unused(parent)
            places = [parent / (re.sub(r"\W+", "_", name) or "job") for parent in parents]
            place = next((place for place in places if place.exists()), places[0])
            place.mkdir(exist_ok=True)
            return cls(place, rank, keep_steps=keep_steps, cache_bytes=cache_bytes)

    def put(self, key: int, pixels: Pixels, step: int) -> None:
        """Adds the image of a positive `key`, uint8 of shape [frames, height, width, 3], for a task of `step`.

        An existing image of this key stays unchanged. Raises ValueError if it has another shape, and ConfigError if the
        file cannot be written.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3 or key < 1:
            raise ValueError(
                f"image {key} has {pixels.dtype} {pixels.shape}; expected uint8 [frames, height, width, 3]"
            )
        path = self._path(key)
        beside = self.folder / f".{key}.{self.own.name}.{threading.get_ident()}"
        with _explained(path):
            if self._publish(key, None, pixels.shape[:3], step):
                return
            try:
                with beside.open("wb") as file:
                    file.write(HEADER.pack(MAGIC, step, *pixels.shape[:3]))
                    file.write(np.ascontiguousarray(pixels).data)
                self._publish(key, beside, pixels.shape[:3], step)
            finally:
                beside.unlink(missing_ok=True)

    def _publish(self, key: int, beside: Path | None, shape: tuple[int, ...], step: int) -> bool:
        """Renames `beside` to the image's file if there is none. Returns whether there is one then."""
        path = self._path(key)
        with self._changing():
            if not path.exists():
                if beside is None:
                    return False
                beside.rename(path)
                self._put[key] = _Put(path.stat().st_size, step)
            if (stored := _header(path).shape) != shape:
                raise ValueError(f"image {key} has shape {shape}, but the stored one has {stored}")
            _mark(path, step)
            return True

    def hold(self, keys: Iterable[int], step: int) -> None:
        """Keeps the images for this rank until `release_before` of a later step.

        Raises ImageMissing with the keys of images that the store lacks. All others are held then.
        """
        missing = []
        with self._changing():
            for key in dict.fromkeys(keys):
                if not self._link(key):
                    missing.append(key)
                    continue
                self._held[key] = max(step, self._held.get(key, step))
                _mark(self._own_path(key), step)
        if missing:
            raise ImageMissing(missing)

    def _link(self, key: int) -> bool:
        if key in self._held:
            return True
        try:
            self._own_path(key).hardlink_to(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def pixels(self, key: int) -> Pixels:
        """Returns the pixels, mapped from the file. They stay valid after its removal, and writes to them stay in this
        process. Raises ImageMissing."""
        with self._opened(key) as file:
            shape = _read_header(file).shape
            return np.memmap(file, np.uint8, mode="c", offset=HEADER.size, shape=(*shape, 3))

    def shape(self, key: int) -> tuple[int, int, int]:
        """Returns (frames, height, width) of an image. Raises ImageMissing."""
        with self._opened(key) as file:
            return _read_header(file).shape

    @contextmanager
    def _opened(self, key: int) -> Iterator[BinaryIO]:
        path = self._own_path(key) if key in self._held else self._path(key)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise ImageMissing([key]) from None
        with file:
            yield file

    def missing(self, keys: Iterable[int]) -> list[int]:
        """Returns the keys of images without a file, each once. Others may be removed at any time until they are
        held."""
        return [key for key in dict.fromkeys(keys) if key not in self._held and not self._path(key).exists()]

    def begin_fetch(self, seconds: float) -> bool:
        """Waits up to `seconds` until no other rank of the node fetches images. Returns whether this rank may now do
        so, until `end_fetch`."""
        end = time.monotonic() + seconds
        while self._fetches is None:
            try:
                self._fetches = _locked_file(self.folder / FETCHES, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    return False
                time.sleep(min(seconds, LOOK_S))
        return True

    def end_fetch(self) -> None:
        if self._fetches is not None:
            os.close(self._fetches)
            self._fetches = None

    def release_before(self, step: int) -> None:
        """Ends the holding of images for steps before `step`, and removes unused files beyond the cache."""
        with self._changing():
            for key in [key for key, last in self._held.items() if last < step]:
                self._own_path(key).unlink(missing_ok=True)
                del self._held[key]
            self._remove_unused(step)

    def _remove_unused(self, step: int) -> None:
        """Removes this rank's longest unused files if they take more than the cache."""
        found = [key for key, put in self._put.items() if put.step + self.keep_steps < step]
        excess = sum(self._put[key].num_bytes for key in found) - self.cache_bytes
        for key in sorted(found, key=lambda key: self._put[key].step):
            if excess <= 0:
                return
            path, put = self._path(key), self._put.pop(key)
            excess -= put.num_bytes
            if not path.exists():
                continue
            used = _header(path).step
            if path.stat().st_nlink > 1 or used + self.keep_steps >= step:
                self._put[key] = put._replace(step=used)
            else:
                path.unlink()

    def close(self) -> None:
        """Ends the use of the store. The last process removes its folder. Mapped pixels stay valid."""
        if self._in_use is None:
            return
        with ExitStack() as stack:
            stack.callback(os.close, _locked_file(self.folder.parent / CHANGES, fcntl.LOCK_EX))
            shutil.rmtree(self.own, ignore_errors=True)
            os.close(self._in_use)
            self._in_use = None
            if not _is_used(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lets no other thread or process change the names of files."""
        with self._guard:
            descriptor = _locked_file(self.folder / CHANGES, fcntl.LOCK_EX)
            try:
                yield
            finally:
                os.close(descriptor)

    def _path(self, key: int) -> Path:
        return self.folder / str(key)

    def _own_path(self, key: int) -> Path:
        return self.own / str(key)


# Headers of files.


class _Header(NamedTuple):
    step: int
    shape: tuple[int, int, int]


def _header(path: Path) -> _Header:
    with path.open("rb") as file:
        return _read_header(file)


def _read_header(file: BinaryIO) -> _Header:
    _, step, frames, height, width = HEADER.unpack(file.read(HEADER.size))
    return _Header(step, (frames, height, width))


def _mark(path: Path, step: int) -> None:
    """Writes `step` as the last step of use, if it is later."""
    with path.open("r+b") as file:
        file.seek(STEP_AT)
        if STEP.unpack(file.read(STEP.size))[0] < step:
            file.seek(STEP_AT)
            file.write(STEP.pack(step))


# Folders of stores. A user has one parent folder per file system.


def _bases(folder: str | None) -> list[str]:
    """Returns folders for the parents of stores, the preferred one first."""
    if folder is not None:
        return [folder]
    temporary = tempfile.gettempdir()
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return [temporary]
    has_room = free_bytes(SHARED_MEMORY) >= ROOM
    preferred = [str(SHARED_MEMORY), temporary] if has_room else [temporary, str(SHARED_MEMORY)]
    return [*dict.fromkeys(preferred)]


def _parent(base: Path) -> Path:
    """Returns this user's folder of stores in `base`. No other user may read it."""
    path = base / f"rltrain-images-{os.getuid()}"
    with _explained(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{FOLDER_KEY}: {path} is no folder of this user; expected another folder, or its removal")
    return path


def _remove_unused(parent: Path) -> None:
    """Removes the stores of ended processes. The caller has `parent` locked."""
    for folder in parent.iterdir():
        if folder.is_dir() and not _is_used(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Returns whether a process uses a store. The lock ends with a process, even in another container."""
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _locked_file(path: Path, kind: int) -> int:
    """Opens a file and waits for its lock. Returns the descriptor. Closing it ends the lock.

    With LOCK_NB in `kind` it raises BlockingIOError instead of waiting.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, KEY, FOLDER_KEY) from error
