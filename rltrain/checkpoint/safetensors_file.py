"""Writing a safetensors file piece by piece: the header is known first, so no tensor need be in memory as a whole."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.durable_file import DurableFile
from rltrain.errors import CheckpointError

WEIGHT_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPE_NAMES = {
    **WEIGHT_TYPE_NAMES,
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.bool: "BOOL",
}
"""What the format calls the types that are written here."""

HEADER_ALIGNMENT = 8
LENGTH_BYTES = 8
"""Of the number at the beginning of a file, which is the header's length."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """The given order but for wide types, which come first, so that every tensor is aligned."""
    return tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))


class SafetensorsFile(DurableFile):
    """A new file that will hold `entries`; their elements are appended in the order of `self.entries`, which is
    `in_file_order`.

    As a context manager it closes the file when its block ends; the file is then complete and durable, or an error was
    raised. OSError where writing fails.

    Checksum, limit of what is cached and a thread that writes are those of a DurableFile.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[TensorEntry],
        metadata: Mapping[str, str],
        *,
        checksum: bool = False,
        most_cached_bytes: int | None = None,
        behind_bytes: int = 0,
    ) -> None:
        self.path = path
        self.entries = in_file_order(entries)
        self._remaining = [(entry.name, entry.dtype, prod(entry.shape)) for entry in reversed(self.entries)]
        header = _header(self.entries, metadata)
        super().__init__(path, checksum=checksum, most_cached_bytes=most_cached_bytes, behind_bytes=behind_bytes)
        self.write(header)
        self._drop_finished()

    def append(self, name: str, values: Tensor) -> None:
        """The next elements of tensor `name`, flattened. ValueError where another tensor's or none are due."""
        if values.numel() == 0:
            return
        due, dtype, elements = self._remaining[-1] if self._remaining else ("none", None, 0)
        if (name, values.dtype) != (due, dtype) or values.numel() > elements:
            raise ValueError(
                f"{self.path}: got {values.numel()} elements of {name} as {values.dtype}; {elements} of {due} as "
                f"{dtype} are due"
            )
        self.write_tensor(values)
        self._remaining[-1] = (name, values.dtype, elements - values.numel())
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self._remaining and self._remaining[-1][2] == 0:
            self._remaining.pop()

    def close(self) -> None:
        """Make the file durable. CheckpointError where elements are missing: the file is not usable then."""
        if self._remaining:
            self.give_up()
            name, _, elements = self._remaining[-1]
            raise CheckpointError(
                f"{self.path}: {len(self._remaining)} tensors were not written, the first is {name}, which lacks "
                f"{elements} elements"
            )
        super().close()


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON: of every tensor its type, its shape and where its bytes lie behind the header."""
    contents: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        if entry.name in contents:
            raise ValueError(f"tensor {entry.name} is named twice")
        begin, end = end, end + entry.bytes
        contents[entry.name] = {
            "dtype": TYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(contents, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
