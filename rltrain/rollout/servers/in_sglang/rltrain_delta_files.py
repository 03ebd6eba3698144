"""Folders that hold what changed of a checkpoint since a version before it, as servers read them.

A folder has a manifest, MANIFEST: which version it makes of which, and the bytes and checksum of each of its files. A
file is in the safetensors format; it has three arrays of every tensor of which anything changed, encoded as
csrc/reshard_delta.h says, and in its metadata the tensor's type, shape and checksum once they are applied.
rltrain/rollout/servers/disk_weights.py writes them. Needs torch alone: the Python of an engine need not have rltrain.
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
"""And under which name a server tells that it takes it."""
MANIFEST = "rltrain_delta.json"
VERSION_FILE = "rltrain_version.json"
"""Of a whole checkpoint that deltas are made of: the version that it is."""
METADATA = "rltrain"
"""Key of a file's metadata, with what its tensors are."""
LENGTHS, PLACES, VALUES = ".lengths", ".places", ".values"
"""What the names of a tensor's arrays end with."""
BLOCK, WHOLE = 256, 255
"""RS_DELTA_BLOCK and RS_DELTA_WHOLE."""

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
_LENGTH_BYTES = 8
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, OverflowError)
"""Raised by reading what nobody wrote so."""


Listed = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Tensors' types and shapes, by name."""


class DeltaRefused(Exception):  # noqa: N818 - what is told to whoever asked
    """It is damaged, or not of the version that it should change: nothing was changed by it."""


class Described(NamedTuple):
    """A tensor that is changed, and the checksum of all of it then."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: int


class Changed(NamedTuple):
    """A `Described` tensor, with what the elements of these numbers are then."""

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
    """That in `folder`. All of its methods raise DeltaRefused where it is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _manifest_of(folder)
        self.base, self.version = str(manifest["base"]), str(manifest["version"])
        self._files: Mapping[str, tuple[int, int]] = manifest["files"]

    def check(self, held: str | None) -> dict[str, Described]:
        """Its tensors, by name. DeltaRefused where it is not of version `held` either, or any byte is
        not what was written."""
        if held != self.base:
            raise DeltaRefused(f"{self.folder} changes version {self.base}; expected {held}, which is served")
        return {name: tensor for file in self._files for name, tensor in self._opened(file)[1].items()}

    def tensors(self) -> Iterator[Changed]:
        """What changed, one tensor after another: a file is held at a time."""
        for file in self._files:
            header, described, data = self._opened(file)
            for name, tensor in described.items():
                try:
                    changed = _changed(name, tensor, header, data)
                except _MALFORMED as problem:
                    raise self._malformed(file, problem) from None
                yield changed

    def _opened(self, file: str) -> tuple[dict[str, Any], dict[str, Described], bytearray]:
        """A file's header, its tensors by name, and its bytes."""
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
    """Of a folder with these files: bytes and CRC-32 of each."""
    content = {"format": FORMAT, "base": base, "version": version, "files": {name: [*of] for name, of in files.items()}}
    return json.dumps({"crc32": _crc32_of(content), "delta": content}, indent=1) + "\n"


def version_text(version: str) -> str:
    """Of VERSION_FILE."""
    return json.dumps({"version": version}) + "\n"


def version_of(folder: Path) -> str | None:
    """That of a whole checkpoint; None where none is told."""
    try:
        return str(json.loads((folder / VERSION_FILE).read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def listed(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a whole checkpoint."""
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
            raise DeltaRefused(f"{path} is damaged: it is not what was written")
    except OSError as error:
        raise DeltaRefused(f"{path} cannot be read: {error.strerror}") from None
    except _MALFORMED as problem:
        raise DeltaRefused(f"{path} is damaged: {problem!r}") from None
    if any(Path(name).name != name for name in content["files"]):
        raise DeltaRefused(f"{path} names files outside of its folder")
    if content["format"] != FORMAT:
        raise DeltaRefused(f"{path} has format {content['format']}; expected {FORMAT}, that of this rltrain")
    return content


def _crc32_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass"))


def _header_of(data: bytearray) -> dict[str, Any]:
    """Of the safetensors file that `data` is, with the place of its first byte of tensors under ""."""
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
        raise ValueError(f"{name} lies at bytes {begin} to {end}")
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=header[""] + begin)


def elements_of(lengths: Tensor, places: Tensor, count: int) -> Tensor:
    """[values] int64, ascending: which of `count` elements they are of. ValueError where the arrays do not fit."""
    if len(lengths) != -(-count // BLOCK):
        raise ValueError(f"{len(lengths)} blocks of {count} elements")
    whole = lengths == WHOLE
    if bool(whole.all()) and not len(places):
        return torch.arange(count)
    changed = lengths.to(torch.int64).masked_fill(whole, 0)
    if int(changed.sum()) != len(places):
        raise ValueError(f"{len(places)} places, where {int(changed.sum())} are told of")
    number = torch.arange(len(lengths))
    sparse = number.repeat_interleave(changed)
    some = sparse * BLOCK + places
    if bool((some >= count).any()):
        raise ValueError("a place behind the last element")
    first = _starts(torch.where(whole, BLOCK, changed))
    within = torch.arange(len(places)) - _starts(changed)[sparse]
    found = torch.empty(len(places) + BLOCK * int(whole.sum()), dtype=torch.int64)
    found[first[sparse] + within] = some
    inside = torch.arange(BLOCK)
    found[(first[whole][:, None] + inside).view(-1)] = (number[whole][:, None] * BLOCK + inside).view(-1)
    return found[: len(found) - int(whole[-1]) * (-count % BLOCK)]  # the last block may be shorter


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes
