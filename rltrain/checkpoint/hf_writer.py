"""Writes weights to a Hugging Face checkpoint folder, each rank its own files."""

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

# One rank's files of a Hugging Face folder, written while their tensors arrive, with memory for some of them.

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
    folder: Path, files: Sequence[HfFile], further: StoredPredictionLayers, device: torch.device
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


NO_NOTES: Mapping[str, str] = MappingProxyType({})
# Writing weights to a Hugging Face checkpoint folder.

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
    """Write the model into `directory`, with config and tokenizer of the checkpoint folder `like`, and texts by file
    names, `notes`.

    A value model's folder is one of transformers' models for sequence classification, with one label; `like` may be
    that or a causal language model's. A language model's has the layers of `like` that predict further tokens,
    where the model has none itself.

    Of `source_tensors` that are made when they are asked for no more than `made_bytes` are, of whole layers, at a time.
    Of others a rank brings `written_bytes` together, which it writes, and then the next. `dtype` None keeps their type.
    Every rank writes its share, in files of at most `max_shard_bytes` unless one tensor is larger. All of it is written
    beside `directory`, which appears when it is complete; an existing one is replaced only if an earlier call wrote it.
    CheckpointError otherwise, and where writing fails.

    Collective over: the ranks of `source_layout`, which `group` consists of (None for a single rank), and `cpu_group`,
    on gloo, which may be left out where `group` is gloo's.
    """
    with _writing(directory):
        _refuse_foreign(directory, like, notes)
        further = StoredPredictionLayers(like, trained=source_layout.tensors.numbers)
    any_tensor = next(iter(source_tensors.values()))
    dtype = dtype or any_tensor.dtype
    layout = hf_layout(architecture, source_layout.ranks, dtype=str(dtype).removeprefix("torch."))
    files = planned_files(layout, max_shard_bytes, further.entries if architecture.head == "vocabulary" else ())
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
    """A folder beside `directory` that takes its place once all ranks have left the block. Collective over: `group`, of
    which the `first` rank makes it."""
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
    """Have the checkpoint folder `saved`, which lies beside it, be `directory`, with `notes` in it. CheckpointError as
    in `save_checkpoint`. By one process."""
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
    """All that goes with the tensors."""
    settings = _value_settings(architecture, like) if architecture.head == "value" else {}
    write_config(like, folder, str(dtype).removeprefix("torch."), settings)
    copy_carried_files(like, folder)
    _write_notes(folder, notes)


def _value_settings(architecture: Architecture, like: Path) -> dict[str, object]:
    """What config.json says of a model with one score. transformers counts the labels by their names, and takes the
    score of a text from its last token that is no padding: the end of the text must not be taken for some."""
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
    """Whether an earlier save made `directory` and nothing was added to it since."""
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
