"""The files of a Hugging Face checkpoint folder, and its layers for predicting further tokens."""

import json
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rltrain.checkpoint.hf_reader import HfFolder, further_layers, turned
from rltrain.checkpoint.safetensors_file import TYPE_NAMES, SafetensorsFile, TensorEntry
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.config_file import parse_object
from rltrain.models.table import INDEX_FILE, SINGLE_FILE, CanonicalTensors, ElementType
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout

# A Hugging Face checkpoint folder: files of tensors, their index, and further files.

METADATA = {"format": "pt", "written_by": "rltrain"}
CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
INDEX_SUFFIX = ".index.json"
"""The end of the names of files describing tensors, in any format."""


@dataclass(frozen=True)
class HfFile:
    """A file of tensors and its writer, a rank."""

    name: str
    writer: int
    entries: tuple[TensorEntry, ...]


def planned_files(
    layout: Layout, max_file_bytes: int, further: Sequence[TensorEntry] = (), *, turns: bool = True
) -> list[HfFile]:
    """Returns all files of a checkpoint with the tensors of `layout`, a result of hf_layout. Ranks take turns in
    writing the `further` tensors. The result is the same on every rank.

    A file is larger than `max_file_bytes` only if one tensor is. With `turns` the matrices of CanonicalTensors.turnable
    are transposed, as in published files.
    """
    turning = {layout.tensors.names[number] for number in layout.tensors.turnable} if turns else set[str]()
    dtypes = {name: DTYPES[ElementType(layout.types[number])] for name, number in layout.tensors.numbers.items()}
    contents: list[tuple[int, list[TensorEntry]]] = []
    for rank in layout.ranks:
        mine = [
            TensorEntry(name, dtypes[name], turned(shape) if name in turning else shape, turns=name in turning)
            for name, shape in layout.on(rank).parameters
        ]
        contents += [(rank, entries) for entries in _in_files(mine, max_file_bytes)]
    contents += zip(cycle(layout.ranks), _in_files(further, max_file_bytes), strict=False)
    if len(contents) == 1:
        return [HfFile(SINGLE_FILE, contents[0][0], tuple(contents[0][1]))]
    return [
        HfFile(f"model-{number:05d}-of-{len(contents):05d}.safetensors", rank, tuple(entries))
        for number, (rank, entries) in enumerate(contents, start=1)
    ]


def _in_files(entries: Iterable[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Returns the entries of each file, in their order."""
    files, filled = list[list[TensorEntry]](), max_bytes
    for entry in entries:
        if filled + entry.bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.bytes
    return files


def write_index(folder: Path, files: Sequence[HfFile]) -> None:
    """Writes the index from tensors to files. A single file needs none."""
    if len(files) == 1:
        return
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total_bytes = sum(entry.bytes for file in files for entry in file.entries)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


FURTHER_TEMPLATES = "additional_chat_templates"
"""The folder of further chat templates in transformers."""


def write_config(like: Path, folder: Path, dtype: str, changes: Mapping[str, Any] | None = None) -> None:
    """Writes the config.json of the folder `like` into `folder`, for tensors of `dtype` and with `changes`. If nothing
    changes, it is a copy."""
    text = (like / CONFIG_FILE).read_text(encoding="utf-8")
    config = parse_object(text, like / CONFIG_FILE)
    wanted = {**config, **(changes or {}), "torch_dtype" if "torch_dtype" in config else "dtype": dtype}
    if wanted == config:
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    else:
        _write_json(folder / CONFIG_FILE, wanted)


def carried_files(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's files other than tensors and config.json: tokenizer, generation config, own
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
    """Copies the files named by `carried_files` from the checkpoint folder `like` into `folder`."""
    for name in carried_files(like):
        if name != FURTHER_TEMPLATES:
            shutil.copyfile(like / name, folder / name)
            continue
        (folder / name).mkdir(exist_ok=True)
        for template in sorted((like / name).glob("*.jinja")):
            shutil.copyfile(template, folder / name / template.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Layers for predicting further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).
#
# If they are not trained (model.mtp), saves and conversions copy them unchanged. The encoders of pictures in some
# language models are treated alike.

PREDICTION_FILE = "prediction_layers.safetensors"
"""The file of these layers in a folder without other tensors, beside a checkpoint in another format."""


def turns_experts(folder: Path, tensors: CanonicalTensors) -> bool:
    """Returns whether a copy of the checkpoint `folder` has the matrices of experts transposed. A folder without
    tensors stands for published files. Raises CheckpointError as HfFolder.turns does."""
    has_tensors = (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()
    return HfFolder(folder, "model.path").turns(tensors) if tensors.turnable and has_tensors else True


TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class StoredPredictionLayers:
    """The prediction layers of the checkpoint folder `folder`, as stored there and described by its config.json. There
    may be none. The tensors `trained` are left out, because the model has them itself."""

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
        """Writes the layers into a separate file, if there are any."""
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
