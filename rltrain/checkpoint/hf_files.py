"""The files of a Hugging Face checkpoint folder, and the layers in it that predict further tokens."""

import json
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rltrain.checkpoint.hf_reader import HfFolder, further_layers
from rltrain.checkpoint.safetensors_file import TYPE_NAMES, SafetensorsFile, TensorEntry
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.config_file import parse_object
from rltrain.models.table import INDEX_FILE, SINGLE_FILE, ElementType
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout

# What a Hugging Face checkpoint folder consists of: files of tensors, their index, and the files beside them.

METADATA = {"format": "pt", "written_by": "rltrain"}
CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
INDEX_SUFFIX = ".index.json"
"""Of files that describe tensors, in one format or another."""


@dataclass(frozen=True)
class HfFile:
    """A file of tensors and the rank that writes it."""

    name: str
    writer: int
    entries: tuple[TensorEntry, ...]


def planned_files(layout: Layout, max_file_bytes: int, further: Sequence[TensorEntry] = ()) -> list[HfFile]:
    """All files of a checkpoint whose tensors lie as in `layout`, a result of hf_layout, and those of `further`
    tensors, which its ranks write in turn; the same on every rank.

    A file is larger than `max_file_bytes` only where one tensor is.
    """
    dtypes = {name: DTYPES[ElementType(layout.types[number])] for name, number in layout.tensors.numbers.items()}
    contents: list[tuple[int, list[TensorEntry]]] = []
    for rank in layout.ranks:
        mine = [TensorEntry(name, dtypes[name], shape) for name, shape in layout.on(rank).parameters]
        contents += [(rank, entries) for entries in _in_files(mine, max_file_bytes)]
    contents += zip(cycle(layout.ranks), _in_files(further, max_file_bytes), strict=False)
    if len(contents) == 1:
        return [HfFile(SINGLE_FILE, contents[0][0], tuple(contents[0][1]))]
    return [
        HfFile(f"model-{number:05d}-of-{len(contents):05d}.safetensors", rank, tuple(entries))
        for number, (rank, entries) in enumerate(contents, start=1)
    ]


def _in_files(entries: Iterable[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """The entries of one file after the other, in their order."""
    files, filled = list[list[TensorEntry]](), max_bytes
    for entry in entries:
        if filled + entry.bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.bytes
    return files


def write_index(folder: Path, files: Sequence[HfFile]) -> None:
    """The index that says which file holds a tensor; a single file needs none."""
    if len(files) == 1:
        return
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total_bytes = sum(entry.bytes for file in files for entry in file.entries)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


FURTHER_TEMPLATES = "additional_chat_templates"
"""The folder in which transformers keeps chat templates beside the default one."""


def write_config(like: Path, folder: Path, dtype: str, changes: Mapping[str, Any] | None = None) -> None:
    """The config.json of the folder `like` for tensors of `dtype`, with `changes`; a copy if nothing changes."""
    text = (like / CONFIG_FILE).read_text(encoding="utf-8")
    config = parse_object(text, like / CONFIG_FILE)
    wanted = {**config, **(changes or {}), "torch_dtype" if "torch_dtype" in config else "dtype": dtype}
    if wanted == config:
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    else:
        _write_json(folder / CONFIG_FILE, wanted)


def carried_files(folder: Path) -> list[str]:
    """Returns the names of what goes with a checkpoint's tensors beside config.json: tokenizer, generation config, own
    code, and the folder of further chat templates."""
    templates = [FURTHER_TEMPLATES] if (folder / FURTHER_TEMPLATES).is_dir() else []
    return templates + sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file()
        and path.suffix in CARRIED_SUFFIXES
        and path.name != CONFIG_FILE
        and not path.name.endswith(INDEX_SUFFIX)
    )


def copy_carried_files(like: Path, folder: Path) -> None:
    """Copy into `folder` what goes with the tensors of the checkpoint folder `like`, except config.json."""
    for name in carried_files(like):
        if name != FURTHER_TEMPLATES:
            shutil.copyfile(like / name, folder / name)
            continue
        (folder / name).mkdir(exist_ok=True)
        for template in sorted((like / name).glob("*.jinja")):
            shutil.copyfile(template, folder / name / template.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Layers that predict further tokens ahead (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).
#
# Where none is trained (model.mtp) what is saved or converted carries them along as they are. So it is with what
# encodes pictures beside some language models.

PREDICTION_FILE = "prediction_layers.safetensors"
"""Where a folder has them that holds no other tensors: that beside a checkpoint in another format."""
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class StoredPredictionLayers:
    """Those of the checkpoint folder `folder`, as it holds them: those that its config.json tells of, or none. Without
    the tensors `trained`, which the model has itself."""

    def __init__(self, folder: Path, config_key: str = "model.path", trained: Container[str] = ()) -> None:
        self._folder = folder
        self._file_of = {name: file for name, file in _files(folder, config_key).items() if name not in trained}
        self.entries = tuple(self._entry(name) for name in sorted(self._file_of))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        with safe_open(self._folder / self._file_of[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def write_into(self, folder: Path) -> None:
        """Into a file of their own, where there are any."""
        if self.entries:
            with SafetensorsFile(folder / PREDICTION_FILE, self.entries, {"format": "pt"}) as opened:
                for entry in opened.entries:
                    opened.append(entry.name, self.read(entry.name))

    def _entry(self, name: str) -> TensorEntry:
        with safe_open(self._folder / self._file_of[name], framework="pt") as opened:
            stored = opened.get_slice(name)
            return TensorEntry(name, TYPES[stored.get_dtype()], tuple(stored.get_shape()))


def _files(folder: Path, config_key: str) -> dict[str, str]:
    prefixes = further_layers(folder)
    if not prefixes:
        return {}
    file_of: dict[str, str] = {}
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        file_of = HfFolder(folder, config_key).file_of
    elif (folder / PREDICTION_FILE).exists():
        with safe_open(folder / PREDICTION_FILE, framework="pt") as opened:
            file_of = dict.fromkeys(opened.keys(), PREDICTION_FILE)
    return {name: file for name, file in file_of.items() if name.startswith(prefixes)}
