"""Reading weights from a Hugging Face checkpoint folder into an engine that holds some of them in FP8."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import Box, HfFolder, check_parameters, write_piece
from rltrain.models.table import Array
from rltrain.reshard.copy_table import quantize_blocks
from rltrain.reshard.fp8_blocks import QuantizedLayouts, touched_blocks
from rltrain.reshard.layout import BOX_FIELDS, Layout
from rltrain.reshard.slices import BLOCK


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
    """Fill `parameters`, those of `layouts.destination.on(rank)`, of which `plain` is the layout without FP8.

    Blocks are measured and quantised whole, on whatever device the parameters are, from values of `dtype`: so every
    rank has what a reshard would bring it from parameters of that type. CheckpointError as load_parameters raises it.
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
    scales_at = _by_blocks(_as_quantised(layouts, scales))
    for file, contents in checkpoint.by_file(plain, values):
        with checkpoint.open(file) as opened:
            in_fp8 = layouts.which[contents["tensor"]]
            for piece in contents[~in_fp8]:
                write_piece(flats, piece, checkpoint.read_box(opened, file, plain.tensors, _box(piece)))
            for blocks, pieces in _of_equal_blocks(contents[in_fp8]):
                whole = _elements(blocks, plain)
                read = checkpoint.read_box(opened, file, plain.tensors, whole)
                quantised, factors = quantize_blocks(read.to(flats[pieces[0]["parameter"]].device, dtype))
                for piece in pieces:
                    row, col = int(piece["row"]) - whole.row, int(piece["col"]) - whole.col
                    write_piece(flats, piece, quantised[row : row + piece["rows"], col : col + piece["cols"]])
                for number in scales_at[blocks]:
                    write_piece(flats, scales[number], factors)


def _as_quantised(layouts: QuantizedLayouts, scales: Array) -> Array:
    """Pieces of scales under the numbers of the tensors that they are of."""
    tensor_of = np.flatnonzero(layouts.which)
    found = scales.copy()
    found["tensor"] = tensor_of[scales["tensor"] - layouts.num_tensors]
    return found


def _by_blocks(boxes: Array) -> dict[Box, list[int]]:
    """Numbers of boxes of blocks, by what they are."""
    found: dict[Box, list[int]] = defaultdict(list)
    for number, box in enumerate(boxes):
        found[_box(box)].append(number)
    return found


def _of_equal_blocks(pieces: Array) -> Iterator[tuple[Box, Array]]:
    """(blocks that pieces touch, in rows and columns of blocks; the pieces that touch just those)."""
    for blocks, numbers in _by_blocks(touched_blocks(pieces)).items():
        yield blocks, pieces[numbers]


def _elements(blocks: Box, plain: Layout) -> Box:
    """What lies in blocks of a tensor, as far as it reaches."""
    num_rows, num_cols = plain.tensors.matrix_shapes[blocks.tensor].tolist()
    row, col = blocks.row * BLOCK, blocks.col * BLOCK
    rows, cols = blocks.rows * BLOCK, blocks.cols * BLOCK
    return Box(blocks.tensor, row, col, min(rows, num_rows - row), min(cols, num_cols - col))


def _box(piece: Any) -> Box:
    return Box(*(int(piece[field]) for field in BOX_FIELDS))
