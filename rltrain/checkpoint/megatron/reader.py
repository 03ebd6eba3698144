"""Reading a Megatron checkpoint box by box."""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.checkpoint.megatron.mapped_tensor import map_file, saved_tensor
from rltrain.checkpoint.megatron.metadata import (
    COMMON_FILE,
    COMMON_OBJECT,
    LATEST_FILE,
    METADATA_FILE,
    RELEASE,
    Stored,
    StoredTensor,
    iteration_name,
    read_format,
    read_metadata,
)
from rltrain.checkpoint.megatron.unpickling import plain, read_torch_pickle
from rltrain.errors import CheckpointError, listed, named_by
from rltrain.models.table import IntArray

TRAINING_STATE = ("optimizer", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler", "lr_scheduler")
"""How the keys begin of what a checkpoint holds beside the model."""

MAX_FOUND = 64
"""Chunks, of which some lie in one canonical tensor."""

EXTRA_STATE = "._extra_state"
"""In the keys of what modules of Transformer Engine keep for FP8."""


class MegatronReader:
    """A checkpoint's folder: its root, whose tracker file names the iteration to take, or that of an iteration.

    `tensors` are the shapes and types of the model's tensors, by key; `ignored` the keys of all else.
    `architecture_arguments` are Megatron-LM's arguments as plain values, empty where the checkpoint has none;
    `iteration` is 0 in a release. `option` is the config key or option that names the folder, for messages.
    CheckpointError where a file is missing, cut short, damaged, or names what is no data.
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
                f"{self.folder} holds what is neither a tensor nor known as state of training: {listed(unknown, 8)}"
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
        """Returns what belongs to the whole checkpoint: Megatron-LM's arguments and the iteration."""
        path, stored = self.folder / COMMON_FILE, objects.get(COMMON_OBJECT)
        if path.exists() or stored is None:
            found = plain(read_torch_pickle(path))
        else:
            path = self._path(stored.file)
            found = plain(read_torch_pickle(path, stored.offset, stored.length))
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds {type(found).__name__} in place of the checkpoint's arguments")
        return found

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder / METADATA_FILE} names the file {name!r}, which is not in its folder")
        return path

    def read(self, key: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The box [*shape] of tensor `key` that begins at `offsets`, as stored.

        A view of the mapped file where one of its chunks holds the box, else a copy. CheckpointError where the file is
        damaged or its chunks leave out part of the box.
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
                f"{list(shape)} at {list(offsets)}: the checkpoint is incomplete or holds some twice"
            )
        if len(parts) == 1:
            return parts[0][1]
        values = torch.empty(shape, dtype=self.tensors[key][1])
        for place, part in parts:
            values[place] = part
        return values

    def _chunk(self, key: str, chunk: Stored) -> Tensor:
        """A view of the mapped file; those of the last chunks are kept, of which one part after the other is read."""
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
            stored = saved_tensor(window, f"{path}, byte {chunk.offset}, where {key} lies,")
        except CheckpointError as refused:
            raise self._error(str(refused)) from None
        except Exception as problem:  # damaged files raise almost anything
            raise self._error(f"{path} is damaged at byte {chunk.offset}, where {key} lies: {problem}") from None
        shape, dtype = chunk.shape, self.tensors[key][1]
        if stored.shape != shape or stored.dtype != dtype:
            raise self._error(
                f"{path} holds {list(stored.shape)} of {stored.dtype} at byte {chunk.offset}; {METADATA_FILE} places "
                f"{list(shape)} of {dtype} there"
            )
        return stored

    def _refuse_cut_files(self) -> None:
        """Tell files that are missing or too short before anything is read."""
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
                raise self._error(f"{path} does not exist, but {METADATA_FILE} names it: the checkpoint is incomplete")
            if path.stat().st_size < length:
                raise self._error(
                    f"{path} has {path.stat().st_size} bytes; expected at least {length}: it was cut short"
                )

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} ({named_by(self.option)})")


def _bounds(stored: StoredTensor) -> tuple[IntArray, IntArray]:
    """[chunks, dimensions] each: where the chunks begin in the tensor, and where they stop."""
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
        raise CheckpointError(f'{tracker} says {named!r}; expected the number of an iteration or "{RELEASE}"')
    folder = path / iteration_name(None if named == RELEASE else int(named))
    if not (folder / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{folder / METADATA_FILE} does not exist, but {tracker.name} says {named}: the checkpoint is incomplete "
            "or of another format; only the distributed one is read (--ckpt-format torch_dist)"
        )
    return folder
