"""Megatron's distributed checkpoints as canonical tensors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rltrain.checkpoint.conversion.sources import TYPES_BY_NAME
from rltrain.checkpoint.hf_reader import Box
from rltrain.checkpoint.megatron.arguments import compare_arguments
from rltrain.checkpoint.megatron.keys import GlobalTensors
from rltrain.checkpoint.megatron.reader import MegatronReader
from rltrain.errors import CheckpointError, named_by, one_of
from rltrain.models import canonical_tensors, read_architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.table import Array

HF_FOLDER = "hf"
"""Holds config.json and the tokenizer, beside the iterations."""


class MegatronSource:
    """A checkpoint of Megatron-LM, of slime, or of the conversion to their format.

    Its model is that of the config.json in `settings`, by default the folder `hf` that conversion makes beside the
    iterations. CheckpointError where there is none, where it disagrees with the arguments that the checkpoint was
    written with, and where tensors, shapes or types are not those of the model.
    """

    def __init__(self, path: Path, option: str, settings: Path | None = None) -> None:
        self.path, self.option = path, option
        self.reader = MegatronReader(path, option)
        self.settings, settings_option = (settings, "--hf-config") if settings else (self._own_settings(), option)
        self.architecture = read_architecture(self.settings, settings_option)
        self._refuse_other_arguments()
        self.tensors = canonical_tensors(self.architecture)
        shapes = {key: shape for key, (shape, _) in self.reader.tensors.items()}
        try:
            self.keys = GlobalTensors.stored_as(self.architecture, shapes)
        except CheckpointError as problem:
            raise self.error(f"{path}: {problem}") from None
        self.dtypes: Sequence[torch.dtype] = [self._dtype_of(tensor) for tensor in range(len(self.tensors.names))]

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what} ({named_by(self.option)})")

    def read(self, box: Box) -> Tensor:
        """[rows, cols]"""
        found = _inside(self.keys.location(box.tensor), box)
        if len(found) == 1:
            return self._read_place(found[0])
        values = torch.empty(box.rows, box.cols, dtype=self.dtypes[box.tensor])
        for place in found:
            row, col = int(place["row"]) - box.row, int(place["col"]) - box.col
            values[row : row + int(place["rows"]), col : col + int(place["cols"])] = self._read_place(place)
        return values

    def _read_place(self, place: np.void) -> Tensor:
        """[rows, cols] of one matrix of a global tensor."""
        chunk = self.keys.chunk_of(place)
        return self.reader.read(chunk.key, chunk.offsets, chunk.shape).reshape(place["rows"], place["cols"])

    def _dtype_of(self, tensor: int) -> torch.dtype:
        key = self.keys.keys[self.keys.location(tensor)[0]["key"]]
        dtype = self.reader.tensors[key][1]
        if dtype not in TYPES_BY_NAME.values():
            raise self.error(f"{self.path}: tensor {key} is of type {dtype}; expected {one_of(dtype, TYPES_BY_NAME)}")
        return dtype

    def _own_settings(self) -> Path:
        for folder in (self.path / HF_FOLDER, self.path.parent / HF_FOLDER):
            if (folder / CONFIG_FILE).is_file():
                return folder
        raise self.error(
            f"{self.path} has no {HF_FOLDER}/{CONFIG_FILE}, so it was written by another program; name the folder of a "
            "Hugging Face checkpoint of the same model with --hf-config"
        )

    def _refuse_other_arguments(self) -> None:
        differing = compare_arguments(self.architecture, self.reader.architecture_arguments)
        if differing:
            values = "; ".join(f"{name} is {found!r}, expected {expected!r}" for name, found, expected in differing)
            raise self.error(
                f"{self.path}: the checkpoint's arguments are not those of the model of {self.settings / CONFIG_FILE}: "
                f"{values}"
            )


def _inside(places: Array, box: Box) -> Array:
    """`places` of one tensor, cut to `box`."""
    cut = places.copy()
    for first, count, at, begin, size in (
        ("row", "rows", "key_row", box.row, box.rows),
        ("col", "cols", "key_col", box.col, box.cols),
    ):
        low = np.maximum(places[first], begin)
        high = np.minimum(places[first] + places[count], begin + size)
        cut[at] += low - places[first]
        cut[first], cut[count] = low, high - low
    return cut[(cut["rows"] > 0) & (cut["cols"] > 0)]
