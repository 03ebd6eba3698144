"""The files of a checkpoint: written to last, with checksums that tell whether they still are what was written.

Checksums are made of what is written while it is, so no file is read again.
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

# A file of a run's checkpoint as its readers see it, who say what they are about to read of it.


class TensorRows(NamedTuple):
    """Elements of a flat tensor: from `first` on, in each of `rows` that lie `stride` apart, `cols`."""

    tensor: str
    first: int
    rows: int
    cols: int
    stride: int


class SavedFile:
    """A safetensors file that is here as a whole. `path` is its place in the checkpoint's folder."""

    is_whole = True
    """Else nothing may be read but what was asked for by one of the methods."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def place(self) -> Path:
        """Where it is to be opened, after what is read of it was asked for. Its header may always be read."""
        return self.path

    def ask_for_tensor(self, name: str) -> None:
        """CheckpointError, as of all of these, where it cannot be had."""

    def ask_for_rows(self, rows: Sequence[TensorRows]) -> None:
        """Of several tensors."""

    def ask_for_all(self) -> None:
        """Of the file."""


AnyFile = Path | SavedFile
"""A path stands for a file that is whole."""


def saved_file(file: AnyFile) -> SavedFile:
    return SavedFile(file) if isinstance(file, Path) else file


MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
WEIGHTS_SUFFIX = ".safetensors"
READ_BYTES = 2**20
"""At a time, over and over into the same memory: they are in a core's own cache when their checksum is made."""
MOST_CACHED_BYTES = 256 * 2**20
"""Of a file that is written, in the system's memory: a training state may be as large as what is free there."""


@dataclass(frozen=True)
class Contents:
    """Of one safetensors file: tensors on the host that nobody else writes to, and texts."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class FileRecord(NamedTuple):
    """What a manifest says of a file."""

    num_bytes: int
    crc32: int


def write_files(folder: Path, files: Mapping[str, Contents]) -> dict[str, FileRecord]:
    """Write `files` below `folder`; durable when this returns. OSError where the disk does not take them."""
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
    """Write what `opened` files hold, from their beginning, as `write_files` does; they are what `expected` says.
    OSError where they are not, too."""
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
    """CheckpointError where it cannot be read. The tensors lie in the file until they are used."""
    saved = saved_file(file)
    saved.ask_for_all()
    with _opened(saved) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return Contents(tensors, opened.metadata() or {})


def read_texts(file: AnyFile) -> Mapping[str, str]:
    """The metadata of `read_contents` alone."""
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
    """Reads the whole file; `advance` is called now and then."""
    num_bytes, crc = 0, 0
    block = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            num_bytes, crc = num_bytes + count, crc32(block[:count], crc)
            advance()
    return FileRecord(num_bytes, crc)


def record_of(data: bytes) -> FileRecord:
    """Of a file that holds them."""
    return FileRecord(len(data), crc32(memoryview(data)))


def find_damage(
    folder: Path, manifest: Mapping[str, FileRecord], names: Iterable[str], advance: Callable[[], None]
) -> str | None:
    """What is wrong with those files of a checkpoint that are called `names`, in words; None where they are what
    `manifest` says was written."""
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
    """What it says of every file. CheckpointError where it cannot be read, leaves out the file that every checkpoint
    has, or one that would be read with the others."""
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
    """What a manifest's text says. ValueError, KeyError, TypeError and others where it is none."""
    values = json.loads(manifest)
    return {str(name): FileRecord(int(v["num_bytes"]), int(v["crc32"])) for name, v in values.items()}


# States of a process's random number generators, for what a user's code may draw: the product's own needs none.


def random_states(device: torch.device) -> tuple[dict[str, Tensor], str]:
    """(torch's states by name, Python's and numpy's as JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {"key": numpy_state["state"]["key"].tolist(), "pos": numpy_state["state"]["pos"]}
    return tensors, json.dumps({"python": random.getstate(), "numpy": numpy_state})


def set_random_states(tensors: Mapping[str, Tensor], text: str, device: torch.device) -> None:
    """The inverse of `random_states`; a device of another kind keeps its own."""
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    states = json.loads(text)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = states["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
