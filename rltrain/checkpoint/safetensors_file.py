"""Writes a safetensors file piece by piece. The header is known first, so no tensor must be in memory as a whole."""

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
"""The names of types in the format."""

HEADER_ALIGNMENT = 8
LENGTH_BYTES = 8
"""Bytes of the number at the beginning of a file. It is the header's length."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file. With `turns` it has stacked matrices, and the file has them transposed: `shape` is the
    file's, but elements are appended in the order of the matrices before that."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    turns: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def in_file_order(entries: Sequence[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Returns the entries with wide types first, and otherwise in the given order. So every tensor is aligned."""
    return tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))


class SafetensorsFile(DurableFile):
    """A new file with `entries`. Their elements must be appended in the order of `self.entries`, made by
    `in_file_order`.

    As a context manager, it closes the file at the end of its block. The file is then complete and durable, or an error
    is raised. Raises OSError if writing fails. `checksum`, `most_cached_bytes` and `behind_bytes` are those of
    DurableFile.
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
        self._turning = {entry.name: (entry.shape[1], entry.shape[2]) for entry in entries if entry.turns}
        self._collected: list[Tensor] = []
        header = _header(self.entries, metadata)
        super().__init__(path, checksum=checksum, most_cached_bytes=most_cached_bytes, behind_bytes=behind_bytes)
        self.write(header)
        self._drop_finished()

    def append(self, name: str, values: Tensor) -> None:
        """Appends the next elements of tensor `name`, flattened. Raises ValueError if another tensor or none is due."""
        if values.numel() == 0:
            return
        due, dtype, elements = self._remaining[-1] if self._remaining else ("none", None, 0)
        if (name, values.dtype) != (due, dtype) or values.numel() > elements:
            raise ValueError(
                f"{self.path}: got {values.numel()} elements of {name} as {values.dtype}; {elements} of {due} as "
                f"{dtype} are due"
            )
        if name in self._turning:
            self._collect(values, *self._turning[name])
        else:
            self.write_tensor(values)
        self._remaining[-1] = (name, values.dtype, elements - values.numel())
        self._drop_finished()

    def _collect(self, values: Tensor, rows: int, columns: int) -> None:
        """Writes all matrices [rows, columns] that `values` complete. They arrive transposed. The rest is copied."""
        self._collected.append(values.reshape(-1))
        come = torch.cat(self._collected)
        whole = come.numel() // (rows * columns)
        matrices = come[: whole * rows * columns].view(whole, columns, rows)
        if whole:
            self.write_tensor(matrices.transpose(1, 2).contiguous())
        self._collected = [come[whole * rows * columns :].clone()]

    def _drop_finished(self) -> None:
        while self._remaining and self._remaining[-1][2] == 0:
            self._remaining.pop()

    def close(self) -> None:
        """Makes the file durable and closes it. Raises CheckpointError if elements are missing. The file is then
        unusable."""
        if self._remaining:
            self.give_up()
            name, _, elements = self._remaining[-1]
            raise CheckpointError(
                f"{self.path}: {len(self._remaining)} tensors were not written, the first is {name}, which lacks "
                f"{elements} elements"
            )
        super().close()


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Returns the header's length and its JSON with the type, shape and place of every tensor. Places count from the
    end of the header."""
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
