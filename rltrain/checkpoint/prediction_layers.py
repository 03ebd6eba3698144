"""Layers that predict further tokens ahead (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).

Where none is trained (model.mtp) what is saved or converted carries them along as they are. So it is with what encodes
pictures beside some language models.
"""

from collections.abc import Container
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from rltrain.checkpoint.hf_reader import HfFolder, further_layers
from rltrain.checkpoint.safetensors_file import TYPE_NAMES, Entry, SafetensorsFile
from rltrain.models.table import INDEX_FILE, SINGLE_FILE

PREDICTION_FILE = "prediction_layers.safetensors"
"""Where a folder has them that holds no other tensors: that beside a checkpoint in another format."""
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class PredictionLayers:
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

    def _entry(self, name: str) -> Entry:
        with safe_open(self._folder / self._file_of[name], framework="pt") as opened:
            stored = opened.get_slice(name)
            return Entry(name, TYPES[stored.get_dtype()], tuple(stored.get_shape()))


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
