"""Converts, compares and describes checkpoints of Hugging Face and Megatron through canonical tensors."""

import fcntl
import json
import os
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from torch import Tensor

from rltrain.checkpoint.conversion_sources import (
    CHOICES,
    HF_FOLDER,
    CheckpointSource,
    HfSource,
    MegatronSource,
    Processes,
    RunSource,
    num_bytes,
    target_type,
    type_name,
)
from rltrain.checkpoint.durable_file import BEHIND_BYTES, DurableFile, populate
from rltrain.checkpoint.hf_files import (
    METADATA,
    HfFile,
    StoredPredictionLayers,
    copy_carried_files,
    planned_files,
    turns_experts,
    write_config,
    write_index,
)
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron_arguments import megatron_arguments
from rltrain.checkpoint.megatron_keys import EMBEDDING, GlobalMatrix, GlobalTensors, TensorChunk, extra_state_keys
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
from rltrain.checkpoint.run_folder import is_of_run, name_of
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.errors import CheckpointError, listed, named_by
from rltrain.models import Architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.table import INDEX_FILE, SINGLE_FILE
from rltrain.reshard.layout import BOX_FIELDS, hf_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.whole_files import partial_of, put_in_place

# The share of each writer of a Megatron checkpoint. Writers hold shares as a model's ranks do, but each element once.


