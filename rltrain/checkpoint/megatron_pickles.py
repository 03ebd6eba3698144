"""Reads pickles of Megatron checkpoints as data. It never imports or calls anything named in a pickle.

Imports of a pickle are replaced by a Record. A Record only notes the name and arguments of the call. Names outside the
packages of known checkpoint objects are refused, because loading such a pickle could run code.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.serialization import skip_data

from rltrain.errors import CheckpointError, one_of

DATA_PACKAGES = (
    "_codecs",
    "argparse",
    "collections",
    "datetime",
    "enum",
    "functools",
    "megatron",
    "numpy",
    "pathlib",
    "signal",
    "torch",
    "types",
)
DATA_BUILTINS = ("bytearray", "complex", "frozenset", "getattr", "object", "range", "set", "slice")
"""Builtins allowed as data. getattr names the members of enumerations."""

BUILTINS_IN_OLD_PROTOCOLS = {"__builtin__": "builtins"}

NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")

PLAIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
}
"""Types made for real, because other objects are kept in them or compared with them."""


class Record:
    """An object of a pickle: the name of its class or factory function, its arguments, state and items."""

    name: str
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments, record.state, record.items = (*arguments, *named.values()), {}, []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)


class _Data(pickle.Unpickler):
    """An unpickler for Records instead of objects."""

    def find_class(self, module: str, name: str) -> Any:
        module = BUILTINS_IN_OLD_PROTOCOLS.get(module, module)
        full = f"{module}.{name}"
        if full in PLAIN:
            return PLAIN[full]
        package = module.split(".")[0]
        if package not in DATA_PACKAGES and not (package == "builtins" and name in DATA_BUILTINS):
            raise _Refused(full)
        return type(name, (Record,), {"name": full})

    def persistent_load(self, pid: Any) -> Any:
        """Returns a Record for a tensor's storage. Storages are beside the pickle, and none is needed."""
        return Record(pid)


class _Refused(Exception):  # noqa: N818 - names what was found
    """The pickle names something other than data."""


def read_pickle(path: Path) -> Any:
    """Returns the contents of the pickle `path`. Raises CheckpointError if it is missing, damaged or names something
    other than data."""
    with _opened(path) as file:
        return unpickle(file, str(path))


def read_torch_pickle(path: Path, offset: int = 0, length: int = -1) -> Any:
    """Returns the object written by torch.save into `path`, or into `length` bytes of it from `offset`, without
    tensors.

    Raises CheckpointError as read_pickle does.
    """
    with _opened(path) as file:
        try:
            file.seek(offset)
            with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickled = archive.read(name)
        except (zipfile.BadZipFile, ValueError, OSError) as problem:
            raise CheckpointError(f"{path} is damaged or was not written by torch.save: {problem}") from None
        return unpickle(io.BytesIO(pickled), str(path))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror}") from None


def unpickle(file: IO[bytes], where: str) -> Any:
    """Returns the contents of a pickle. Raises CheckpointError if it is damaged or names something other than data. The
    message begins with `where`."""
    try:
        return _Data(file).load()
    except _Refused as refused:
        raise CheckpointError(
            f"{where} asks for {refused}, which is no data: loading it could run code. The file was not loaded. Get "
            "the checkpoint from a trusted source"
        ) from None
    except Exception as problem:  # damaged pickles raise almost anything
        raise CheckpointError(f"{where} is damaged: {problem!r}") from None


def plain(value: Any) -> Any:
    """Returns `value` as plain data: simple namespaces as dicts, members of enumerations as their values, paths and
    types as strings."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, type) and issubclass(value, Record):
        return value.name
    if not isinstance(value, Record):
        return value
    if value.name in NAMESPACES:
        return plain(value.state)
    if value.name.startswith("pathlib."):
        return str(PurePosixPath(*value.arguments))
    return plain(value.arguments[-1]) if value.arguments else value.name


# Tensors written by torch.save, as views of the mapped file. Nothing is copied, and no code of the file is run.

REBUILD = "torch._utils._rebuild_tensor_v2"
"""The function named by a pickled plain tensor."""

STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""The header before a file of an archive: the signature, and the lengths of its name and of the padding after it."""
LOCAL_SIGNATURE = b"PK\3\4"


def map_file(path: Path) -> memoryview:
    """Returns the bytes of a file, mapped into memory. The file must not be empty. The memory is private to this
    process, because torch wants it writable. No descriptor stays open. Raises RuntimeError if it cannot be read."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy().data


def saved_tensor(saved: memoryview, where: str) -> Tensor:
    """Returns the tensor in `saved`, bytes written by torch.save, as a view of them.

    Raises CheckpointError if they are something else, compressed or of another byte order. The message begins with
    `where`. Raises other exceptions if they are damaged. Checksums are not compared.
    """
    records = _records(saved, where)
    byte_order = bytes(records.get("byteorder", b"little")).decode()
    if byte_order != "little":
        raise CheckpointError(f"{where} was written in {byte_order}-endian order; expected little")
    found = unpickle(io.BytesIO(records["data.pkl"]), where)
    made_by = found.name if isinstance(found, Record) else type(found).__name__
    if made_by != REBUILD:
        raise CheckpointError(f"{where} holds an object made by {made_by}; expected a plain tensor, made by {REBUILD}")
    storage, offset, shape, strides, *_ = found.arguments
    _, kind, key, _, num_elements = storage.arguments[0]
    if kind.name not in STORAGES:
        raise CheckpointError(f"{where} holds a {kind.name}; expected {one_of(kind.name, STORAGES)}")
    values, dtype = records[f"data/{key}"], STORAGES[kind.name]
    if len(values) != num_elements * dtype.itemsize:
        raise ValueError(f"{num_elements} elements of {dtype} are in {len(values)} bytes")
    return torch.frombuffer(values, dtype=dtype).as_strided(shape, strides, offset)  # checks the bounds


def _records(archive: memoryview, where: str) -> Mapping[str, memoryview]:
    """Returns the files of a zip archive, by their names in its only folder."""
    with zipfile.ZipFile(cast(IO[bytes], _Opened(archive))) as opened:
        return {entry.filename.partition("/")[2]: _record(archive, entry, where) for entry in opened.infolist()}


def _record(archive: memoryview, entry: zipfile.ZipInfo, where: str) -> memoryview:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{where} holds {entry.filename} compressed; expected it uncompressed")
    signature, name_length, filling_length = LOCAL_HEADER.unpack_from(archive, entry.header_offset)
    begin = entry.header_offset + LOCAL_HEADER.size + name_length + filling_length
    record = archive[begin : begin + entry.file_size]
    if signature != LOCAL_SIGNATURE or len(record) != entry.file_size:
        raise ValueError(f"{entry.filename} is not at byte {entry.header_offset} of its archive")
    return record


class _Opened(io.RawIOBase):
    """A readable file in memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


# The format of torch.save around the elements of a tensor. Elements are written piece by piece, so they need not be in
# memory.

DESCRIPTOR_SIGNATURE, ENTRY_SIGNATURE = b"PK\7\x08", b"PK\1\2"
CRC_IN_DESCRIPTOR, CRC_IN_ENTRY, ENTRY_BYTES = 4, 16, 46
"""Positions of a file's checksum in a zip archive: after the file, and in its directory entry, before its name."""
ELEMENTS = b"archive/data/0"


@dataclass(frozen=True)
class Around:
    """The bytes before the elements, and the bytes after elements with the checksum 0."""

    before: bytes
    behind: bytes

    def closing(self, crc32: int) -> bytes:
        """Returns the bytes after elements with this checksum."""
        closing = bytearray(self.behind)
        for at in _checksum_places(self.behind):
            closing[at : at + 4] = crc32.to_bytes(4, "little")
        return bytes(closing)


def around_elements(shape: tuple[int, ...], dtype: torch.dtype) -> Around:
    """Returns the output of torch.save for a contiguous, non-empty tensor, without its elements."""
    file = _Hollow()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], file))  # untouched memory takes no room
    before, *behind = file.parts
    if len(behind) != 1:
        raise RuntimeError(f"torch {torch.__version__} leaves {len(behind)} holes for a tensor's elements, not one")
    return Around(before.getvalue(), behind[0].getvalue())


class _Hollow:
    """A writable file. It begins another part at every gap."""

    def __init__(self) -> None:
        self.parts = [io.BytesIO()]

    def write(self, data: Any) -> int:
        return self.parts[-1].write(data)

    def seek(self, offset: int, whence: int) -> None:
        self.parts.append(io.BytesIO())

    def flush(self) -> None:
        pass


def _checksum_places(behind: bytes) -> Iterator[int]:
    in_directory = behind.rfind(ELEMENTS) - ENTRY_BYTES
    for signature, begin, at in (
        (DESCRIPTOR_SIGNATURE, 0, CRC_IN_DESCRIPTOR),
        (ENTRY_SIGNATURE, in_directory, CRC_IN_ENTRY),
    ):
        if behind[begin : begin + 4] != signature or any(behind[begin + at : begin + at + 4]):
            raise RuntimeError(f"torch {torch.__version__} writes tensors in an unknown archive format")
        yield begin + at
