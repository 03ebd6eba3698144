"""Reads weights from a Hugging Face checkpoint folder. It can also quantise them for engines."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rltrain.errors import CheckpointError, listed, named_by
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.registry import FAMILIES
from rltrain.models.table import (
    INDEX_FILE,
    NESTED_TOWER_PREFIX,
    SINGLE_FILE,
    TOWER_PREFIX,
    Array,
    CanonicalTensors,
    read_weight_map,
)
from rltrain.reshard.copy_table import quantize_blocks
from rltrain.reshard.fp8_blocks import QuantizedLayouts, touched_blocks
from rltrain.reshard.layout import BOX_FIELDS, Layout
from rltrain.reshard.native import BLOCK
from rltrain.runtime.json_text import read_json

# Weights of a Hugging Face checkpoint folder.

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
COUNTS_OF_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules")
TOWER_PREFIXES = (TOWER_PREFIX, NESTED_TOWER_PREFIX)
COMPARED_ROWS = 4096  # rows of a large matrix held in memory at once


def load_parameters(
    path: Path, layout: Layout, rank: int, parameters: Mapping[str, Tensor], *, config_key: str = "model.path"
) -> None:
    """Fills `parameters` from the checkpoint folder. They have the names and local shapes of `layout.on(rank)`, in any
    dtype and on any device.

    Only the boxes of this rank are read. Padding is zeroed. A value model can also be loaded from a causal language
    model. Its head then starts at zero, and the vocabulary's head is not read. `config_key` is the config key of the
    folder, for messages.

    Raises CheckpointError if a file or another tensor is missing, damaged or of another shape, or if the checkpoint has
    tensors unknown to the model.
    """
    mine = layout.on(rank)
    check_parameters(mine.parameters, parameters)
    checkpoint = HfFolder(path, config_key)
    checkpoint.refuse_unused(layout.tensors, compare_tied_head=rank == layout.ranks[0])
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    pieces = checkpoint.stored(layout, mine.pieces)
    covered = np.zeros(len(flats), dtype=np.int64)
    np.add.at(covered, pieces["parameter"], pieces["rows"] * pieces["cols"])
    for flat, elements in zip(flats, covered, strict=True):
        if elements < flat.numel():
            flat.zero_()
    for file, contents in checkpoint.by_file(layout, pieces):
        with checkpoint.open(file) as opened:
            for piece in contents:
                write_piece(flats, piece, checkpoint.read_box(opened, file, layout.tensors, _box(piece)))


def further_layers(path: Path) -> tuple[str, ...]:
    """Returns the name prefixes of tensors in further layers, from the config.json in `path`.

    Such layers predict further tokens ahead, or encode pictures. Prediction layers follow the model's own layers, or
    have separate names (MiMo, Qwen). Returns no prefixes if the file cannot be used.
    """
    try:
        config = read_json(path / CONFIG_FILE)
        family = FAMILIES.get(config.get("model_type"))
        carried = family.carried if family else ()
        count = sum(config.get(key) or 0 for key in COUNTS_OF_FURTHER_LAYERS)
        if not count:
            return carried
        first = config["num_hidden_layers"]
        return (*(f"model.layers.{layer}." for layer in range(first, first + count)), "model.mtp_layers.", *carried)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()  # loading the model's own layers reports what is wrong with the file


def within(piece: Any) -> tuple[slice, slice]:
    """Returns the rows and columns of a `piece` [PIECE] within its tensor."""
    row, column = int(piece["row"]), int(piece["col"])
    return slice(row, row + int(piece["rows"])), slice(column, column + int(piece["cols"]))


def held_piece(flats: Sequence[Tensor], piece: Any) -> Tensor:
    """Returns a view [rows, cols] of a `piece` [PIECE] in the parameters `flats`. Each of them has one dimension."""
    shape, strides = (int(piece["rows"]), int(piece["cols"])), (int(piece["stride"]), 1)
    flat: Tensor = flats[piece["parameter"]]
    return flat[int(piece["offset"]) :].as_strided(shape, strides)


def write_piece(flats: Sequence[Tensor], piece: Any, values: Tensor) -> None:
    """Writes `values` [rows, cols] to the place of a `piece` [PIECE]."""
    held_piece(flats, piece).copy_(values)


def check_parameters(expected: tuple[tuple[str, tuple[int, ...]], ...], parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError if names or shapes of `parameters` differ from a layout's."""
    found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if found != dict(expected):
        differing = sorted(set(found.items()) ^ set(expected))
        raise ValueError(f"parameters differ from the layout (name, shape): {differing[:8]}")


