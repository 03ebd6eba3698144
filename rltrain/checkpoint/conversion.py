"""Writing a Hugging Face checkpoint from canonical tensors."""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from torch import Tensor

from rltrain.checkpoint.durable_file import BEHIND_BYTES, populate
from rltrain.checkpoint.hf_files import (
    METADATA,
    HfFile,
    PredictionLayers,
    copy_carried_files,
    planned_files,
    write_config,
    write_index,
)
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron_arguments import megatron_arguments
from rltrain.checkpoint.megatron_writer import finish_checkpoint, write_checkpoint
from rltrain.checkpoint.run_files import flush_folder
from rltrain.checkpoint.run_folder import is_of_run, name_of
from rltrain.checkpoint.safetensors_file import SafetensorsFile
from rltrain.checkpoint.sources import (
    CHOICES,
    HF_FOLDER,
    HfSource,
    MegatronSource,
    Processes,
    RunSource,
    Source,
    num_bytes,
    target_type,
    type_name,
)
from rltrain.errors import CheckpointError, listed, named_by
from rltrain.models import Architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.table import INDEX_FILE, SINGLE_FILE
from rltrain.reshard.layout import hf_layout
from rltrain.runtime.grid import Grid

BLOCK_BYTES = 8 * 2**20
"""What is read at a time, in whole rows of a tensor: so little that what is made of it lies in the same memory over and
over. Being given new memory takes longer than copying."""


class CountedSource:
    """Reads a source and counts by tensor the elements that were read. What is written, the writers count themselves:
    they refuse what is not due, and files that lack something."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_read = np.zeros(len(source.tensors.names), dtype=np.int64)

    def read(self, box: Box) -> Tensor:
        """[rows, cols] of one tensor, in the source's type."""
        self.num_read[box.tensor] += box.rows * box.cols
        values = self.source.read(box)
        populate(values.data_ptr(), (values.stride(0) * (values.shape[0] - 1) + values.shape[1]) * values.itemsize)
        return values

    def refuse_other_than_once(self, processes: Processes) -> None:
        """CheckpointError that lists tensors of which not every element was read once, by any process.

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
                "was written; this is a mistake of the converter, which its authors want to know"
            )


def row_blocks(source: Source, tensor: int) -> Iterator[Box]:
    """A tensor in boxes of whole rows, about BLOCK_BYTES large. A vector is one row."""
    rows, cols = (int(size) for size in source.tensors.matrix_shapes[tensor])
    step = max(1, BLOCK_BYTES // (cols * source.dtypes[tensor].itemsize))
    for first in range(0, rows, step):
        yield Box(tensor, first, 0, min(step, rows - first), cols)


@contextmanager
def output_folder(path: Path, processes: Processes) -> Iterator[Path]:
    """The hidden folder `.NAME.partial` beside `path`, which takes its place when the block has ended everywhere.

    After an error nothing is left of it; after a process was killed it may be, and the next conversion empties it.
    CheckpointError where `path` exists, another conversion fills it now, or the disk takes no more.
    Collective over: all processes.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists; expected a folder that is still to be made: move it away or name another (option --output)"
        )
    processes.meet()  # nobody makes the folder before all have looked
    partial = path.with_name(f".{path.name}.partial")
    with _told_where(path), _locked(partial) if processes.first else nullcontext():
        processes.meet()
        try:
            yield partial
            processes.meet()
            if processes.first:
                flush_folder(partial)
                partial.rename(path)
                flush_folder(path.parent)
        except BaseException:
            if processes.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        processes.meet()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """`folder`, new and empty, to this process alone: what is left of an interrupted conversion is deleted."""
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


class ConversionProgress:
    """A bar on the terminal of the first process; nothing elsewhere. Every process tells what it has done.

    `console` is where the bar appears if it is a terminal, by default standard error.
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
        """`num_bytes` more are done by this process."""
        self.done += num_bytes
        over_all = self.processes.add("bytes done", num_bytes)
        self.bar.update(self.task, completed=self.done if self.processes.count == 1 else over_all)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.bar.disable:  # rich 14 and earlier would print an empty line
            self.bar.stop()


def convert_to_hf(
    source: Source, output: Path, processes: Processes, *, dtype: str | None = None, max_file_bytes: int = 5 * 10**9
) -> None:
    """Write `source` into the new folder `output`, with the config and tokenizer of `source.settings`.

    `dtype` None keeps the source's. No file is larger than `max_file_bytes` unless one tensor is. CheckpointError where
    the source or the output cannot be used. Collective over: all processes, of which each writes about as many bytes.
    """
    dtype = target_type(source, dtype)
    layout = hf_layout(source.architecture, tuple(range(processes.count)), dtype=dtype)
    further = PredictionLayers(source.settings, source.option, trained=source.tensors.numbers)
    files = planned_files(layout, max_file_bytes, further.entries)
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
    path: Path, file: HfFile, counted: CountedSource, further: PredictionLayers, bar: ConversionProgress
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


def convert_to_megatron(
    source: Source,
    output: Path,
    processes: Processes,
    *,
    writers: Grid,
    dtype: str | None = None,
    iteration: int | None = None,
) -> None:
    """Write `source` into the new folder `output`, which Megatron-LM and slime load at any layout.

    Its files are those that ranks of `writers` would write. `dtype` None keeps the source's; `iteration` None makes it
    a release: weights to start from. Config, tokenizer and layers that predict further tokens go into the folder `hf`
    in it. CheckpointError where the source or the output cannot be used. Collective over: all processes, which share
    out the writers.
    """
    dtype = target_type(source, dtype)
    counted = CountedSource(source)
    arguments = megatron_arguments(source.architecture, dtype=dtype)
    with (
        output_folder(output, processes) as folder,
        ConversionProgress(processes, output.name, num_bytes(source)) as bar,
    ):

        def read(tensor: int, row: int, col: int, rows: int, cols: int) -> Tensor:
            values = counted.read(Box(tensor, row, col, rows, cols))
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
            PredictionLayers(source.settings, source.option).write_into(folder / HF_FOLDER)
            MegatronSource(folder, "--output")


def writers_grid(architecture: Architecture, processes: int, *, tp: int | None, pp: int | None, ep: int | None) -> Grid:
    """The writers that were asked for; where nothing was, one per process. They need not divide the model evenly.

    CheckpointError for expert-parallel writers of a model that has fewer experts.
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


BITS = {4: torch.int32, 2: torch.int16}
"""By the bytes of an element: the type to compare it as, for which not-a-numbers equal themselves."""


def first_difference(a: Source, b: Source, processes: Processes, *, dtype: str | None = None) -> str | None:
    """What differs first, in words: the architecture, a tensor's type, then its values, tensor by tensor; or None.

    Values are compared bit for bit. With `dtype` types may differ, and values are compared as rounded to it.
    Collective over: all processes, which share out the tensors.
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


def _architectures(a: Source, b: Source) -> str | None:
    for field in fields(a.architecture):
        ours, theirs = getattr(a.architecture, field.name), getattr(b.architecture, field.name)
        if ours != theirs:
            return f"{field.name} is {ours} in {a.path} and {theirs} in {b.path}"
    return None


def _types(a: Source, b: Source) -> str | None:
    for name, ours, theirs in zip(a.tensors.names, a.dtypes, b.dtypes, strict=True):
        if ours != theirs:
            return (
                f"{name} is {type_name(ours)} in {a.path} and {type_name(theirs)} in {b.path}; --dtype compares the "
                "values as rounded to one type"
            )
    return None


def _values(a: Source, b: Source, tensor: int, dtype: torch.dtype | None, bar: ConversionProgress) -> str | None:
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


Format = Literal["hf", "megatron", "run"]
FORMAT_NAMES = {
    "hf": "Hugging Face (safetensors)",
    "megatron": "Megatron (torch_dist)",
    "run": "a run of rltrain (its training state)",
}
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")


def format_of(path: Path, option: str) -> Format:
    """CheckpointError where `path` is no folder of a checkpoint; `option` named it."""
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


def open_source(path: Path, option: str, *, settings: Path | None = None, compare_tied_head: bool = True) -> Source:
    """The checkpoint at `path`; `settings` is the folder with the config.json of one that has none of its own."""
    found = format_of(path, option)
    if found == "megatron":
        return MegatronSource(path, option, settings)
    if found == "run":
        return RunSource(path, option, settings)
    return HfSource(path, option, compare_tied_head=compare_tied_head)


SHOWN = "{:<20}{}"


def describe(path: Path, option: str, *, settings: Path | None = None, tensors: bool = False) -> Iterator[str]:
    """Lines about the checkpoint at `path`; with `tensors` every canonical tensor's name, shape and type too.

    Opening it is the check that conversions make too: CheckpointError where it is not complete.
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
