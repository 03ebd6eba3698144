"""Checkpoints as canonical tensors, whatever their format: what conversions read and comparisons compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import VALUE_HEAD, Box, HfFolder
from rltrain.checkpoint.safetensors_file import WEIGHT_TYPE_NAMES
from rltrain.errors import listed, one_of
from rltrain.models import Architecture, canonical_tensors, read_architecture
from rltrain.models.table import CanonicalTensors

TYPES_BY_NAME = {name: dtype for dtype, name in WEIGHT_TYPE_NAMES.items()}


class Source(Protocol):
    """A checkpoint whose headers were found to have exactly the tensors of its architecture, in their shapes."""

    path: Path
    settings: Path
    """The folder with config.json and the tokenizer."""
    option: str
    """What names the checkpoint on the command line."""
    architecture: Architecture
    tensors: CanonicalTensors
    dtypes: Sequence[torch.dtype]
    """[tensors]"""

    def read(self, box: Box) -> Tensor:
        """[rows, cols]; only these elements are read, and the result may be a view of the mapped file."""


class HfSource:
    """A Hugging Face checkpoint folder.

    CheckpointError where a file is missing or damaged, and where names, shapes or types are not those of config.json's
    model. `compare_tied_head` also reads a vocabulary's head that stands beside tied embeddings.
    """

    def __init__(self, path: Path, option: str, *, compare_tied_head: bool = True) -> None:
        self.path: Path = path
        self.settings: Path = path
        self.option: str = option
        self.architecture = read_architecture(path, option)
        self.tensors = canonical_tensors(self.architecture)
        self.folder = HfFolder(path, option)
        self._refuse_value_head()
        self.folder.refuse_unused(self.tensors, compare_tied_head=compare_tied_head)
        self._refuse_missing()
        self._files = {file: self._open(file) for file in sorted(set(self.folder.file_of.values()))}
        self.dtypes: Sequence[torch.dtype] = [
            self._dtype_of(*tensor) for tensor in zip(self.tensors.names, self.tensors.shapes, strict=True)
        ]

    def read(self, box: Box) -> Tensor:
        file = self.folder.file_of[self.tensors.names[box.tensor]]
        return self.folder.read_box(self._files[file], file, self.tensors, box)

    def _refuse_value_head(self) -> None:
        if VALUE_HEAD in self.folder.file_of:
            raise self.folder.error(
                f"{self.path} holds {VALUE_HEAD}, the head of a value model (a critic); expected a language model: no "
                "other has a form in both formats"
            )

    def _refuse_missing(self) -> None:
        if missing := [name for name in self.tensors.names if name not in self.folder.file_of]:
            raise self.folder.error(
                f"{self.path} lacks {len(missing)} tensors that the model of its config.json has: {listed(missing, 8)}"
            )

    def _open(self, file: str) -> Any:
        """A file that stays open and mapped; what the index does not say of its contents is refused."""
        opened = self.folder.open(file)
        unlisted = sorted(name for name in opened.keys() if self.folder.file_of.get(name) != file)  # noqa: SIM118
        if unlisted:
            raise self.folder.error(
                f"{self.path / file} holds {len(unlisted)} tensors that the index does not place there: "
                f"{listed(unlisted, 8)}"
            )
        return opened

    def _dtype_of(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        file = self.folder.file_of[name]
        stored = self.folder.stored_tensor(self._files[file], file, name, shape)
        if stored.get_dtype() not in TYPES_BY_NAME:
            raise self.folder.error(
                f"{self.path / file}: tensor {name} is of type {stored.get_dtype()}; expected "
                f"{one_of(stored.get_dtype(), TYPES_BY_NAME)}"
            )
        return TYPES_BY_NAME[stored.get_dtype()]


def num_bytes(source: Source) -> int:
    """Of all its tensors, without what a format adds."""
    elements = source.tensors.matrix_shapes.prod(axis=1).tolist()
    return sum(count * dtype.itemsize for count, dtype in zip(elements, source.dtypes, strict=True))