def _rows_of_stack(stored: Any, height: int, box: "Box") -> Tensor:
    """Returns a box of stacked matrices with `height` rows each, seen as one matrix."""
    first, last = box.row // height, (box.row + box.rows - 1) // height
    columns = slice(box.col, box.col + box.cols)
    if first == last and len(stored.get_shape()) == 3:
        row = box.row - first * height
        rows: Tensor = stored[first : first + 1, row : row + box.rows, columns]
        return rows[0]
    whole: Tensor = stored[first : last + 1, ..., columns].flatten(0, -2)
    return whole[box.row - first * height :][: box.rows]


def _columns_of_stack(stored: Any, height: int, box: "Box") -> Tensor:
    """Returns `_rows_of_stack` of stacked matrices stored transposed."""
    first, last = box.row // height, (box.row + box.rows - 1) // height
    columns: Tensor = stored[first : last + 1, box.col : box.col + box.cols]
    return columns.transpose(1, 2).flatten(0, 1)[box.row - first * height :][: box.rows]


def turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of stacked matrices if they are transposed."""
    stack, rows, columns = shape
    return stack, columns, rows


class Box(NamedTuple):
    """A part of canonical tensor number `tensor`, seen as a matrix."""

    tensor: int
    row: int
    col: int
    rows: int
    cols: int


class HfFolder:
    """The safetensors files of a checkpoint folder, and the file of every tensor.

    `config_key` is the config key or the command-line option of the folder, for messages. Raises CheckpointError if the
    folder has no checkpoint in this format.
    """

    def __init__(self, path: Path, config_key: str) -> None:
        self.path, self.config_key = path, config_key
        self.file_of = self._read_files()

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} ({named_by(self.config_key)})")

    def _read_files(self) -> dict[str, str]:
        if (self.path / SINGLE_FILE).exists():
            with self.open(SINGLE_FILE) as opened:
                return dict.fromkeys(opened.keys(), SINGLE_FILE)
        if not (self.path / INDEX_FILE).exists():
            raise self.error(
                f"{self.path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; expected the folder of a Hugging Face "
                "checkpoint in safetensors format"
            )
        return read_weight_map(self.path, self.config_key)

    def open(self, file: str) -> Any:
        """Returns a mapped safetensors file, to be used in a `with` or kept open. Raises CheckpointError if it is
        missing or damaged."""
        try:
            return safe_open(self.path / file, framework="pt")
        except FileNotFoundError:
            raise self.error(
                f"{self.path / file} does not exist, but {INDEX_FILE} names it: the checkpoint is incomplete"
            ) from None
        except (SafetensorError, OSError) as problem:
            raise self.error(f"{self.path / file} is damaged or cut short: {problem}") from None

    def refuse_unused(self, tensors: CanonicalTensors, *, compare_tied_head: bool) -> None:
        """Raises CheckpointError if the files have tensors unknown to a model of `tensors`.

        A vocabulary's head is allowed beside tied embeddings. With `compare_tied_head` it is read and must equal them.
        Tensors of `further_layers` are ignored.
        """
        unused = set(self.file_of) - set(tensors.names)
        unused = {name for name in unused if not name.endswith(".rotary_emb.inv_freq")}
        self.turns(tensors)
        carried = further_layers(self.path)
        if any(name.startswith(TOWER_PREFIXES) for name in tensors.names):
            carried = tuple(prefix for prefix in carried if prefix not in TOWER_PREFIXES)
        unused = {name for name in unused if not name.startswith(carried)}
        if HEAD in unused:
            # One rank's verdict ends the whole job, so the others need not read two vocabularies for it.
            tied = VALUE_HEAD not in tensors.numbers
            embedding = next((name for name in tensors.names if name.endswith(EMBEDDING)), EMBEDDING)
            if tied and compare_tied_head and not self._equal(embedding, HEAD):
                raise self.error(
                    f"{self.path}: config.json ties the embeddings, but {HEAD} differs from {embedding}; set "
                    "tie_word_embeddings to false there or remove the tensor"
                )
            unused.remove(HEAD)
        if unused:
            raise self.error(
                f"{self.path} holds {len(unused)} tensors that the model of its config.json does not have: "
                f"{listed(sorted(unused), 8)}"
            )

    def turns(self, tensors: CanonicalTensors) -> bool:
        """Returns whether the files have the matrices of `turnable` tensors transposed, as published.

        transformers decides this by the shape of every tensor. Raises CheckpointError if a transposed file has square
        matrices among others, because transformers 5 would not transpose them.
        """
        names = [tensors.names[number] for number in tensors.turnable]
        stored = {name: self._stored_shape(name) for name in names if name in self.file_of}
        shapes = {name: tensors.shapes[tensors.numbers[name]] for name in stored}
        square = sorted(name for name, (_, rows, columns) in shapes.items() if rows == columns)
        are_turned = any(stored[name] != shape for name, shape in shapes.items())
        if square and are_turned:
            raise self.error(
                f"{self.path} has transposed matrices of experts, but square ones in {square[0]}: transformers 5 does "
                "not transpose them. Save the checkpoint with transformers 4.57, and again with transformers 5"
            )
        return are_turned if stored else bool(names)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        with self.open(self.file_of[name]) as opened:
            try:
                return tuple(opened.get_slice(name).get_shape())
            except SafetensorError:
                raise self.error(f"{self.path / self.file_of[name]} lacks tensor {name}") from None

    def _equal(self, first: str, second: str) -> bool:
        if first not in self.file_of:
            return False
        with self.open(self.file_of[first]) as one, self.open(self.file_of[second]) as other:
            left, right = one.get_slice(first), other.get_slice(second)
            if left.get_shape() != right.get_shape():
                return False
            starts = range(0, left.get_shape()[0], COMPARED_ROWS)
            return all(torch.equal(left[i : i + COMPARED_ROWS], right[i : i + COMPARED_ROWS]) for i in starts)

    def stored(self, layout: Layout, pieces: Array) -> Array:
        """Returns the `pieces` present in the checkpoint. A language model's checkpoint has no value head."""
        if VALUE_HEAD in self.file_of or VALUE_HEAD not in layout.tensors.numbers:
            return pieces
        others: Array = pieces[pieces["tensor"] != layout.tensors.numbers[VALUE_HEAD]]
        return others

    def by_file(self, layout: Layout, pieces: Array) -> list[tuple[str, Array]]:
        """Returns `pieces` grouped by the file of their tensors. Raises CheckpointError if a tensor is missing."""
        file_of_tensor: dict[int, str] = {}
        for tensor in np.unique(pieces["tensor"]):
            name = layout.tensors.names[tensor]
            if name not in self.file_of:
                shape = list(layout.tensors.shapes[tensor])
                raise self.error(f"{self.path} lacks tensor {name}; its config.json asks for one of shape {shape}")
            file_of_tensor[int(tensor)] = self.file_of[name]
        files = np.array([file_of_tensor[int(tensor)] for tensor in pieces["tensor"]])
        return [(str(file), pieces[files == file]) for file in np.unique(files)]

    def read_box(self, opened: Any, file: str, tensors: CanonicalTensors, box: Box) -> Tensor:
        """Returns a box [rows, cols] of one tensor of the open `file`."""
        shape = tensors.shapes[box.tensor]
        stored = self.stored_tensor(opened, file, tensors, box.tensor)
        if tuple(stored.get_shape()) != shape:
            return _columns_of_stack(stored, shape[1], box)
        rows, columns = slice(box.row, box.row + box.rows), slice(box.col, box.col + box.cols)
        if len(shape) > 2:
            return _rows_of_stack(stored, prod(shape[1:-1]), box)
        values: Tensor = stored[columns][None] if len(shape) == 1 else stored[rows, columns]
        return values

    def stored_tensor(self, opened: Any, file: str, tensors: CanonicalTensors, number: int) -> Any:
        """Returns the slice object of a tensor of an open file. Raises CheckpointError if it is missing or of another
        shape. The matrices of `turnable` tensors may be transposed."""
        name, shape = tensors.names[number], tensors.shapes[number]
        try:
            stored = opened.get_slice(name)
        except SafetensorError:
            raise self.error(
                f"{self.path / file} lacks tensor {name} of shape {list(shape)}, which {INDEX_FILE} places there"
            ) from None
        found = tuple(stored.get_shape())
        if found != shape and not (number in tensors.turnable and found == turned(shape)):
            asks = "a value head gives one score (num_labels 1):" if name == VALUE_HEAD else "config.json asks for"
            raise self.error(f"{self.path / file}: tensor {name} has shape {stored.get_shape()}; {asks} {list(shape)}")
        return stored


