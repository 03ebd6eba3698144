"""Delta folders: the changes of a checkpoint since an earlier version, as servers read them.

The manifest, MANIFEST, names the base version and the new version, with the size and checksum of each file. A file is
in the safetensors format. It has three arrays for every changed tensor, encoded as in csrc/reshard_delta.h. Its
metadata has the tensors' dtype and shape, and their checksum after the change. rltrain/rollout/delta_form.py writes the
files. Needs only torch, because an engine's Python may lack rltrain.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT, FORMAT_KEY = 1, "rltrain_delta_format"
"""The format number, and its key in the status of a server that accepts deltas."""
MANIFEST = "rltrain_delta.json"
VERSION_FILE = "rltrain_version.json"
"""File with the version of a whole checkpoint, in a folder that deltas follow."""
METADATA = "rltrain"
"""Key of the tensors' description in a file's metadata."""
LENGTHS, PLACES, VALUES = ".lengths", ".places", ".values"
"""Suffixes of the names of a tensor's arrays."""
BLOCK, WHOLE = 256, 255
"""RS_DELTA_BLOCK and RS_DELTA_WHOLE of csrc/reshard_delta.h."""

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_LENGTH_BYTES = 8
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, OverflowError)
"""Errors from reading malformed data."""


Listed = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of tensors, by name."""


class DeltaRefused(Exception):  # noqa: N818 - names what happened
    """The delta is damaged or does not follow the served version. Nothing was changed."""


class Described(NamedTuple):
    """A changed tensor, with the checksum of all of it after the change."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int


class Changed(NamedTuple):
    """A changed tensor with its new values. `elements` are their positions in the flat tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int
    elements: Tensor
    values: Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Delta:
    """The delta in `folder`. All methods raise DeltaRefused if it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _manifest_of(folder)
        self.base, self.version = str(manifest["base"]), str(manifest["version"])
        self._files: Mapping[str, tuple[int, int]] = manifest["files"]

    def check(self, held: str | None) -> dict[str, Described]:
        """Reads and checks every file. Returns the changed tensors by name.

        Raises DeltaRefused if the delta does not follow version `held`, or if a byte differs from those written.
        """
        if held != self.base:
            raise DeltaRefused(f"{self.folder} changes version {self.base}; expected {held}, which is served")
        return {name: tensor for file in self._files for name, tensor in self._opened(file)[1].items()}

    def tensors(self) -> Iterator[Changed]:
        """Yields the changed tensors one after another. Only one file is in memory at a time."""
        for file in self._files:
            header, described, data = self._opened(file)
            for name, tensor in described.items():
                try:
                    changed = _changed(name, tensor, header, data)
                except _MALFORMED as problem:
                    raise self._malformed(file, problem) from None
                yield changed

    def _opened(self, file: str) -> tuple[dict[str, Any], dict[str, Described], bytearray]:
        """Returns a file's header, its tensors by name, and its bytes."""
        data = self._read(file)
        try:
            header = _header_of(data)
            told: dict[str, Any] = json.loads(header["__metadata__"][METADATA])
            described = {
                name: Described(TYPES[one["dtype"]], tuple(map(int, one["shape"])), int(one["checksum"]))
                for name, one in told.items()
            }
        except _MALFORMED as problem:
            raise self._malformed(file, problem) from None
        return header, described, data

    def _malformed(self, file: str, problem: Exception) -> DeltaRefused:
        return DeltaRefused(f"{self.folder / file} is not in format {FORMAT} of rltrain's deltas: {problem!r}")

    def _read(self, name: str) -> bytearray:
        num_bytes, crc32 = self._files[name]
        path = self.folder / name
        try:
            data = bytearray(path.read_bytes())
        except OSError as error:
            raise DeltaRefused(f"{path} cannot be read: {error.strerror}") from None
        if len(data) != num_bytes or zlib.crc32(data) != crc32:
            raise DeltaRefused(f"{path} is damaged or cut short: expected {num_bytes} bytes with CRC-32 {crc32:08x}")
        return data


