"""Writes weights to a Hugging Face checkpoint folder. Each rank writes its own files."""

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rltrain.checkpoint.hf_files import (
    METADATA,
    HfFile,
    StoredPredictionLayers,
    carried_files,
    copy_carried_files,
    planned_files,
    turns_experts,
    write_config,
    write_index,
)
from rltrain.checkpoint.safetensors_file import SafetensorsFile, in_file_order
from rltrain.errors import CheckpointError
from rltrain.models import NUM_LABELS, Architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.config_file import read_object
from rltrain.models.table import INDEX_FILE, ITEM_BYTES, IntArray
from rltrain.reshard.execute import execute
from rltrain.reshard.layout import Layout, Parameters, hf_layout, hf_rows, holding, holding_rows, tensor_groups
from rltrain.reshard.plan import plan
from rltrain.runtime.whole_files import make_empty, partial_of, put_in_place

# One rank's files of a Hugging Face folder, written while their tensors arrive.

WRITTEN_BYTES = 2**25
"""Bytes of its tensors gathered by a rank at a time. With fewer, the fixed cost of a reshard would count. More would
not stay in a processor's cache until they are written."""
NUM_MEMORIES = 2
"""Memories of this size. The next tensors arrive in one while the tensors in the other are written."""
ALIGNMENT = 64
"""Alignment in bytes of tensors in their shared memory."""


def written_rows(layout: Layout, files: Sequence[HfFile], max_bytes: int) -> Iterator[IntArray]:
    """Yields the rows to be written next, as [tensors, 2] with the first and the end row of every tensor.

    Each time every writer gets rows of its `files`, as many as fit in `max_bytes`, or one row. So all writers are busy.
    The function is pure, so all ranks get equal results.
    """
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
    """Yields (turn, tensor, first row, end row) for the rows of successive tensors. A turn has as many rows as fit."""
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
    folder: Path, files: Sequence[HfFile], further: StoredPredictionLayers, device: torch.device
) -> Iterator["ShareWriter"]:
    """Yields a writer of a rank's `files` in `folder`. The files are complete when the block ends without an error.

    Raises OSError if writing fails, and CheckpointError if some tensors did not arrive.
    """
    writer = ShareWriter(folder, files, further, device)
    with closing(writer.writing):  # after an error the open file stays incomplete
        yield writer
        writer.all_came = True
        writer.write({})


class _Memory(NamedTuple):
    """The memory of some written tensors. It is free once the first `num_bytes` of `file` are written."""

    bytes: Tensor
    file: SafetensorsFile
    num_bytes: int