# Weights of a Hugging Face checkpoint folder for an engine with some of them in FP8.


def load_quantized(
    path: Path,
    plain: Layout,
    layouts: QuantizedLayouts,
    rank: int,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    config_key: str = "model.path",
) -> None:
    """Fills `parameters` of an engine with some weights in FP8. They belong to `layouts.destination.on(rank)`. `plain`
    is the layout without FP8.

    Whole blocks are measured and quantised from values of `dtype`, on the device of the parameters. So every rank has
    the same bits as after a reshard from parameters of this type. Raises CheckpointError as load_parameters does.
    """
    mine = layouts.destination.on(rank)
    check_parameters(mine.parameters, parameters)
    checkpoint = HfFolder(path, config_key)
    checkpoint.refuse_unused(plain.tensors, compare_tied_head=rank == plain.ranks[0])
    flats = [parameters[name].detach().view(-1) for name, _ in mine.parameters]
    for flat in flats:
        flat.view(torch.uint8).zero_()
    of_scales = mine.pieces["tensor"] >= layouts.num_tensors
    scales, values = mine.pieces[of_scales], mine.pieces[~of_scales]
    of_values = scales.copy()
    of_values["tensor"] = np.flatnonzero(layouts.which)[scales["tensor"] - layouts.num_tensors]
    scales_at = _by_blocks(of_values)
    for file, contents in checkpoint.by_file(plain, values):
        with checkpoint.open(file) as opened:
            in_fp8 = layouts.which[contents["tensor"]]
            for piece in contents[~in_fp8]:
                write_piece(flats, piece, checkpoint.read_box(opened, file, plain.tensors, _box(piece)))
            quantising = contents[in_fp8]
            for blocks, touching in _by_blocks(touched_blocks(quantising)).items():
                pieces = quantising[touching]
                whole = _elements(blocks, plain)
                read = checkpoint.read_box(opened, file, plain.tensors, whole)
                quantised, factors = quantize_blocks(read.to(flats[pieces[0]["parameter"]].device, dtype))
                for piece in pieces:
                    row, col = int(piece["row"]) - whole.row, int(piece["col"]) - whole.col
                    write_piece(flats, piece, quantised[row : row + piece["rows"], col : col + piece["cols"]])
                for number in scales_at[blocks]:
                    write_piece(flats, scales[number], factors)


def _by_blocks(boxes: Array) -> dict[Box, list[int]]:
    """Returns the numbers of equal boxes of blocks, by box."""
    found: dict[Box, list[int]] = defaultdict(list)
    for number, box in enumerate(boxes):
        found[_box(box)].append(number)
    return found


def _elements(blocks: Box, plain: Layout) -> Box:
    """Returns the box of elements in blocks of a tensor. It ends at the tensor's end."""
    num_rows, num_cols = plain.tensors.matrix_shapes[blocks.tensor].tolist()
    row, col = blocks.row * BLOCK, blocks.col * BLOCK
    rows, cols = blocks.rows * BLOCK, blocks.cols * BLOCK
    return Box(blocks.tensor, row, col, min(rows, num_rows - row), min(cols, num_cols - col))


def _box(piece: Any) -> Box:
    return Box(*(int(piece[field]) for field in BOX_FIELDS))
