"""Writing a Megatron checkpoint: every process streams the chunks of its writers, then one says where they lie."""

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from rltrain.checkpoint.durable_file import BEHIND_BYTES, DurableFile
from rltrain.checkpoint.megatron.keys import Chunk, GlobalTensors, extra_state_keys
from rltrain.checkpoint.megatron.metadata import (
    COMMON_FILE,
    LATEST_FILE,
    RELEASE,
    Stored,
    StoredTensor,
    iteration_name,
    write_metadata,
)
from rltrain.checkpoint.megatron.saved_tensor import around_elements
from rltrain.checkpoint.megatron.shares import chunks_of_writer
from rltrain.errors import CheckpointError
from rltrain.models import Architecture
from rltrain.reshard.layout import BOX_FIELDS
from rltrain.runtime.grid import Grid

ReadBox = Callable[[int, int, int, int, int], Tensor]
"""(tensor, row, col, rows, cols) -> [rows, cols] of canonical tensor number `tensor`."""

PART_FILES = ".part_*.json"
OBJECTS_FILE = "__0_1.distcp"
CHECKPOINT_VERSION = 3.0
BLOCK_BYTES = 8 * 2**20
"""Of a chunk's rows, read at a time."""


def write_checkpoint(
    folder: Path,
    architecture: Architecture,
    writers: Grid,
    mine: Sequence[int],
    read: ReadBox,
    *,
    dtype: torch.dtype,
    iteration: int | None,
    padded_vocab_size: int | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the chunks that the ranks `mine` of `writers` hold, block by block, below the root `folder`.

    `iteration` None is a release. Values are cast to `dtype`, but for those that are always fp32. Any number of writers
    will do: shares that cannot be equal differ by a row. `progress` is told the bytes of every chunk. Once all
    processes have come this far, one calls finish_checkpoint. OSError where files cannot be written.
    """
    tensors = GlobalTensors(architecture, padded_vocab_size=padded_vocab_size)
    target = folder / iteration_name(iteration)
    target.mkdir(parents=True, exist_ok=True)
    for rank in mine:
        writer = writers.ranks.index(rank)
        name, part = f"__{writer}_0.distcp", []
        with DurableFile(target / name, checksum=True, behind_bytes=BEHIND_BYTES) as file:
            for chunk in chunks_of_writer(tensors, writers, rank):
                values = _Values(tensors, chunk, read, torch.float32 if chunk.key in tensors.float32_keys else dtype)
                offset = file.num_bytes
                values.write_into(file)
                kind = str(values.dtype).removeprefix("torch.")
                part.append([chunk.key, kind, chunk.offsets, chunk.shape, name, offset, file.num_bytes - offset])
                progress(prod(chunk.shape) * values.dtype.itemsize)
        (target / PART_FILES.replace("*", str(writer))).write_text(json.dumps(part), encoding="utf-8")


class _Values:
    """The values of `chunk`, zero where it has padding."""

    def __init__(self, tensors: GlobalTensors, chunk: Chunk, read: ReadBox, dtype: torch.dtype) -> None:
        self._chunk, self._read, self.dtype = chunk, read, dtype
        self._boxes = tensors.inside(chunk)
        self._width = chunk.shape[-1]

    def write_into(self, file: DurableFile) -> None:
        """As torch.save does, but by blocks of whole rows."""
        around = around_elements(self._chunk.shape, self.dtype)
        file.write(around.before)
        file.crc32 = 0
        for first, stop in self._row_blocks():
            file.write_tensor(self._rows(first, stop))
        file.write(around.closing(file.crc32))

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        """(first, stop): all rows, in blocks of about BLOCK_BYTES in which no box begins or ends."""
        step = max(1, BLOCK_BYTES // (self._width * self.dtype.itemsize))
        num_rows = prod(self._chunk.shape) // self._width
        begins = self._boxes["key_row"]
        cuts = np.unique([0, num_rows, *begins, *(begins + self._boxes["rows"])])
        for low, high in pairwise(cuts.tolist()):
            for first in range(low, high, step):
                yield first, min(first + step, high)

    def _rows(self, first: int, stop: int) -> Tensor:
        """[stop - first, width]"""
        here = (self._boxes["key_row"] <= first) & (first < self._boxes["key_row"] + self._boxes["rows"])
        parts = [(int(box["key_col"]), self._part(box, first, stop)) for box in self._boxes[here]]
        if len(parts) == 1 and parts[0][1].shape[1] == self._width:
            return parts[0][1]
        values = torch.zeros(stop - first, self._width, dtype=self.dtype)
        for column, part in parts:
            values[:, column : column + part.shape[1]] = part
        return values

    def _part(self, box: np.void, first: int, stop: int) -> Tensor:
        tensor, row, col, _, cols = (int(box[field]) for field in BOX_FIELDS)
        return self._read(tensor, row + first - int(box["key_row"]), col, stop - first, cols).to(self.dtype)


def finish_checkpoint(
    folder: Path,
    architecture: Architecture,
    *,
    iteration: int | None,
    arguments: Mapping[str, Any],
    padded_vocab_size: int | None = None,
) -> None:
    """Write what makes a checkpoint of all writers' files: where each chunk lies, the arguments, the tracker file.

    `arguments` are Megatron-LM's, as from megatron_arguments; the others are as in write_checkpoint. CheckpointError
    where the writers left out something or wrote it twice.
    """
    tensors = GlobalTensors(architecture, padded_vocab_size=padded_vocab_size)
    target = folder / iteration_name(iteration)
    parts = sorted(target.glob(PART_FILES))
    stored = _merged(tensors, [json.loads(part.read_text(encoding="utf-8")) for part in parts])
    content = {"singleton_local_shards": False, "non_homogeneous_layers": not tensors.stacked}
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration or 0,
        "content_metadata": content,
    }
    with (target / COMMON_FILE).open("wb") as file:
        torch.save(common, file)
        _to_disk(file)
    write_metadata(target, stored, extra_state_keys(tensors), _write_empty_object(target))
    for part in parts:
        part.unlink()
    (folder / LATEST_FILE).write_text(RELEASE if iteration is None else str(iteration), encoding="utf-8")


def _merged(tensors: GlobalTensors, parts: list[list[Any]]) -> dict[str, StoredTensor]:
    """All writers' chunks, by key."""
    chunks: dict[str, list[Stored]] = {key: [] for key in tensors.shapes}
    types: dict[str, str] = {}
    for key, dtype, offsets, shape, *place in chain.from_iterable(parts):
        chunks[key].append(Stored(tuple(offsets), tuple(shape), *place))
        types[key] = dtype
    for key, shape in tensors.shapes.items():
        held = chunks[key]
        num_elements = sum(prod(chunk.shape) for chunk in held)
        if num_elements != prod(shape) or len({chunk.offsets for chunk in held}) < len(held):
            raise CheckpointError(
                f"{num_elements} elements of {key} were written, expected each of its {prod(shape)} once: a process "
                "is missing, or another one writes into the same folder; start again with a folder of its own"
            )
    return {key: StoredTensor(shape, types[key], tuple(chunks[key])) for key, shape in tensors.shapes.items()}


def _write_empty_object(target: Path) -> Stored:
    """What all modules of Transformer Engine find in the place of their extra state: nothing."""
    with (target / OBJECTS_FILE).open("wb") as file:
        torch.save([None], file)
        length = file.tell()
        _to_disk(file)
    return Stored((), (), OBJECTS_FILE, 0, length)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