class ShareWriter:
    """A writer of tensors into a rank's files, in their order and by a thread.

    Tensors may arrive in any order, and one tensor may arrive as several runs of rows. Early ones wait in their memory.
    Tensors of `further` are read from there instead.
    """

    def __init__(
        self, folder: Path, files: Sequence[HfFile], further: StoredPredictionLayers, device: torch.device
    ) -> None:
        self._folder, self._files, self._further, self._device = folder, files, further, device
        self._types = {entry.name: entry.dtype for file in files for entry in file.entries}
        self._waiting: dict[str, Tensor] = {}
        self._given: Tensor | None = None
        self._being_written = deque[_Memory]()
        self._opened: SafetensorsFile | None = None
        self.all_came = False
        self.writing = self._write_what_is_due()

    def memory_for(self, parameters: Parameters) -> dict[str, Tensor]:
        """Returns tensors to be filled and given to `write`. Their memory is reused once they are written."""
        places, end = [], 0
        for name, shape in parameters:
            num_bytes = prod(shape) * self._types[name].itemsize
            places.append((name, shape, end, end + num_bytes))
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        memory = self._given = self._free_memory(end)
        return {name: memory[begin:end].view(self._types[name]).view(shape) for name, shape, begin, end in places}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `tensors` and writes everything due in the order of the files."""
        self._waiting.update(tensors)
        next(self.writing, None)
        if self._given is not None and self._opened is not None and not self._waiting:
            self._being_written.append(_Memory(self._given, self._opened, self._opened.num_bytes))
        self._given = None

    def _free_memory(self, num_bytes: int) -> Tensor:
        """Returns the memory of an earlier turn, once its tensors are written, or new memory. There is only one memory
        above the usual size."""
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
                                raise CheckpointError(f"{opened.path}: {lacking} elements of {entry.name} are missing")
                            yield
                        rows = self._waiting.pop(entry.name)
                        opened.append(entry.name, rows)
                        lacking -= rows.numel()


NO_NOTES: Mapping[str, str] = MappingProxyType({})
# A whole Hugging Face checkpoint folder, written by all ranks.

SHARD_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def save_checkpoint(
    directory: Path,
    source_tensors: Mapping[str, Tensor],
    source_layout: Layout,
    architecture: Architecture,
    *,
    group: dist.ProcessGroup | None,
    cpu_group: dist.ProcessGroup | None = None,
    rank: int,
    like: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    bucket_bytes: int = 32 * 2**20,
    made_bytes: int | None = None,
    written_bytes: int = WRITTEN_BYTES,
    ranks_per_node: int | None = None,
    notes: Mapping[str, str] = NO_NOTES,
) -> None:
    """Writes the model into `directory` as a Hugging Face checkpoint, with the config and tokenizer of the checkpoint
    folder `like`.

    `notes` are further text files, by name. A value model is written as transformers' model for sequence classification
    with one label. Then `like` may be such a folder or a causal language model's. A language model's folder also gets
    the layers of `like` predicting further tokens, unless the model has them itself.

    With `made_bytes`, source tensors are made on demand. At most so many bytes of whole layers are made at a time.
    Other tensors are gathered in portions of `written_bytes` per rank and written. `dtype` None keeps their type. Every
    rank writes its share. A file is larger than `max_shard_bytes` only if one tensor is. Everything is written beside
    `directory`, and `directory` appears when it is complete. An existing one is replaced only if an earlier call wrote
    it. Raises CheckpointError if it is not replaceable, or if writing fails.

    Collective over: the ranks of `source_layout`. They form `group` (None for a single rank) and `cpu_group` (gloo).
    `cpu_group` may be left out if `group` is a gloo group.
    """
    with _writing(directory):
        _refuse_foreign(directory, like, notes)
        further = StoredPredictionLayers(like, trained=source_layout.tensors.numbers)
    any_tensor = next(iter(source_tensors.values()))
    dtype = dtype or any_tensor.dtype
    layout = hf_layout(architecture, source_layout.ranks, dtype=str(dtype).removeprefix("torch."))
    further_entries = further.entries if architecture.head == "vocabulary" else ()
    turns = turns_experts(like, layout.tensors)
    files = planned_files(layout, max_shard_bytes, further_entries, turns=turns)
    first = rank == layout.ranks[0]
    with _writing(directory), _appearing(directory, group, first=first) as folder:
        mine = [file for file in files if file.writer == rank]
        with writing_share(folder, mine, further, any_tensor.device) as writer:
            for source, part in _parts(source_layout, layout, files, made_bytes, written_bytes):
                sync = plan(source, part, rank, ranks_per_node or max(layout.ranks) + 1)
                held = {name: source_tensors[name] for name, _ in source.on(rank).parameters}
                gathered = writer.memory_for(part.on(rank).parameters)
                execute(sync, held, gathered, group=group, cpu_group=cpu_group, bucket_bytes=bucket_bytes)
                writer.write(gathered)
        if first:
            write_index(folder, files)
            _write_settings(folder, architecture, like, dtype, notes)


@contextmanager
def _appearing(directory: Path, group: dist.ProcessGroup | None, *, first: bool) -> Iterator[Path]:
    """Yields a folder beside `directory`. It replaces `directory` once all ranks have left the block. The `first` rank
    makes it. Collective over: `group`."""
    folder = partial_of(directory)
    if first:
        make_empty(folder)
    _barrier(group)
    yield folder
    _barrier(group)
    if first:
        put_in_place(folder, directory, replaces=True)
    _barrier(group)


def _parts(
    source: Layout, destination: Layout, files: Sequence[HfFile], made_bytes: int | None, written_bytes: int
) -> Iterator[tuple[Layout, Layout]]:
    if made_bytes is None:
        for rows in written_rows(destination, files, written_bytes):
            yield holding_rows(source, rows), hf_rows(destination, rows)
        return
    for tensors in tensor_groups(source.tensors, source.types, made_bytes):
        yield holding(source, tensors), holding(destination, tensors)


def replace_checkpoint(directory: Path, saved: Path, *, like: Path, notes: Mapping[str, str] = NO_NOTES) -> None:
    """Replaces `directory` by the checkpoint folder `saved` beside it, and adds `notes`. Only one process may call it.
    Raises CheckpointError as `save_checkpoint` does."""
    with _writing(directory):
        _refuse_foreign(directory, like, notes)
        _write_notes(saved, notes)
        put_in_place(saved, directory, replaces=True)


def _write_notes(directory: Path, notes: Mapping[str, str]) -> None:
    for name, text in notes.items():
        (directory / name).write_text(text, encoding="utf-8")


def _write_settings(
    folder: Path, architecture: Architecture, like: Path, dtype: torch.dtype, notes: Mapping[str, str]
) -> None:
    """Writes all files beside the tensors."""
    settings = _value_settings(architecture, like) if architecture.head == "value" else {}
    write_config(like, folder, str(dtype).removeprefix("torch."), settings)
    copy_carried_files(like, folder)
    _write_notes(folder, notes)


def _value_settings(architecture: Architecture, like: Path) -> dict[str, object]:
    """Returns the entries of config.json for a model with one score.

    transformers counts the labels by their names. It takes a text's score from the last token other than padding. So
    the end-of-text token must not be the padding token.
    """
    padding = read_object(like / CONFIG_FILE, "model.path").get("pad_token_id")
    return {
        **({"pad_token_id": None} if padding in architecture.eos_token_ids else {}),
        "architectures": [architecture.classifier],
        "id2label": {str(label): f"LABEL_{label}" for label in range(NUM_LABELS)},
        "label2id": {f"LABEL_{label}": label for label in range(NUM_LABELS)},
    }


def _refuse_foreign(directory: Path, like: Path, notes: Mapping[str, str]) -> None:
    if directory.exists() and not _replaceable(directory, like, notes):
        raise CheckpointError(
            f"{directory} exists and is not just a checkpoint that an earlier job wrote, so it is not replaced. "
            "Move it away or set another folder (config key output_dir)"
        )


def _replaceable(directory: Path, like: Path, notes: Mapping[str, str]) -> bool:
    """Returns whether an earlier save made `directory` and nothing was added since."""
    if not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir()}
    shards = {name for name in names if SHARD_FILE.fullmatch(name)}
    added = names - shards - {CONFIG_FILE, INDEX_FILE, *carried_files(like), *notes}
    return not names or (bool(shards) and not added and all(_written_by_us(directory / name) for name in shards))


def _written_by_us(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get("written_by") == METADATA["written_by"]
    except (SafetensorError, OSError):
        return False


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{directory} cannot be written: {problem} (config key output_dir)") from None


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group)
