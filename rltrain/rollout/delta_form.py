"""The file format of weight deltas, from servers/in_sglang/rltrain_delta_files.py, and writing such files.

SGLang's Python imports that file as a top-level module.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA
from rltrain.checkpoint.safetensors_file import SafetensorsFile, TensorEntry
from rltrain.reshard.changes import Changes, Extent, mark
from rltrain.reshard.checksums import checksum_of

if TYPE_CHECKING:
    import rltrain_delta_files as form
else:
    from rltrain.rollout.servers.in_sglang import rltrain_delta_files as form

__all__ = ["EncodedTensor", "FileRecord", "encoded", "form", "write_changes"]

# Delta files: changed elements of a part's tensors since the last version.
#
# in_sglang/rltrain_delta_files.py documents the format and reads the files.

FileRecord = tuple[int, int]
"""Size of a file in bytes, and its CRC-32."""


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """The changed elements of a tensor, at least one. `checksum` covers the whole tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    extent: Extent
    encoded: Tensor
    checksum: int

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Arrays by their names in the file."""
        lengths, places, values = self.extent.parts(self.encoded)
        return {
            self.name + form.LENGTHS: lengths,
            self.name + form.PLACES: places,
            self.name + form.VALUES: values.view(self.dtype),
        }

    @property
    def told(self) -> dict[str, Any]:
        """The tensor's dtype, shape and checksum as JSON values, for the file's metadata."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": [*self.shape], "checksum": self.checksum}


def encoded(changes: Changes, tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> list[EncodedTensor]:
    """Returns the elements of `tensors` whose bits differ from `kept`, and copies them into `kept`.

    `tensors` must be on the device of `changes`.
    """
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
    """Writes a new file durably. Raises OSError if it cannot be written."""
    arrays = {name: array for tensor in tensors for name, array in tensor.arrays.items()}
    entries = [TensorEntry(name, array.dtype, tuple(array.shape)) for name, array in arrays.items()]
    metadata = {**METADATA, form.METADATA: json.dumps({tensor.name: tensor.told for tensor in tensors})}
    with SafetensorsFile(path, entries, metadata, checksum=True) as opened:
        for entry in opened.entries:
            opened.append(entry.name, arrays[entry.name])
    return opened.num_bytes, opened.crc32


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
