"""One rank's files of a Hugging Face folder, written while their tensors arrive, with memory for some of them."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rltrain.checkpoint.hf_files import METADATA, HfFile
from rltrain.checkpoint.prediction_layers import PredictionLayers
from rltrain.checkpoint.safetensors_file import SafetensorsFile, in_file_order
from rltrain.errors import CheckpointError
from rltrain.models.table import ITEM_BYTES, IntArray
from rltrain.reshard.layout import Layout, Parameters

WRITTEN_BYTES = 2**25
"""A rank brings so many of its tensors into memory at a time: enough that what a reshard costs whatever its size does
not count, few enough to be in a processor's cache still when they are written."""
NUM_MEMORIES = 2
"""Of that size: the next tensors come into one while those in the other are written."""
ALIGNMENT = 64
"""In bytes, of tensors in the memory that they share."""


def written_rows(layout: Layout, files: Sequence[HfFile], max_bytes: int) -> Iterator[IntArray]:
    """[tensors, 2] the rows, from and to, that are written next: of every writer those of its `files` that `max_bytes`
    hold, or one. All writers are busy each time. Pure: equal on all ranks."""
    numbers, turns = layout.tensors.numbers, list[IntArray]()
    for writer in layout.ranks:
        entries = [entry for file in files if file.writer == writer for entry in in_file_order(file.entries)]
        found = (numbers[entry.name] for entry in entries if entry.name in numbers)
        for turn, number, first, end in _taken(layout, found, max_bytes):
            if turn == len(turns):
                turns.append(np.zeros((len(numbers), 2), dtype=np.int64))
            turns[turn][number] = first, end
    return iter(turns)


def _taken(layout: Layout, numbers: Iterable[int], max_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(turn, tensor, from, to): the rows of these tensors, one after the other, as many in a turn as it may hold."""
    turn, free = 0, max_bytes
    for number in numbers:
        rows, columns = layout.tensors.matrix_shapes[number].tolist()
        row_bytes, first = columns * int(ITEM_BYTES[layout.types[number]]), 0
        while first < rows:
            if free < min(row_bytes, max_bytes):
                turn, free = turn + 1, max_bytes
            end = min(rows, first + max(1, free // row_bytes))
            yield turn, number, first, end
            first, free = end, max(0, free - (end - first) * row_bytes)


@contextmanager
def writing_share(
    folder: Path, files: Sequence[HfFile], further: PredictionLayers, device: torch.device
) -> Iterator["ShareWriter"]:
    """For a rank's `files` in `folder`, which are complete when the block ends without an error.

    OSError where writing fails, CheckpointError where tensors did not come.
    """
    writer = ShareWriter(folder, files, further, device)
    with closing(writer.writing):  # after an error it leaves the open file as it is
        yield writer
        writer.all_came = True
        writer.write({})


class _Memory(NamedTuple):
    """What tensors came in that are the first `num_bytes` of `file`, but for those before."""

    bytes: Tensor
    file: SafetensorsFile
    num_bytes: int


class ShareWriter:
    """Tensors come in any order, or rows of them one after the other; what is not due waits, with the memory of those
    that it came with. What `further` has does not come. A thread writes."""

    def __init__(self, folder: Path, files: Sequence[HfFile], further: PredictionLayers, device: torch.device) -> None:
        self._folder, self._files, self._further, self._device = folder, files, further, device
        self._types = {entry.name: entry.dtype for file in files for entry in file.entries}
        self._waiting: dict[str, Tensor] = {}
        self._given: Tensor | None = None
        self._being_written = deque[_Memory]()
        self._opened: SafetensorsFile | None = None
        self.all_came = False
        self.writing = self._write_what_is_due()

    def memory_for(self, parameters: Parameters) -> dict[str, Tensor]:
        """Tensors to be filled and given to `write`; their memory serves the next ones once they are written."""
        places, end = [], 0
        for name, shape in parameters:
            num_bytes = prod(shape) * self._types[name].itemsize
            places.append((name, shape, end, end + num_bytes))
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        memory = self._given = self._free_memory(end)
        return {name: memory[begin:end].view(self._types[name]).view(shape) for name, shape, begin, end in places}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """All that is due by now."""
        self._waiting.update(tensors)
        next(self.writing, None)
        if self._given is not None and self._opened is not None and not self._waiting:
            self._being_written.append(_Memory(self._given, self._opened, self._opened.num_bytes))
        self._given = None

    def _free_memory(self, num_bytes: int) -> Tensor:
        """That of an earlier turn, once its tensors are written, or new memory. What is larger than is usual there is
        only once."""
        while len(self._being_written) >= (NUM_MEMORIES if num_bytes <= WRITTEN_BYTES else 1):
            memory = self._being_written.popleft()
            memory.file.wait_for(memory.num_bytes)
            if len(memory.bytes) >= num_bytes:
                return memory.bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _write_what_is_due(self) -> Generator[None]:
        for file in self._files:
            path = self._folder / file.name
            with SafetensorsFile(path, file.entries, METADATA, behind_bytes=WRITTEN_BYTES) as opened:
                self._opened = opened
                for entry in opened.entries:
                    if entry.name in self._further:
                        opened.append(entry.name, self._further.read(entry.name))
                        continue
                    lacking = prod(entry.shape)
                    while lacking:
                        while entry.name not in self._waiting:
                            if self.all_came:
                                raise CheckpointError(f"{opened.path}: {lacking} elements of {entry.name} did not come")
                            yield
                        rows = self._waiting.pop(entry.name)
                        opened.append(entry.name, rows)
                        lacking -= rows.numel()
