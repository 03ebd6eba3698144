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
from rltrain.checkpoint.megatron_keys import EMBEDDING, Chunk, GlobalTensors, Matrix, extra_state_keys
from rltrain.checkpoint.megatron_pickles import around_elements
from rltrain.checkpoint.megatron_reader import (
    COMMON_FILE,
    LATEST_FILE,
    RELEASE,
    Stored,
    StoredTensor,
    iteration_name,
    write_metadata,
)
from rltrain.errors import CheckpointError
from rltrain.models import Architecture
from rltrain.reshard.layout import BOX_FIELDS
from rltrain.runtime.grid import Grid


def chunks_of_writer(tensors: GlobalTensors, writers: Grid, rank: int) -> Iterator[Chunk]:
    """The chunks that `rank` of `writers` writes, in the order of the model.

    Pipeline stages take consecutive layers, expert-parallel ranks consecutive experts, replicas turns. Numbers that do
    not divide give shares that differ by one. ValueError where the grid cannot hold its expert parallelism.
    """
    at = writers.coordinates(rank)
    expert_at = writers.expert_coordinates(rank)
    _, num_expert_replicas, ep, etp = writers.expert_array.shape
    num_layers, num_experts = tensors.architecture.num_layers, tensors.architecture.num_experts
    for matrix in tensors.matrices:
        if at.pp != _stage(matrix, num_layers, writers.pp) or at.cp != 0:
            continue
        if matrix.expert is None:
            if at.dp == (matrix.layer or 0) % writers.dp:
                yield from _cut(tensors, matrix, at.tp, writers.tp)
        elif (expert_at.ep, expert_at.dp) == (matrix.expert * ep // num_experts, matrix.expert % num_expert_replicas):
            yield from _cut(tensors, matrix, expert_at.etp, etp)


def _stage(matrix: Matrix, num_layers: int, num_stages: int) -> int:
    if matrix.layer is not None:
        return matrix.layer * num_stages // num_layers
    return 0 if matrix.key == EMBEDDING else num_stages - 1


def _cut(tensors: GlobalTensors, matrix: Matrix, index: int, size: int) -> Iterator[Chunk]:
    """Share `index` of `size` of a matrix, cut as tensor parallelism cuts its row of the table; whole where it does
    not."""
    axis = len(matrix.shape) - 1 if matrix.row.split == "columns" else 0
    if matrix.row.split == "replicated":
        if index == 0:
            yield tensors.chunk(matrix, (0,) * len(matrix.shape), matrix.shape)
        return
    num_blocks = len(matrix.row.parts) if matrix.row.split == "rows" else 1
    block = matrix.shape[axis] // num_blocks
    first, stop = block * index // size, block * (index + 1) // size
    if first == stop:
        return
    for number in range(num_blocks):
        offsets = tuple(number * block + first if i == axis else 0 for i in range(len(matrix.shape)))
        shape = tuple(stop - first if i == axis else length for i, length in enumerate(matrix.shape))
        yield tensors.chunk(matrix, offsets, shape)


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
