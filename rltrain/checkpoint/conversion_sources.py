"""Checkpoints of every format as sources of canonical tensors. The processes of a conversion share them."""

import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from rltrain.checkpoint.hf_reader import VALUE_HEAD, Box, HfFolder
from rltrain.checkpoint.megatron_arguments import compare_arguments
from rltrain.checkpoint.megatron_keys import GlobalTensors
from rltrain.checkpoint.megatron_reader import MegatronReader
from rltrain.checkpoint.run_files import find_damage, read_manifest
from rltrain.checkpoint.run_folder import Resumed, checkpoint_at
from rltrain.checkpoint.safetensors_file import WEIGHT_TYPE_NAMES
from rltrain.checkpoint.saved_state import MASTER, SavedState
from rltrain.config.schema import Config
from rltrain.errors import CheckpointError, listed, named_by, one_of
from rltrain.models import Architecture, canonical_tensors, element_types, read_architecture
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.canonical import adapter_of, matrices_of
from rltrain.models.lora import A, B
from rltrain.models.table import Array, CanonicalTensors, ElementType

# Sources of canonical tensors, for conversions and comparisons.

TYPES_BY_NAME = {name: dtype for dtype, name in WEIGHT_TYPE_NAMES.items()}


class CheckpointSource(Protocol):
    """A checkpoint of any format with exactly the tensors of its architecture, in their shapes. This was checked from
    its headers."""

    path: Path
    settings: Path
    """The folder with config.json and the tokenizer."""
    option: str
    """The command-line option of the checkpoint's path."""
    architecture: Architecture
    tensors: CanonicalTensors
    dtypes: Sequence[torch.dtype]
    """The type of every tensor, shape [tensors]."""

    def read(self, box: Box) -> Tensor:
        """Returns a box [rows, cols] of one tensor. Only these elements are read. The result may be a view of the
        mapped file."""


class HfSource:
    """A Hugging Face checkpoint folder.

    Raises CheckpointError if a file is missing or damaged, or if names, shapes or types differ from the model in
    config.json. With `compare_tied_head`, a vocabulary's head beside tied embeddings is also read and must equal them.
    With `sees` the model includes the vision tower.
    """

    def __init__(self, path: Path, option: str, *, compare_tied_head: bool = True, sees: bool = False) -> None:
        self.path: Path = path
        self.settings: Path = path
        self.option: str = option
        self.architecture = read_architecture(path, option, sees=sees)
        self.tensors = canonical_tensors(self.architecture)
        self.folder = HfFolder(path, option)
        self._refuse_value_head()
        self.folder.refuse_unused(self.tensors, compare_tied_head=compare_tied_head)
        self._refuse_missing()
        self._files = {file: self._open(file) for file in sorted(set(self.folder.file_of.values()))}
        self.dtypes: Sequence[torch.dtype] = [self._dtype_of(number) for number in range(len(self.tensors.names))]

    def read(self, box: Box) -> Tensor:
        file = self.folder.file_of[self.tensors.names[box.tensor]]
        return self.folder.read_box(self._files[file], file, self.tensors, box)

    def _refuse_value_head(self) -> None:
        if VALUE_HEAD in self.folder.file_of:
            raise self.folder.error(
                f"{self.path} holds {VALUE_HEAD}, the head of a value model (a critic); expected a language model. "
                "Only language models have a form in both formats"
            )

    def _refuse_missing(self) -> None:
        if missing := [name for name in self.tensors.names if name not in self.folder.file_of]:
            raise self.folder.error(
                f"{self.path} lacks {len(missing)} tensors that the model of its config.json has: {listed(missing, 8)}"
            )

    def _open(self, file: str) -> Any:
        """Returns a mapped file to be kept open. Raises CheckpointError if the index does not list one of its
        tensors."""
        opened = self.folder.open(file)
        unlisted = sorted(name for name in opened.keys() if self.folder.file_of.get(name) != file)  # noqa: SIM118
        if unlisted:
            raise self.folder.error(
                f"{self.path / file} holds {len(unlisted)} tensors that the index does not place there: "
                f"{listed(unlisted, 8)}"
            )
        return opened

    def _dtype_of(self, number: int) -> torch.dtype:
        name = self.tensors.names[number]
        file = self.folder.file_of[name]
        stored = self.folder.stored_tensor(self._files[file], file, self.tensors, number)
        if stored.get_dtype() not in TYPES_BY_NAME:
            raise self.folder.error(
                f"{self.path / file}: tensor {name} is of type {stored.get_dtype()}; expected "
                f"{one_of(stored.get_dtype(), TYPES_BY_NAME)}"
            )
        return TYPES_BY_NAME[stored.get_dtype()]


