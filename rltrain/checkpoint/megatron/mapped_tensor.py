"""Tensors that torch.save wrote, as views of the mapped file: nothing is copied, and nothing of it is run."""

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from rltrain.checkpoint.megatron.unpickling import Record, unpickle
from rltrain.errors import CheckpointError, one_of

REBUILD = "torch._utils._rebuild_tensor_v2"
"""The function that a pickled tensor names where it is nothing but a tensor."""

STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What stands before a file of an archive: the signature, and the lengths of its name and of what fills up to it."""
LOCAL_SIGNATURE = b"PK\3\4"


def map_file(path: Path) -> memoryview:
    """The bytes of a file that is not empty. Memory that is private to this process, as torch wants it to be writable;
    no descriptor stays open. RuntimeError where it cannot be read."""
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy().data


def saved_tensor(saved: memoryview, where: str) -> Tensor:
    """The tensor that torch.save made `saved` of, as a view of it.

    CheckpointError where that is something else, compressed or of another byte order; `where` begins its message. Other
    exceptions where it is damaged. Checksums are not compared.
    """
    records = _records(saved, where)
    byte_order = bytes(records.get("byteorder", b"little")).decode()
    if byte_order != "little":
        raise CheckpointError(f"{where} was written in {byte_order}-endian order; expected little")
    found = unpickle(io.BytesIO(records["data.pkl"]), where)
    made_by = found.name if isinstance(found, Record) else type(found).__name__
    if made_by != REBUILD:
        raise CheckpointError(f"{where} holds what {made_by} makes; expected a plain tensor, which {REBUILD} makes")
    storage, offset, shape, strides, *_ = found.arguments
    _, kind, key, _, num_elements = storage.arguments[0]
    if kind.name not in STORAGES:
        raise CheckpointError(f"{where} holds a {kind.name}; expected {one_of(kind.name, STORAGES)}")
    values, dtype = records[f"data/{key}"], STORAGES[kind.name]
    if len(values) != num_elements * dtype.itemsize:
        raise ValueError(f"{num_elements} elements of {dtype} lie in {len(values)} bytes")
    return torch.frombuffer(values, dtype=dtype).as_strided(shape, strides, offset)  # which looks at the bounds


def _records(archive: memoryview, where: str) -> Mapping[str, memoryview]:
    """The files of a zip archive, by their names in its only folder."""
    with zipfile.ZipFile(cast(IO[bytes], _Opened(archive))) as opened:
        return {entry.filename.partition("/")[2]: _record(archive, entry, where) for entry in opened.infolist()}


def _record(archive: memoryview, entry: zipfile.ZipInfo, where: str) -> memoryview:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{where} holds {entry.filename} compressed; expected it as it is in memory")
    signature, name_length, filling_length = LOCAL_HEADER.unpack_from(archive, entry.header_offset)
    begin = entry.header_offset + LOCAL_HEADER.size + name_length + filling_length
    record = archive[begin : begin + entry.file_size]
    if signature != LOCAL_SIGNATURE or len(record) != entry.file_size:
        raise ValueError(f"{entry.filename} is not at byte {entry.header_offset} of its archive")
    return record


class _Opened(io.RawIOBase):
    """Memory as a file to read."""

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
