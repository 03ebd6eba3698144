"""The files of a training state, with their metadata and their boxes of canonical tensors."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rltrain.checkpoint.durable_file import populate
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.run_files import AnyFile, Contents, SavedFile, TensorRows, saved_file
from rltrain.errors import CheckpointError, named_by
from rltrain.models.table import Array, CanonicalTensors, IntArray
from rltrain.reshard.layout import BOX_FIELDS, PIECE, Overlaps, boxes_of, describe, elements, offsets, overlaps

FORMAT = "rltrain training state 1"
CONFIG_KEY = "checkpoint.resume"
FIELDS = PIECE.names or ()
MASTER = "master"
"""The kind of the weights in fp32."""
MAX_OPEN_FILES = 8
PIECES = "pieces"
"""The table of pieces, int64 [boxes, FIELDS]. Offsets and strides are within the flat tensors."""


@dataclass(frozen=True)
class Counts:
    """The numbers of updates of the run and of steps of the optimizer. An update without anything to learn makes no
    optimizer step."""

    num_updates: int
    optimizer_steps: int
    loss_scale: str = ""
    """The loss scale of a model in fp16, in the form of its backend."""
    optimizer: str = "adamw"
    """The optimizer of the saved states."""


def contents(
    tensors: CanonicalTensors, parameters: Sequence[str], pieces: Array, flats: Mapping[str, Tensor], counts: Counts
) -> Contents:
    """Returns the contents of one rank's file. `flats` are named by `flat_name`. `pieces` are in the flat tensors of
    their parameters."""
    table = np.stack([pieces[field].astype(np.int64) for field in FIELDS], axis=1)
    metadata = {
        "format": FORMAT,
        "tensors": _described(tensors),
        "parameters": json.dumps(parameters),
        "num_updates": str(counts.num_updates),
        "optimizer_steps": str(counts.optimizer_steps),
        "loss_scale": counts.loss_scale,
        "optimizer": counts.optimizer,
    }
    return Contents({PIECES: torch.from_numpy(table), **flats}, metadata)


def flat_name(kind: str, parameter: str) -> str:
    """Returns the name of the flat tensor with a parameter's values of one kind, such as its master weights."""
    return f"{kind}.{parameter}"


@dataclass(frozen=True, eq=False)
class Destination:
    """The destination of values of one kind. `pieces` are in the flat tensors `flats` of their parameters.

    Elements without a piece are padding. A parameter without pieces has None.
    """

    kind: str
    pieces: Array
    flats: Sequence[Tensor | None]


@dataclass(frozen=True, eq=False)
class _Moves:
    """The copies into one destination. `found` are the boxes, `begin` their first elements in its flat tensors, and
    `saved_begin` those in the flat tensors of `file`."""

    to: Destination
    found: Overlaps
    begin: IntArray
    saved_begin: IntArray
    file: IntArray