def num_bytes(source: CheckpointSource) -> int:
    """Returns the bytes of all tensors, without the overhead of a format."""
    elements = source.tensors.matrix_shapes.prod(axis=1).tolist()
    return sum(count * dtype.itemsize for count, dtype in zip(elements, source.dtypes, strict=True))


# Megatron's distributed checkpoints.

HF_FOLDER = "hf"
"""The folder of config.json and the tokenizer, beside the iterations."""


class MegatronSource:
    """A checkpoint of Megatron-LM, of slime, or of the conversion to their format.

    Its model is described by the config.json in `settings`. By default this is the folder `hf` beside the iterations,
    made by a conversion. Raises CheckpointError if there is none, or if it disagrees with the arguments in the
    checkpoint. Raises it also if tensors, shapes or types differ from the model's.
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
        """Returns a box [rows, cols] of one tensor."""
        found = _inside(self.keys.location(box.tensor), box)
        if len(found) == 1:
            return self._read_place(found[0])
        values = torch.empty(box.rows, box.cols, dtype=self.dtypes[box.tensor])
        for place in found:
            row, col = int(place["row"]) - box.row, int(place["col"]) - box.col
            values[row : row + int(place["rows"]), col : col + int(place["cols"])] = self._read_place(place)
        return values

    def _read_place(self, place: np.void) -> Tensor:
        """Returns [rows, cols] of one matrix of a global tensor."""
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
            f"{self.path} has no {HF_FOLDER}/{CONFIG_FILE}, so it was written by another program. Name the folder of a "
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
    """Returns the parts of `places` inside `box`. All `places` are of one tensor."""
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


# The processes of one conversion. They are torchrun's and meet in its store, or there is only one.

JOIN_TIMEOUT = timedelta(minutes=10)
POLL_S = 0.02


class Processes:
    """This process and its number among the processes of a conversion. They only exchange bytes, so no process group is
    made."""

    def __init__(self, rank: int = 0, count: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._meetings = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def meet(self) -> None:
        """Waits for all other processes without a limit. If one fails, torchrun ends the others.

        Collective over: all processes. Calls of `meet` and `gather` must be in the same order on each.
        """
        self.gather(b"")

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the `value` of every process, by rank."""
        if self._store is None:
            return [value]
        self._meetings += 1
        keys = [f"meeting {self._meetings} of {rank}" for rank in range(self.count)]
        self._store.set(keys[self.rank], value.hex())
        while not self._store.check(keys):  # the store's own wait would ignore signals
            time.sleep(POLL_S)
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def add(self, counter: str, amount: int) -> int:
        """Adds to a counter shared by all processes. Returns its new value."""
        return amount if self._store is None else int(self._store.add(counter, amount))


def join_processes() -> Processes:
    """Returns the processes of torchrun, found in the environment, or a single process without torchrun."""
    if "RANK" not in os.environ:
        return Processes()
    store, rank, count = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
    return Processes(rank, count, dist.PrefixStore("convert_checkpoint", store))


# The type of a conversion's tensors.

CHOICES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def target_type(source: CheckpointSource, chosen: str | None) -> str:
    """Returns `chosen`, or the common type of the source's tensors. Tensors in fp32 in every model of the family are
    ignored.

    Raises CheckpointError if their types differ.
    """
    if chosen is not None:
        return chosen
    marked = element_types(source.architecture, "bfloat16")
    first: dict[torch.dtype, str] = {}
    for tensor in np.flatnonzero(marked != ElementType.FLOAT32).tolist():
        first.setdefault(source.dtypes[tensor], source.tensors.names[tensor])
    if len(first) > 1:
        found = ", ".join(f"{type_name(dtype)} ({name})" for dtype, name in first.items())
        raise CheckpointError(
            f"{source.path} has tensors of several types: {found}; expected one: choose the type to convert to with "
            f"--dtype ({named_by(source.option)})"
        )
    return type_name(next(iter(first)))


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The actor's weights in a run's checkpoint.