def chunks_of_writer(tensors: GlobalTensors, writers: Grid, rank: int) -> Iterator[TensorChunk]:
    """Yields the chunks written by `rank` of `writers`, in the order of the model.

    Pipeline stages take consecutive layers, expert-parallel ranks take consecutive experts, and replicas take turns. If
    numbers do not divide evenly, shares differ by one. Raises ValueError if the grid cannot hold its expert
    parallelism.
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


def _stage(matrix: GlobalMatrix, num_layers: int, num_stages: int) -> int:
    if matrix.layer is not None:
        return matrix.layer * num_stages // num_layers
    return 0 if matrix.key == EMBEDDING else num_stages - 1


def _cut(tensors: GlobalTensors, matrix: GlobalMatrix, index: int, size: int) -> Iterator[TensorChunk]:
    """Yields share `index` of `size` of a matrix, cut as tensor parallelism cuts its row of the table. A replicated
    matrix is not cut and belongs to share 0."""
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


# Writing a Megatron checkpoint. Every process streams the chunks of its writers. One process then writes the metadata.

ReadBox = Callable[[Box], Tensor]
"""Reads a box of a canonical tensor as [rows, cols]."""

PART_FILES = ".part_*.json"
OBJECTS_FILE = "__0_1.distcp"
CHECKPOINT_VERSION = 3.0

BLOCK_BYTES = 8 * 2**20
"""Bytes of a chunk's rows read at a time."""


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
    """Writes the chunks of the ranks `mine` of `writers` below the root `folder`, block by block.

    If `iteration` is None, the checkpoint is a release. Values are cast to `dtype`, except for tensors always in fp32.
    Any number of writers works, because shares may differ by a row. `progress` is called with the bytes of every chunk.
    After all processes have returned, one of them must call finish_checkpoint. Raises OSError if files cannot be
    written.
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
    """The values of `chunk`, a writer's part of one tensor of the checkpoint, with zeros for padding."""

    def __init__(self, tensors: GlobalTensors, chunk: TensorChunk, read: ReadBox, dtype: torch.dtype) -> None:
        self._chunk, self._read, self.dtype = chunk, read, dtype
        self._boxes = tensors.inside(chunk)
        self._width = chunk.shape[-1]

    def write_into(self, file: DurableFile) -> None:
        """Appends the chunk to `file`, with the same bytes as a torch.save of the chunk alone. A file has many chunks.

        The elements are read and written in blocks of whole rows.
        """
        around = around_elements(self._chunk.shape, self.dtype)
        file.write(around.before)
        file.crc32 = 0
        for first, stop in self._row_blocks():
            file.write_tensor(self._rows(first, stop))
        file.write(around.closing(file.crc32))

    def _row_blocks(self) -> Iterator[tuple[int, int]]:
        """Yields (first, stop) for all rows, in blocks of about BLOCK_BYTES. No box begins or ends inside a block."""
        step = max(1, BLOCK_BYTES // (self._width * self.dtype.itemsize))
        num_rows = prod(self._chunk.shape) // self._width
        begins = self._boxes["key_row"]
        cuts = np.unique([0, num_rows, *begins, *(begins + self._boxes["rows"])])
        for low, high in pairwise(cuts.tolist()):
            for first in range(low, high, step):
                yield first, min(first + step, high)

    def _rows(self, first: int, stop: int) -> Tensor:
        """Returns the values of some rows, shape [stop - first, width]."""
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
        return self._read(Box(tensor, row + first - int(box["key_row"]), col, stop - first, cols)).to(self.dtype)


def finish_checkpoint(
    folder: Path,
    architecture: Architecture,
    *,
    iteration: int | None,
    arguments: Mapping[str, Any],
    padded_vocab_size: int | None = None,
) -> None:
    """Completes a checkpoint from the files of all writers. Writes the places of all chunks, the arguments and the
    tracker file.

    `arguments` are Megatron-LM's, as from megatron_arguments. The others are as in write_checkpoint. Raises
    CheckpointError if the writers left out elements or wrote some twice.
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
    write_metadata(target, stored, extra_state_keys(tensors), _write_empty_object(target))
    for part in parts:
        part.unlink()
    (folder / LATEST_FILE).write_text(RELEASE if iteration is None else str(iteration), encoding="utf-8")


def _merged(tensors: GlobalTensors, parts: list[list[Any]]) -> dict[str, StoredTensor]:
    """Returns the chunks of all writers, by key."""
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
                f"{num_elements} elements of {key} were written, expected each of its {prod(shape)} once. A process "
                "is missing, or another one writes into the same folder. Start again with another folder"
            )
    return {key: StoredTensor(shape, types[key], tuple(chunks[key])) for key, shape in tensors.shapes.items()}


def _write_empty_object(target: Path) -> Stored:
    """Writes the empty extra state shared by all modules of Transformer Engine. Returns its place."""
    with (target / OBJECTS_FILE).open("wb") as file:
        torch.save([None], file)
        length = file.tell()
    return Stored((), (), OBJECTS_FILE, 0, length)


# A count of the elements read. Every element of the source must be read exactly once.


class CountedSource:
    """A source with a count of the elements read of each tensor. Writers check their output themselves: they refuse
    unexpected elements and incomplete files."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.num_read = np.zeros(len(source.tensors.names), dtype=np.int64)

    def read(self, box: Box) -> Tensor:
        """Returns a box [rows, cols] of one tensor, in the source's type."""
        self.num_read[box.tensor] += box.rows * box.cols
        values = self.source.read(box)
        populate(values.data_ptr(), (values.stride(0) * (values.shape[0] - 1) + values.shape[1]) * values.itemsize)
        return values

    def refuse_other_than_once(self, processes: Processes) -> None:
        """Raises CheckpointError unless all processes together have read every element once. The message lists the
        wrong tensors.

        Collective over: all processes.
        """
        shares = [np.frombuffer(share, dtype=np.int64) for share in processes.gather(self.num_read.tobytes())]
        total, expected = np.sum(shares, axis=0), self.source.tensors.matrix_shapes.prod(axis=1)
        wrong = [
            f"{self.source.tensors.names[tensor]} ({total[tensor]} of {expected[tensor]} elements)"
            for tensor in np.flatnonzero(total != expected)
        ]
        if wrong:
            raise CheckpointError(
                f"{self.source.path}: {len(wrong)} tensors were not taken exactly once: {listed(wrong, 8)}. Nothing "
                "was written. This is a bug of the converter, so please report it"
            )


def row_blocks(source: CheckpointSource, tensor: int) -> Iterator[Box]:
    """Yields boxes of whole rows of a tensor, each of about BLOCK_BYTES. A vector is one row."""
    rows, cols = (int(size) for size in source.tensors.matrix_shapes[tensor])
    step = max(1, BLOCK_BYTES // (cols * source.dtypes[tensor].itemsize))
    for first in range(0, rows, step):
        yield Box(tensor, first, 0, min(step, rows - first), cols)


# The output folder of a conversion. It has another name until it is complete.


@contextmanager
def output_folder(path: Path, processes: Processes) -> Iterator[Path]:
    """Yields the hidden folder `.NAME.partial` beside `path`. It is renamed to `path` when the block has ended in all
    processes.

    After an error it is deleted. After a killed process it may remain, and the next conversion empties it. Raises
    CheckpointError if `path` exists, if another conversion is filling the folder, or if it cannot be written.
    Collective over: all processes.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists; expected a new folder. Move it away or name another one (option --output)"
        )
    processes.meet()  # no process may make the folder before all have looked
    partial = partial_of(path)
    with _told_where(path), _locked(partial) if processes.first else nullcontext():
        processes.meet()
        try:
            yield partial
            processes.meet()
            if processes.first:
                put_in_place(partial, path)
        except BaseException:
            if processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        processes.meet()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks `folder` for this process and empties it. It may have leftovers of an interrupted conversion."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being filled by another conversion; wait for it or name another folder (option --output)"
            ) from None
        except OSError:  # a file system without locks
            pass
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _told_where(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be written: {problem} (option --output)") from None


# The progress of a conversion in bytes, over all its processes.


class ConversionProgress:
    """A progress bar on the terminal of the first process. Every process reports its bytes to it.

    The bar appears on `console` if this is a terminal. The default is standard error.
    """

    def __init__(self, processes: Processes, what: str, total_bytes: int, *, console: Console | None = None) -> None:
        self.processes = processes
        self.done = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = console or Console(stderr=True)
        shown = processes.first and console.is_terminal
        self.bar = RichProgress(*columns, TimeRemainingColumn(), console=console, disable=not shown)
        self.task = self.bar.add_task(what, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Adds `num_bytes` done by this process."""
        self.done += num_bytes
        over_all = self.processes.add("bytes done", num_bytes)
        self.bar.update(self.task, completed=self.done if self.processes.count == 1 else over_all)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.bar.disable:  # rich 14 and earlier would print an empty line
            self.bar.stop()


# Writing a Hugging Face checkpoint from canonical tensors.


def convert_to_hf(
    source: CheckpointSource,
    output: Path,
    processes: Processes,
    *,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes `source` as a Hugging Face checkpoint into the new folder `output`, with the config and tokenizer of
    `source.settings`.

    `dtype` None keeps the source's type. A file is larger than `max_file_bytes` only if one tensor is. Raises
    CheckpointError if the source or the output cannot be used. Collective over: all processes. Each writes about as
    many bytes.
    """
    dtype = target_type(source, dtype)
    layout = hf_layout(source.architecture, tuple(range(processes.count)), dtype=dtype)
    further = StoredPredictionLayers(source.settings, source.option, trained=source.tensors.numbers)
    turns = turns_experts(source.settings, source.tensors)
    files = planned_files(layout, max_file_bytes, further.entries, turns=turns)
    counted = CountedSource(source)
    total_bytes = sum(entry.bytes for file in files for entry in file.entries)
    with output_folder(output, processes) as folder, ConversionProgress(processes, output.name, total_bytes) as bar:
        for file in files:
            if file.writer == processes.rank:
                _write_file(folder / file.name, file, counted, further, bar)
        if processes.first:
            write_index(folder, files)
            write_config(source.settings, folder, dtype)
            copy_carried_files(source.settings, folder)
        counted.refuse_other_than_once(processes)
        if processes.first:
            HfSource(folder, "--output", compare_tied_head=False)


def _write_file(
    path: Path, file: HfFile, counted: CountedSource, further: StoredPredictionLayers, bar: ConversionProgress
) -> None:
    numbers = counted.source.tensors.numbers
    with SafetensorsFile(path, file.entries, METADATA, behind_bytes=BEHIND_BYTES) as opened:
        for entry in opened.entries:
            if entry.name in further:
                opened.append(entry.name, further.read(entry.name))
                bar.advance(entry.bytes)
                continue
            tensor = numbers[entry.name]
            for box in row_blocks(counted.source, tensor):
                values = counted.read(box).to(entry.dtype)
                opened.append(entry.name, values)
                bar.advance(values.nbytes)


# Writing Megatron's distributed checkpoint from canonical tensors.


def convert_to_megatron(
    source: CheckpointSource,
    output: Path,
    processes: Processes,
    *,
    writers: Grid,
    dtype: str | None = None,
    iteration: int | None = None,
) -> None:
    """Writes `source` as a Megatron checkpoint into the new folder `output`. Megatron-LM and slime load it at any
    layout.

    `writers` is the grid of ranks imitated by the checkpoint, with one file per rank. These ranks are not processes:
    every process writes the files of some of them. `dtype` None keeps the source's type. `iteration` None makes the
    checkpoint a release of weights to start from. The folder `output`/hf, beside the iteration, gets the config, the
    tokenizer and the layers predicting further tokens. Raises CheckpointError if the source or the output cannot be
    used. Collective over: all processes.
    """
    dtype = target_type(source, dtype)
    counted = CountedSource(source)
    arguments = megatron_arguments(source.architecture, dtype=dtype)
    with (
        output_folder(output, processes) as folder,
        ConversionProgress(processes, output.name, num_bytes(source)) as bar,
    ):

        def read(box: Box) -> Tensor:
            values = counted.read(box)
            bar.advance(values.nbytes)
            return values

        write_checkpoint(
            folder,
            source.architecture,
            writers,
            writers.ranks[processes.rank :: processes.count],
            read,
            dtype=CHOICES[dtype],
            iteration=iteration,
        )
        counted.refuse_other_than_once(processes)
        if processes.first:
            finish_checkpoint(folder, source.architecture, iteration=iteration, arguments=arguments)
            (folder / HF_FOLDER).mkdir()
            write_config(source.settings, folder / HF_FOLDER, dtype)
            copy_carried_files(source.settings, folder / HF_FOLDER)
            StoredPredictionLayers(source.settings, source.option).write_into(folder / HF_FOLDER)
            MegatronSource(folder, "--output")


def writers_grid(architecture: Architecture, processes: int, *, tp: int | None, pp: int | None, ep: int | None) -> Grid:
    """Returns the grid of the requested writers, or one writer per process if none are requested. They need not divide
    the model evenly.

    Raises CheckpointError if there are more expert-parallel writers than experts.
    """
    if (tp, pp, ep) == (None, None, None):
        tp = processes
    tp, pp, ep = tp or 1, pp or 1, ep or 1
    if ep > max(1, architecture.num_experts):
        raise CheckpointError(
            f"--ep is {ep}, but the model ({architecture.family}) has {architecture.num_experts} experts; expected at "
            "most as many writers of experts"
        )
    return Grid(tuple(range(tp * pp * ep)), tp=tp, pp=pp, ep=ep)


# Comparison of two checkpoints tensor by tensor, in any formats.

BITS = {4: torch.int32, 2: torch.int16}
"""The type to compare elements as, by their bytes. As integers, NaNs equal themselves."""


def first_difference(
    a: CheckpointSource, b: CheckpointSource, processes: Processes, *, dtype: str | None = None
) -> str | None:
    """Returns a description of the first difference, or None. Compares the architectures, the types of tensors, and
    then the values of one tensor after another.

    Values are compared bit for bit. With `dtype`, types may differ, and values are rounded to it before the comparison.
    Collective over: all processes. They share the tensors.
    """
    if difference := _architectures(a, b) or (None if dtype else _types(a, b)):
        return difference
    mine = b""
    with ConversionProgress(processes, "verify", num_bytes(a)) as bar:
        for tensor in range(processes.rank, len(a.tensors.names), processes.count):
            if difference := _values(a, b, tensor, CHOICES[dtype] if dtype else None, bar):
                mine = b"%d %b" % (tensor, difference.encode())
                break
    found = [share.decode().split(" ", 1) for share in processes.gather(mine) if share]
    return min(((int(tensor), difference) for tensor, difference in found), default=(0, None))[1]


def _architectures(a: CheckpointSource, b: CheckpointSource) -> str | None:
    for field in fields(a.architecture):
        ours, theirs = getattr(a.architecture, field.name), getattr(b.architecture, field.name)
        if ours != theirs:
            return f"{field.name} is {ours} in {a.path} and {theirs} in {b.path}"
    return None


def _types(a: CheckpointSource, b: CheckpointSource) -> str | None:
    for name, ours, theirs in zip(a.tensors.names, a.dtypes, b.dtypes, strict=True):
        if ours != theirs:
            return (
                f"{name} is {type_name(ours)} in {a.path} and {type_name(theirs)} in {b.path}; --dtype compares the "
                "values as rounded to one type"
            )
    return None


def _values(
    a: CheckpointSource, b: CheckpointSource, tensor: int, dtype: torch.dtype | None, bar: ConversionProgress
) -> str | None:
    for box in row_blocks(a, tensor):
        ours, theirs = (source.read(box).to(dtype or source.dtypes[tensor]) for source in (a, b))
        differing = _bits(ours) != _bits(theirs)
        if differing.any():
            first = int(differing.flatten().to(torch.uint8).argmax())
            row, column = divmod(first, box.cols)
            is_vector = len(a.tensors.shapes[tensor]) == 1
            place = [column] if is_vector else [box.row + row, column]
            return (
                f"{a.tensors.names[tensor]}{place} is {ours[row, column].item()!r} in {a.path} and "
                f"{theirs[row, column].item()!r} in {b.path}"
            )
        bar.advance(ours.numel() * a.dtypes[tensor].itemsize)
    return None


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(BITS[values.element_size()])


# The format of a checkpoint, and its opening.

Format = Literal["hf", "megatron", "run"]
FORMAT_NAMES = {
    "hf": "Hugging Face (safetensors)",
    "megatron": "Megatron (torch_dist)",
    "run": "a run of rltrain (its training state)",
}
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")


def format_of(path: Path, option: str) -> Format:
    """Returns the format of the checkpoint at `path`. Raises CheckpointError if `path` is no folder of a checkpoint.
    `option` is the command-line option of the path."""
    if any((path / name).exists() for name in MEGATRON_FILES):
        return "megatron"
    if any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE, CONFIG_FILE)):
        return "hf"
    if is_of_run(path):
        return "run"
    what = "is no checkpoint" if path.is_dir() else "is not a folder"
    raise CheckpointError(
        f"{path} {what}; expected a Hugging Face checkpoint ({CONFIG_FILE} and {SINGLE_FILE} or {INDEX_FILE}), "
        f"Megatron's ({', '.join(MEGATRON_FILES)}), or a run's ({name_of(10)}) ({named_by(option)})"
    )


def open_source(
    path: Path, option: str, *, settings: Path | None = None, compare_tied_head: bool = True
) -> CheckpointSource:
    """Returns the checkpoint at `path`. `settings` is the folder with the config.json for a checkpoint without one."""
    found = format_of(path, option)
    if found == "megatron":
        return MegatronSource(path, option, settings)
    if found == "run":
        return RunSource(path, option, settings)
    return HfSource(path, option, compare_tied_head=compare_tied_head)


# The output of `inspect`.

SHOWN = "{:<20}{}"


def describe(path: Path, option: str, *, settings: Path | None = None, tensors: bool = False) -> Iterator[str]:
    """Yields lines about the checkpoint at `path`. With `tensors` they include every canonical tensor's name, shape and
    type.

    Opening makes the same check as a conversion. Raises CheckpointError if the checkpoint is incomplete.
    """
    yield SHOWN.format("format", FORMAT_NAMES[format_of(path, option)])
    source = open_source(path, option, settings=settings)
    if isinstance(source, MegatronSource):
        yield SHOWN.format("iteration", source.reader.iteration)
        yield SHOWN.format("vocabulary rows", source.keys.padded_vocab_size)
        yield SHOWN.format("global tensors", len(source.keys.keys))
        yield SHOWN.format("layers stacked", "yes" if source.keys.stacked else "no")
    if isinstance(source, RunSource):
        yield SHOWN.format("step", source.checkpoint.step)
    for field in fields(source.architecture):
        yield SHOWN.format(field.name, getattr(source.architecture, field.name))
    elements = source.tensors.matrix_shapes.prod(axis=1)
    yield SHOWN.format("tensors", len(source.tensors.names))
    yield SHOWN.format("parameters", f"{int(elements.sum()):,}")
    yield SHOWN.format("bytes", f"{num_bytes(source):,}")
    counts = Counter(map(type_name, source.dtypes))
    yield SHOWN.format("types", ", ".join(f"{name} ({count} tensors)" for name, count in counts.most_common()))
    if tensors:
        width = max(map(len, source.tensors.names)) + 2
        for name, shape, dtype in zip(source.tensors.names, source.tensors.shapes, source.dtypes, strict=True):
            yield f"{name:<{width}}{list(shape)!s:<20}{type_name(dtype)}"
