"""Reads a Megatron checkpoint box by box."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from rltrain.checkpoint.megatron_pickles import map_file, plain, read_pickle, read_torch_pickle, saved_tensor
from rltrain.errors import CheckpointError, listed, named_by
from rltrain.models.table import IntArray
from rltrain.runtime.json_text import read_json

# The files of a Megatron checkpoint beside its chunks, and the place of each chunk.

LATEST_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""The name of an iteration with weights to start from, without optimizer and number."""

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""The object written by later releases of Megatron instead of the file. They read both."""
FORMAT_FILE = "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Stored:
    """A box of a tensor as written by torch.save: `length` bytes of `file` from `offset` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and its chunks. `dtype` is in torch's spelling."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Stored, ...]


def iteration_name(iteration: int | None) -> str:
    """Returns the name of an iteration's folder. None means a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def write_metadata(
    folder: Path, tensors: Mapping[str, StoredTensor], objects: Iterable[str], stored_object: Stored
) -> None:
    """Writes the places of `tensors` and of `objects`. All objects are `stored_object`."""
    metadata = Metadata({}, planner_data={})
    results = []
    for key, tensor in tensors.items():
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks],
        )
        results += [_result(MetadataIndex(key, chunk.offsets), chunk) for chunk in tensor.chunks]
    for key in objects:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        results.append(_result(MetadataIndex(key), stored_object))
    FileSystemWriter(folder).finish(metadata, [results])
    (folder / FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")


def _result(index: MetadataIndex, stored: Stored) -> WriteResult:
    return WriteResult(index, stored.length, _StorageInfo(stored.file, stored.offset, stored.length))


def read_format(folder: Path) -> None:
    """Raises CheckpointError unless `folder` names this format."""
    path = folder / FORMAT_FILE
    try:
        found = read_json(path)["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path} does not name the checkpoint's format: {problem}") from None
    if found != FORMAT["sharded_backend"]:
        raise CheckpointError(
            f"{path}: sharded_backend is {found!r}; expected {FORMAT['sharded_backend']!r}, the only supported format"
        )


def read_metadata(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, Stored | None]]:
    """Returns (tensors, other objects) by key. An object is None if it is not stored.

    Raises CheckpointError if the file is damaged or not understood.
    """
    path = folder / METADATA_FILE
    pickled = read_pickle(path)
    try:
        places: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
        for index, place in pickled.state["storage_data"].items():
            places.setdefault(index.state["fqn"], []).append((index.state.get("offset"), place.state))
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, Stored | None] = {}
        for key, described in pickled.state["state_dict_metadata"].items():
            if "chunks" in described.state:
                tensors[key] = _stored_tensor(described.state, dict(places.get(key, [])))
            else:
                objects[key] = next((_stored(place, (), ()) for _, place in places.get(key, [])), None)
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as problem:
        raise CheckpointError(f"{path} is not the metadata of torch.distributed.checkpoint: {problem!r}") from None
    return tensors, objects


def _stored_tensor(described: Mapping[str, Any], places: Mapping[tuple[int, ...], Any]) -> StoredTensor:
    chunks = []
    for chunk in described["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        if not len(offsets) == len(sizes) == len(described["size"]):
            raise ValueError(f"a chunk has {len(sizes)} dimensions, its tensor {len(described['size'])}")
        place = places[offsets]
        chunks.append(_stored(place, offsets, sizes))
    dtype = described["properties"].state[0]
    return StoredTensor(tuple(described["size"]), dtype.name.removeprefix("torch."), tuple(chunks))


def _stored(place: Mapping[str, Any], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Stored:
    if place.get("transform_descriptors"):
        raise ValueError(f"chunks are compressed: {place['transform_descriptors']}")
    return Stored(offsets, shape, place["relative_path"], place["offset"], place["length"])


TRAINING_STATE = ("optimizer", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler", "lr_scheduler")
"""Beginnings of the keys of training state, kept in a checkpoint beside the model."""

MAX_FOUND = 64
"""Maximum number of chunks kept in memory. Several of them may belong to one canonical tensor."""

EXTRA_STATE = "._extra_state"
"""Part of the keys of FP8 state in Transformer Engine's modules."""