ROLE = "actor"


class RunSource:
    """The actor's weights in a run's checkpoint. They have the type of training, as in engines and exports, and are
    rounded once from the master weights. Low-rank adapters are merged into their base checkpoint.

    `path` is the checkpoint's folder, or a folder of checkpoints with the newest one to be taken. `settings` is the
    folder with config.json and the tokenizer. By default it is the folder of the model at the beginning of the run.
    Processes can share the comparison of checksums: `share` (i, n) compares every n-th file from number i on. Raises
    CheckpointError if files are missing, damaged or of another model.
    """

    def __init__(
        self, path: Path, option: str, settings: Path | None = None, *, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.path, self.option = path, option
        self.checkpoint = checkpoint_at(path, option)
        _refuse_damage(self.checkpoint, option, *share)
        config = _config_of(self.checkpoint, option)
        self.settings, named = (settings, "--hf-config") if settings else (_began_with(config, option), option)
        lora, vision = config.model.lora, config.model.vision
        trains_tower = vision is not None and (lora.vision if lora else vision.train)
        self.architecture = read_architecture(self.settings, named, sees=trains_tower)
        if config.model.mtp:
            self.architecture = self.architecture.predicting()
        self.tensors = canonical_tensors(self.architecture)
        in_fp32 = element_types(self.architecture, config.model.dtype) == ElementType.FLOAT32
        trained_in = CHOICES[config.model.dtype]
        self.dtypes: Sequence[torch.dtype] = [torch.float32 if always else trained_in for always in in_fp32.tolist()]
        trained = self.architecture
        if lora:
            trained = trained.adapted(lora.rank, lora.targets, vision=lora.vision)
        self._base = HfSource(self.settings, named, sees=trains_tower) if lora else None
        self._scale = lora.scale if lora else 1.0
        self._saved = SavedState(self.checkpoint.files(ROLE), canonical_tensors(trained), option)

    def read(self, box: Box) -> Tensor:
        if self._base is None:
            values = self._saved.read_box(MASTER, box)
        else:
            values = self._merged(self._base.read(box).float(), box)
        return values.to(self.dtypes[box.tensor])

    def _merged(self, weight: Tensor, box: Box) -> Tensor:
        """Returns `weight` plus the product of the tensor's adapter in the box, if there is one."""
        adapters, merged = self._saved.tensors, []
        matrices = matrices_of(self.tensors.names[box.tensor], self.tensors.shapes[box.tensor], box.row, box.rows)
        parts = torch.split(weight, [rows for _, _, rows in matrices])
        for (matrix, row, rows), part in zip(matrices, parts, strict=True):
            name = adapter_of(matrix, self.architecture)
            if name + A not in adapters.numbers:
                merged.append(part)
                continue
            a, b = adapters.numbers[name + A], adapters.numbers[name + B]
            rank, _ = adapters.shapes[a]
            left = self._saved.read_box(MASTER, Box(b, row, 0, rows, rank))
            right = self._saved.read_box(MASTER, Box(a, 0, box.col, rank, box.cols))
            merged.append(torch.addmm(part, left, right, alpha=self._scale))
        return torch.cat(merged)


def _refuse_damage(checkpoint: Resumed, option: str, first: int, step: int) -> None:
    manifest = read_manifest(checkpoint.folder)
    names = sorted(name for name in manifest if name.startswith(f"{ROLE}/"))[first::step]
    if damage := find_damage(checkpoint.folder, manifest, names, lambda: None):
        raise CheckpointError(f"{damage} ({named_by(option)})")


def _config_of(checkpoint: Resumed, option: str) -> Config:
    try:
        return Config.model_validate_json(json.dumps(checkpoint.run["config"]))
    except (KeyError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} was saved by another version of rltrain: {error} ({named_by(option)})"
        ) from None


def _began_with(config: Config, option: str) -> Path:
    path = Path(config.checkpoint_of(ROLE)[0])
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"the run began with the model {path}, which has no {CONFIG_FILE} here. Name the folder of a Hugging Face "
            f"checkpoint of that model with --hf-config ({named_by(option)})"
        )
    return path