class SavedState:
    """The files of a state, saved by all its ranks. Each file has other elements.

    `option` is the config key or option of the files, for messages. Raises CheckpointError if a file is missing or
    damaged, has a model with other tensors, or was saved at another moment.
    """

    def __init__(self, files: Sequence[AnyFile], tensors: CanonicalTensors, option: str = CONFIG_KEY) -> None:
        self._named_by = named_by(option)
        if not files:
            raise CheckpointError(f"the checkpoint has no files of this role's training state ({self._named_by})")
        self._files, self.tensors = [*map(saved_file, files)], tensors
        self._folder = self._files[0].path.parent
        self._expected = _described(tensors)
        self._parameters: list[list[str]] = []
        self._open_files: dict[SavedFile, Any] = {}
        tables, counts = zip(*map(self._open, self._files), strict=True)
        self.counts = self._agreed([i for i, table in enumerate(tables) if len(table)], counts)
        pieces, file = np.concatenate(tables), np.repeat(np.arange(len(files)), [len(table) for table in tables])
        order = np.argsort(pieces["tensor"], kind="stable")
        self._pieces: Array = pieces[order]
        self._file: IntArray = file[order]

    def require_optimizer(self, name: str, role: str) -> None:
        """Raises CheckpointError if the states belong to another optimizer."""
        saved = self.counts.optimizer
        if self.counts.optimizer_steps and saved != name:
            raise CheckpointError(
                f"the training state in {self._folder} has the states of {saved}, and {role}.optimizer.name is {name}; "
                f"expected {saved}, or a new run from exported weights ({self._named_by})"
            )

    def read(self, destinations: Sequence[Destination]) -> None:
        """Fills all destinations, and their padding with zeros.

        Raises CheckpointError if the files do not have each of their elements exactly once.
        """
        self._read(destinations, self._opened)

    def read_box(self, kind: str, box: Box) -> Tensor:
        """Returns a box [rows, cols] of values of one kind, in fp32. The files stay open for further boxes. Raises
        CheckpointError as `read` does."""
        flat = torch.empty(box.rows * box.cols)
        piece = np.zeros(1, dtype=PIECE)
        piece[list(BOX_FIELDS)] = tuple(box)
        piece["stride"] = box.cols
        self._read([Destination(kind, piece, [flat])], self._kept_open)
        return flat.view(box.rows, box.cols)

    def _read(self, destinations: Sequence[Destination], opened_at: Callable[[SavedFile], Any]) -> None:
        moves = [self._moves(destination) for destination in destinations]
        for destination in destinations:
            _zero_padding(destination)
        for number in np.unique(np.concatenate([move.file for move in moves])):
            file = self._files[number]
            if not file.is_whole:
                file.ask_for_rows([rows for move in moves for rows in self._wanted(number, move)])
            opened = opened_at(file)
            for move in moves:
                self._copy(opened, number, move)

    def _wanted(self, number: int, move: _Moves) -> Iterator[TensorRows]:
        """Yields the rows needed from file `number`."""
        for index in np.flatnonzero(move.file == number):
            saved, box = self._pieces[move.found.fragment[index]], move.found.boxes[index]
            name = flat_name(move.to.kind, self._parameters[number][saved["parameter"]])
            shape = int(box["rows"]), int(box["cols"]), int(saved["stride"])
            yield TensorRows(name, int(move.saved_begin[index]), *shape)

    def _open(self, file: SavedFile) -> tuple[Array, Counts]:
        """Returns the table of pieces in one file, and its counts."""
        opened = self._opened(file)
        metadata = opened.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{file.path} has the format {metadata.get('format')!r}; expected {FORMAT!r} ({self._named_by})"
            )
        if metadata["tensors"] != self._expected:
            raise CheckpointError(
                f"{file.path} {_difference(json.loads(metadata['tensors']), self.tensors)}. Resume with the "
                f"trained model, or start a new run ({self._named_by})"
            )
        self._parameters.append(json.loads(metadata["parameters"]))
        if not file.is_whole:
            file.ask_for_tensor(PIECES)
            opened = self._opened(file)
        table = opened.get_tensor(PIECES).numpy()
        pieces = np.empty(len(table), dtype=PIECE)
        for column, field in enumerate(FIELDS):
            pieces[field] = table[:, column]
        num_updates, optimizer_steps = (int(metadata[name]) for name in ("num_updates", "optimizer_steps"))
        texts = metadata.get("loss_scale", ""), metadata.get("optimizer", Counts.optimizer)
        return pieces, Counts(num_updates, optimizer_steps, *texts)

    def _agreed(self, numbers: Sequence[int], counts: Sequence[Counts]) -> Counts:
        """Returns the common counts of the files `numbers`. These have contents. In the others, the optimizers made no
        steps."""
        for number in numbers:
            if counts[number] != counts[numbers[0]]:
                first, other = self._files[numbers[0]].path, self._files[number].path
                raise CheckpointError(
                    f"{first} and {other} were not saved together: {counts[numbers[0]]} and {counts[number]}. Copy "
                    f"all files of one checkpoint ({self._named_by})"
                )
        return counts[numbers[0] if numbers else 0]

    def _moves(self, to: Destination) -> _Moves:
        found = overlaps(to.pieces, boxes_of(self._pieces))
        held = np.bincount(found.piece, weights=elements(found.boxes), minlength=len(to.pieces)).astype(np.int64)
        wrong = np.flatnonzero(held != elements(to.pieces))
        if len(wrong):
            piece = to.pieces[wrong[0]]
            raise CheckpointError(
                f"the {len(self._files)} files of the training state in {self._folder} hold {held[wrong[0]]} "
                f"elements of {describe(piece, self.tensors)}; expected each of {piece['rows'] * piece['cols']} once. "
                f"Files of some ranks are missing or duplicated ({self._named_by})"
            )
        return _Moves(
            to,
            found,
            begin=offsets(to.pieces[found.piece], found.boxes),
            saved_begin=offsets(self._pieces[found.fragment], found.boxes),
            file=self._file[found.fragment],
        )

    def _copy(self, opened: Any, number: int, move: _Moves) -> None:
        """Copies the boxes of file `number`, already `opened`."""
        for index in np.flatnonzero(move.file == number):
            piece, saved = move.to.pieces[move.found.piece[index]], self._pieces[move.found.fragment[index]]
            box, flat = move.found.boxes[index], move.to.flats[piece["parameter"]]
            assert flat is not None, "a piece lies in a flat tensor"
            name = flat_name(move.to.kind, self._parameters[number][saved["parameter"]])
            try:
                values = _view(opened.get_tensor(name), move.saved_begin[index], box, saved["stride"])
            except (SafetensorError, RuntimeError) as problem:
                raise CheckpointError(
                    f"{self._files[number].path}: {name} does not match the table {PIECES}: {problem}"
                ) from None
            if self._files[number].is_whole:  # others already have the pages to read
                populate(values.data_ptr(), int((box["rows"] - 1) * saved["stride"] + box["cols"]) * values.itemsize)
            _view(flat, move.begin[index], box, piece["stride"]).copy_(values)

    def _opened(self, file: SavedFile) -> Any:
        """Returns the file, mapped while it is in use."""
        try:
            return safe_open(file.place, framework="pt")
        except FileNotFoundError:
            raise CheckpointError(
                f"{file.path} does not exist. The checkpoint is incomplete ({self._named_by})"
            ) from None
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{file.path} is damaged or cut short: {problem} ({self._named_by})") from None

    def _kept_open(self, file: SavedFile) -> Any:
        """Returns the file as `_opened` does. The last files stay open."""
        if file not in self._open_files:
            if len(self._open_files) >= MAX_OPEN_FILES:
                del self._open_files[next(iter(self._open_files))]
            self._open_files[file] = self._opened(file)
        return self._open_files[file]


def _view(flat: Tensor, begin: np.int64, box: np.void, stride: np.int64) -> Tensor:
    """Returns a box of a flat tensor, shape [rows, cols]."""
    return flat[int(begin) :].as_strided((int(box["rows"]), int(box["cols"])), (int(stride), 1))


def _zero_padding(destination: Destination) -> None:
    pieces = destination.pieces
    covered = np.bincount(pieces["parameter"], weights=elements(pieces), minlength=len(destination.flats))
    for flat, count in zip(destination.flats, covered, strict=True):
        if flat is not None and flat.numel() != count:
            flat.zero_()


def _described(tensors: CanonicalTensors) -> str:
    return json.dumps(dict(zip(tensors.names, tensors.shapes, strict=True)))


def _difference(saved: Mapping[str, Sequence[int]], tensors: CanonicalTensors) -> str:
    """Describes the first difference."""
    model = {name: list(shape) for name, shape in zip(tensors.names, tensors.shapes, strict=True)}
    name = next(name for name in [*model, *saved] if model.get(name) != saved.get(name))
    here, there = (f"has shape {shapes[name]}" if name in shapes else "does not exist" for shapes in (model, saved))
    return f"is of another model: {name} {there} there; in the model of this run it {here}"