class MegatronReader:
    """A checkpoint's folder. It is the root with a tracker file for the iteration, or the folder of an iteration.

    `tensors` are the shapes and types of the model's tensors, by key. `ignored` are all other keys.
    `architecture_arguments` are Megatron-LM's arguments as plain values, empty if the checkpoint has none. `iteration`
    is 0 in a release. `option` is the config key or option of the folder, for messages. Raises CheckpointError if a
    file is missing, cut short or damaged, or if a pickle names something other than data.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.option = option
        try:
            self.folder = _iteration_folder(path)
            read_format(self.folder)
            self._stored, objects = read_metadata(self.folder)
            common = self._common(objects)
        except CheckpointError as problem:
            raise self._error(str(problem)) from None
        self.architecture_arguments: dict[str, Any] = common.get("args") or {}
        self.iteration = int(common.get("iteration") or 0)
        unknown = sorted(key for key in objects if not _is_state(key) and key != COMMON_OBJECT)
        if unknown:
            raise self._error(
                f"{self.folder} holds objects other than tensors and known training state: {listed(unknown, 8)}"
            )
        self.ignored = sorted(filter(_is_state, (*objects, *self._stored)))
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (stored.shape, getattr(torch, stored.dtype))
            for key, stored in self._stored.items()
            if not _is_state(key)
        }
        self._refuse_cut_files()
        self._bounds = {key: _bounds(self._stored[key]) for key in self.tensors}
        self._files: dict[str, memoryview] = {}
        self._found: dict[Stored, Tensor] = {}

    def _common(self, objects: Mapping[str, Stored | None]) -> dict[str, Any]:
        """Returns the data of the whole checkpoint: Megatron-LM's arguments and the iteration."""
        path, stored = self.folder / COMMON_FILE, objects.get(COMMON_OBJECT)
        if path.exists() or stored is None:
            found = plain(read_torch_pickle(path))
        else:
            path = self._path(stored.file)
            found = plain(read_torch_pickle(path, stored.offset, stored.length))
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds {type(found).__name__}; expected the checkpoint's arguments")
        return found

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder / METADATA_FILE} names the file {name!r}, which is not in its folder")
        return path

    def read(self, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Returns the box [*shape] of tensor `key` from `offsets` on, as stored.

        The result is a view of the mapped file if one chunk has the whole box, else a copy. Raises CheckpointError if
        the file is damaged or if its chunks leave out a part of the box.
        """
        begins, stops = self._bounds[key]
        low, high = np.maximum(begins, offsets), np.minimum(stops, np.add(offsets, shape))
        parts: list[tuple[tuple[slice, ...], Tensor]] = []
        for number in np.flatnonzero((low < high).all(axis=1)).tolist():
            chunk, first, stop = self._stored[key].chunks[number], low[number].tolist(), high[number].tolist()
            part = self._chunk(key, chunk)[_slices(first, stop, chunk.offsets)]
            parts.append((_slices(first, stop, offsets), part))
        num_read = sum(part.numel() for _, part in parts)
        if num_read != prod(shape):
            raise self._error(
                f"the chunks of {key} in {self.folder} hold {num_read} of the {prod(shape)} elements of the box "
                f"{list(shape)} at {list(offsets)}. The checkpoint is incomplete or holds some twice"
            )
        if len(parts) == 1:
            return parts[0][1]
        values = torch.empty(shape, dtype=self.tensors[key][1])
        for place, part in parts:
            values[place] = part
        return values

    def _chunk(self, key: str, chunk: Stored) -> Tensor:
        """Returns a chunk as a view of the mapped file. The last chunks are kept, because their parts are read one
        after another."""
        if chunk not in self._found:
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            self._found[chunk] = self._find(key, chunk)
        return self._found[chunk]

    def _find(self, key: str, chunk: Stored) -> Tensor:
        path = self.folder / chunk.file
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = map_file(path)
            window = self._files[chunk.file][chunk.offset : chunk.offset + chunk.length]
            stored = saved_tensor(window, f"{path}, byte {chunk.offset} (tensor {key}),")
        except CheckpointError as refused:
            raise self._error(str(refused)) from None
        except Exception as problem:  # damaged files raise almost anything
            raise self._error(f"{path} is damaged at byte {chunk.offset} (tensor {key}): {problem}") from None
        shape, dtype = chunk.shape, self.tensors[key][1]
        if stored.shape != shape or stored.dtype != dtype:
            raise self._error(
                f"{path} holds {list(stored.shape)} of {stored.dtype} at byte {chunk.offset}; {METADATA_FILE} places "
                f"{list(shape)} of {dtype} there"
            )
        return stored

    def _refuse_cut_files(self) -> None:
        """Raises CheckpointError about missing or short files before anything is read."""
        needed: dict[str, int] = {}
        for key in self.tensors:
            for chunk in self._stored[key].chunks:
                needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.offset + chunk.length)
        for name, length in needed.items():
            try:
                path = self._path(name)
            except CheckpointError as problem:
                raise self._error(str(problem)) from None
            if not path.is_file():
                raise self._error(f"{path} does not exist, but {METADATA_FILE} names it. The checkpoint is incomplete")
            if path.stat().st_size < length:
                raise self._error(
                    f"{path} has {path.stat().st_size} bytes; expected at least {length}: it was cut short"
                )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} ({named_by(self.option)})")


def _bounds(stored: StoredTensor) -> tuple[IntArray, IntArray]:
    """Returns the begin and the end of every chunk in the tensor, shape [chunks, dimensions] each."""
    places = np.array([(chunk.offsets, chunk.shape) for chunk in stored.chunks], dtype=np.int64)
    places = places.reshape(len(stored.chunks), 2, len(stored.shape))
    return places[:, 0], places[:, 0] + places[:, 1]


def _slices(low: list[int], high: list[int], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first - at, stop - at) for first, stop, at in zip(low, high, origin, strict=True))


def _is_state(key: str) -> bool:
    return EXTRA_STATE in key or key.startswith(TRAINING_STATE)


def _iteration_folder(path: Path) -> Path:
    if (path / METADATA_FILE).is_file():
        return path
    tracker = path / LATEST_FILE
    if not tracker.is_file():
        raise CheckpointError(
            f"{path} has neither {LATEST_FILE} nor {METADATA_FILE}; expected the root of a Megatron checkpoint or one "
            "of its iter_ folders"
        )
    named = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if named != RELEASE and not re.fullmatch(r"\d+", named):
        raise CheckpointError(f'{tracker} holds {named!r}; expected the number of an iteration or "{RELEASE}"')
    folder = path / iteration_name(None if named == RELEASE else int(named))
    if not (folder / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{folder / METADATA_FILE} does not exist, but {tracker.name} names {named}. The checkpoint is "
            "incomplete or has another format than the supported one (--ckpt-format torch_dist)"
        )
    return folder