def is_delta(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def manifest_text(base: str, version: str, files: Mapping[str, tuple[int, int]]) -> str:
    """Returns the manifest of a folder. `files` has the size in bytes and CRC-32 of each file."""
    content = {"format": FORMAT, "base": base, "version": version, "files": {name: [*of] for name, of in files.items()}}
    return json.dumps({"crc32": _crc32_of(content), "delta": content}, indent=1) + "\n"


def version_text(version: str) -> str:
    """Returns the contents of VERSION_FILE."""
    return json.dumps({"version": version}) + "\n"


def version_of(folder: Path) -> str | None:
    """Returns the version of a whole checkpoint, or None if it has none."""
    try:
        return str(json.loads((folder / VERSION_FILE).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def listed(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the tensors of a whole checkpoint."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {name: (_STORED[told["dtype"]], tuple(told["shape"])) for name, told in header.items()}
    return found


def _manifest_of(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        content: dict[str, Any] = told["delta"]
        if _crc32_of(content) != told["crc32"]:
            raise DeltaRefused(f"{path} is damaged: its CRC-32 is wrong")
    except OSError as error:
        raise DeltaRefused(f"{path} cannot be read: {error.strerror}") from None
    except _MALFORMED as problem:
        raise DeltaRefused(f"{path} is damaged: {problem!r}") from None
    if any(Path(name).name != name for name in content["files"]):
        raise DeltaRefused(f"{path} names files outside of its folder")
    if content["format"] != FORMAT:
        raise DeltaRefused(f"{path} has format {content['format']}; expected {FORMAT}, the format of this rltrain")
    return content


def _crc32_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass"))


def _header_of(data: bytearray) -> dict[str, Any]:
    """Returns the header of a safetensors file. The offset of its first tensor byte is under ""."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header: dict[str, Any] = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return {**header, "": _LENGTH_BYTES + length}


def _changed(name: str, tensor: Described, header: Mapping[str, Any], data: bytearray) -> Changed:
    lengths, places, values = (_array(name + part, header, data) for part in (LENGTHS, PLACES, VALUES))
    elements = elements_of(lengths, places, math.prod(tensor.shape))
    if len(elements) != len(values) or values.dtype != tensor.dtype:
        raise ValueError(f"{name} has {len(elements)} places and {len(values)} values of {values.dtype}")
    return Changed(name, *tensor, elements, values)


def _array(name: str, header: Mapping[str, Any], data: bytearray) -> Tensor:
    told = header[name]
    dtype, (begin, end) = _STORED[told["dtype"]], told["data_offsets"]
    count = math.prod(told["shape"])
    if not 0 <= begin <= end <= len(data) - header[""] or end - begin != count * dtype.itemsize:
        raise ValueError(f"{name} is at bytes {begin} to {end}")
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=header[""] + begin)


def elements_of(lengths: Tensor, places: Tensor, count: int) -> Tensor:
    """Returns the positions of a tensor's changed elements, int64 [values], ascending. `count` is the number of
    elements.

    Raises ValueError if the arrays do not fit.
    """
    if len(lengths) != -(-count // BLOCK):
        raise ValueError(f"{len(lengths)} blocks of {count} elements")
    whole = lengths == WHOLE
    if bool(whole.all()) and not len(places):
        return torch.arange(count)
    changed = lengths.to(torch.int64).masked_fill(whole, 0)
    if int(changed.sum()) != len(places):
        raise ValueError(f"{len(places)} places; expected {int(changed.sum())}")
    number = torch.arange(len(lengths))
    sparse = number.repeat_interleave(changed)
    some = sparse * BLOCK + places
    if bool((some >= count).any()):
        raise ValueError("a place after the last element")
    first = _starts(torch.where(whole, BLOCK, changed))
    within = torch.arange(len(places)) - _starts(changed)[sparse]
    found = torch.empty(len(places) + BLOCK * int(whole.sum()), dtype=torch.int64)
    found[first[sparse] + within] = some
    inside = torch.arange(BLOCK)
    found[(first[whole][:, None] + inside).view(-1)] = (number[whole][:, None] * BLOCK + inside).view(-1)
    return found[: len(found) - int(whole[-1]) * (-count % BLOCK)]  # the last block may be shorter


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes
