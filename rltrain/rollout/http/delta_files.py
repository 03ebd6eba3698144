"""Files of what changed: a part's tensors compared with those that were sent last, encoded and written.

rltrain/rollout/sglang/server/rltrain_delta_files.py says what is in them, and reads them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA
from rltrain.checkpoint.safetensors_file import Entry, SafetensorsFile
from rltrain.reshard.changes import Changes, Extent, mark
from rltrain.reshard.checksums import checksum_of
from rltrain.rollout.layout import form

FileRecord = tuple[int, int]
"""Bytes of a file, and their CRC-32."""


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """What changed of a tensor, at least one element; `checksum` is that of all of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent
    encoded: Tensor
    checksum: int

    @property
    def arrays(self) -> dict[str, Tensor]:
        """By their names in a file."""
        lengths, places, values = self.extent.parts(self.encoded)
        return {
            self.name + form.LENGTHS: lengths,
            self.name + form.PLACES: places,
            self.name + form.VALUES: values.view(self.dtype),
        }

    @property
    def told(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": [*self.shape], "checksum": self.checksum}


def encoded(changes: Changes, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> list[EncodedTensor]:
    """What of `tensors` differs, as bits, from what is `kept`, which then equals them. `tensors` are on the device of
    `changes`."""
    found = []
    for name, tensor in tensors.items():
        packed, before = _bytes_of(tensor), _bytes_of(kept[name])
        remembered = before.to(packed.device)
        marks = mark(changes, packed, remembered, tensor.itemsize)
        if marks.extent.values:
            out = torch.empty(marks.extent.num_bytes, dtype=torch.uint8, device=packed.device)
            changes.write(packed, remembered, marks, marks.extent.parts(out))
            shape = tuple(tensor.shape)
            found.append(EncodedTensor(name, tensor.dtype, shape, marks.extent, out, checksum_of(tensor)))
            if remembered.data_ptr() != before.data_ptr():
                before.copy_(remembered)
    return found


def write_changes(path: Path, tensors: list[EncodedTensor]) -> FileRecord:
    """A new file, durable. OSError where it cannot be written."""
    arrays = {name: array for tensor in tensors for name, array in tensor.arrays.items()}
    entries = [Entry(name, array.dtype, tuple(array.shape)) for name, array in arrays.items()]
    metadata = {**METADATA, form.METADATA: json.dumps({tensor.name: tensor.told for tensor in tensors})}
    with SafetensorsFile(path, entries, metadata, checksum=True) as opened:
        for entry in opened.entries:
            opened.append(entry.name, arrays[entry.name])
    return opened.num_bytes, opened.crc32


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
