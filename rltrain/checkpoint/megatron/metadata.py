"""The files of a Megatron checkpoint beside its chunks, and which chunk lies where."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

from rltrain.checkpoint.megatron.unpickling import read_pickle
from rltrain.errors import CheckpointError
from rltrain.runtime.json_text import read_json

LATEST_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""In the place of a number: weights to start from, without optimizer and iteration."""

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
"""The object that later releases of Megatron write in place of the file. They read either."""
FORMAT_FILE = "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Stored:
    """`length` bytes from `offset` of `file` hold what torch.save makes of a box of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor and its chunks; `dtype` as torch spells it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Stored, ...]


def iteration_name(iteration: int | None) -> str:
    """The folder of an iteration; None is a release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def write_metadata(
    folder: Path, tensors: Mapping[str, StoredTensor], objects: Iterable[str], stored_object: Stored
) -> None:
    """Write what says where everything lies: `tensors`, and `objects`, which are all the same one."""
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
    """CheckpointError unless `folder` says that it has this format."""
    path = folder / FORMAT_FILE
    try:
        found = read_json(path)["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path} does not tell the checkpoint's format: {problem}") from None
    if found != FORMAT["sharded_backend"]:
        raise CheckpointError(
            f"{path}: sharded_backend is {found!r}; expected {FORMAT['sharded_backend']!r}: no other format is read"
        )


def read_metadata(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, Stored | None]]:
    """Returns (tensors, other objects) by key; None stands for an object that lies nowhere.

    CheckpointError where the file is damaged or not understood.
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
