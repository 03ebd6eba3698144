"""The files of a checkpoint. Their checksums show whether they are still as written.

Checksums are computed while data is written, so no file is read again.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from isal.isal_zlib import crc32
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rltrain.checkpoint.durable_file import BEHIND_BYTES, DurableFile
from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from rltrain.errors import CheckpointError
from rltrain.runtime.whole_files import flush

# A checkpoint's file for its readers. They ask for each part before they read it.


class TensorRows(NamedTuple):
    """A part of a flat tensor. It has `rows` rows of `cols` elements, `stride` elements apart, from element `first`
    on."""

    tensor: str
    first: int
    rows: int
    cols: int
    stride: int


class SavedFile:
    """A safetensors file completely present on this node. `path` is its path in the checkpoint's folder."""

    is_whole = True
    """If false, only parts asked for by one of the methods may be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def place(self) -> Path:
        """The path to open after asking for the parts to read. The header may always be read."""
        return self.path

    def ask_for_tensor(self, name: str) -> None:
        """Makes a tensor readable. Raises CheckpointError if it cannot be read, as do the methods below."""

    def ask_for_rows(self, rows: Sequence[TensorRows]) -> None:
        """Makes rows of several tensors readable."""

    def ask_for_all(self) -> None:
        """Makes the whole file readable."""


AnyFile = Path | SavedFile
"""A file to read. A path means a completely present file."""


def saved_file(file: AnyFile) -> SavedFile:
    return SavedFile(file) if isinstance(file, Path) else file


MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
WEIGHTS_SUFFIX = ".safetensors"
READ_BYTES = 2**20
"""Bytes read at a time, always into the same memory. They are still in a core's cache when their checksum is
computed."""
MOST_CACHED_BYTES = 256 * 2**20
"""Maximum bytes of an unfinished file in the system's page cache. A training state may be as large as the free
memory."""


@dataclass(frozen=True)
class Contents:
    """The contents of one safetensors file: tensors on the host, and texts. No other code may write to the tensors."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class FileRecord(NamedTuple):
    """The entry of a file in a manifest."""

    num_bytes: int
    crc32: int


def write_files(folder: Path, files: Mapping[str, Contents]) -> dict[str, FileRecord]:
    """Writes `files` below `folder` and returns their records. The files are durable on return. Raises OSError if the
    disk refuses them."""
    records = {}
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        entries = [
            TensorEntry(tensor, values.dtype, tuple(values.shape)) for tensor, values in contents.tensors.items()
        ]
        with SafetensorsFile(
            path,
            entries,
            contents.metadata,
            checksum=True,
            most_cached_bytes=MOST_CACHED_BYTES,
            behind_bytes=BEHIND_BYTES,
        ) as file:
            for entry in file.entries:
                file.append(entry.name, contents.tensors[entry.name])
        records[name] = FileRecord(file.num_bytes, file.crc32)
    for parent in {(folder / name).parent for name in files}:
        flush(parent)
    return records


def copy_files(
    folder: Path, opened: Mapping[str, FileIO], expected: Mapping[str, FileRecord]
) -> Mapping[str, FileRecord]:
    """Copies the `opened` files below `folder`, from their beginning, as `write_files` does. Raises OSError if the disk
    refuses them, or if they differ from `expected`."""
    block = memoryview(bytearray(READ_BYTES))
    for name, source in opened.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        source.seek(0)
        with DurableFile(path, checksum=True, most_cached_bytes=MOST_CACHED_BYTES) as file:
            while count := source.readinto(block):
                file.write(block[:count])
        if FileRecord(file.num_bytes, file.crc32) != expected[name]:
            raise OSError(f"{name} has changed in memory since it was written there")
    for parent in {(folder / name).parent for name in opened}:
        flush(parent)
    return expected


def read_contents(file: AnyFile) -> Contents:
    """Returns the contents of a file. The tensors stay in the file until they are used. Raises CheckpointError if it
    cannot be read."""
    saved = saved_file(file)
    saved.ask_for_all()
    with _opened(saved) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return Contents(tensors, opened.metadata() or {})


def read_texts(file: AnyFile) -> Mapping[str, str]:
    """Returns only the metadata of `read_contents`."""
    with _opened(saved_file(file)) as opened:
        texts: Mapping[str, str] = opened.metadata() or {}
    return texts


@contextmanager
def _opened(saved: SavedFile) -> Iterator[Any]:
    try:
        with safe_open(saved.place, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{saved.path} cannot be read: {error}") from error


def checksum(path: Path, advance: Callable[[], None] = lambda: None) -> FileRecord:
    """Returns the record of a file. Reads the whole file and calls `advance` after every block."""
    num_bytes, crc = 0, 0
    block = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            num_bytes, crc = num_bytes + count, crc32(block[:count], crc)
            advance()
    return FileRecord(num_bytes, crc)


def record_of(data: bytes) -> FileRecord:
    """Returns the record of a file with these contents."""
    return FileRecord(len(data), crc32(memoryview(data)))


def find_damage(
    folder: Path, manifest: Mapping[str, FileRecord], names: Iterable[str], advance: Callable[[], None]
) -> str | None:
    """Compares the files `names` of a checkpoint with `manifest`. Returns a description of the first damage, or
    None."""
    for name in names:
        expected = manifest[name]
        try:
            found = checksum(folder / name, advance)
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if found.num_bytes != expected.num_bytes:
            return f"{folder / name} has {found.num_bytes} bytes; expected {expected.num_bytes}"
        if found != expected:
            return f"{folder / name} is damaged: its checksum is {found.crc32:08x}; expected {expected.crc32:08x}"
    return None


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Returns the record of every file of a checkpoint. Raises CheckpointError if the manifest cannot be read, does not
    list run.json, or does not list a safetensors file of the folder."""
    path = folder / MANIFEST_FILE
    try:
        records = records_in(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if RUN_FILE not in records:
        raise CheckpointError(f"{path} does not list {RUN_FILE}, which every checkpoint has")
    found = {file.relative_to(folder).as_posix() for file in folder.glob(f"*/*{WEIGHTS_SUFFIX}")}
    if unlisted := sorted(found.difference(records)):
        raise CheckpointError(f"{folder / unlisted[0]} is none of the checkpoint's files: {path} does not list it")
    return records


def records_in(manifest: str) -> dict[str, FileRecord]:
    """Returns the records in a manifest's text, by the file's path relative to the checkpoint's folder.

    A text of another form raises ValueError, KeyError, TypeError, AttributeError, OverflowError or RecursionError.
    """
    values = json.loads(manifest)
    return {str(name): FileRecord(int(v["num_bytes"]), int(v["crc32"])) for name, v in values.items()}


# States of a process's random number generators, for a user's code. rltrain itself does not use them.


def random_states(device: torch.device) -> tuple[dict[str, Tensor], str]:
    """Returns (torch's states by name, Python's and numpy's states as JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {"key": numpy_state["state"]["key"].tolist(), "pos": numpy_state["state"]["pos"]}
    return tensors, json.dumps({"python": random.getstate(), "numpy": numpy_state})


def set_random_states(tensors: Mapping[str, Tensor], text: str, device: torch.device) -> None:
    """Restores the states returned by `random_states`. A device of another kind keeps its state."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    states = json.loads(text)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = states["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
