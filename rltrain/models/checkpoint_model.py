"""The model of a checkpoint folder: what its config.json says, held against the folder's files."""

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from rltrain.errors import CheckpointError
from rltrain.models.architecture import CONFIG_FILE, Architecture, read_config
from rltrain.models.canonical import canonical_tensors
from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import language_model
from rltrain.models.stored_names import SINGLE, read_weight_map, stored_names

LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
COUNTS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
COUNTS_OF_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Layers that predict further tokens ahead."""
SMALLEST_ELEMENT_BITS = 4


def read_architecture(path: Path, config_key: str = "model.path") -> Architecture:
    """Returns what `path`/config.json describes, as written by transformers 4 or 5; the head is the vocabulary's.

    `config_key` is the key that names the folder, for messages. CheckpointError where the file is missing, where the
    model needs something that is not supported, and where the folder's files hold a smaller model.
    """
    architecture = read_config(path, config_key)
    reader = language_model(ConfigReader(path / CONFIG_FILE, config_key=config_key))
    for key in COUNTS_OF_FURTHER_LAYERS:
        if reader.values.get(key):
            reader.count(key)
    names = stored_names(path)
    _refuse_more_than_named(reader, "num_hidden_layers", architecture.num_layers, LAYER, names)
    for key in COUNTS_OF_EXPERTS:
        if reader.values.get(key) is not None:
            _refuse_more_than_named(reader, key, architecture.num_experts, EXPERT, names)
            break
    refuse_more_than_stored(reader, path, architecture)
    return architecture


def _refuse_more_than_named(
    reader: ConfigReader, key: str, count: int, pattern: re.Pattern[str], names: Iterable[str]
) -> None:
    numbers = [int(match[1]) for name in names if (match := pattern.search(name))]
    if numbers and count > (named := max(numbers) + 1):
        raise reader.error(key, f"at most {named}, as many as the folder's files have tensors of")


def refuse_more_than_stored(reader: ConfigReader, path: Path, architecture: Architecture) -> None:
    """CheckpointError where a model of this size would not fit into the folder's files, whatever type they are of."""
    tensors = canonical_tensors(architecture.value_model())  # without the vocabulary's head, which not all files have
    sizes = [prod(shape) for shape in tensors.shapes]
    stored = _stored_bytes(path)
    if stored is not None and sum(sizes) * SMALLEST_ELEMENT_BITS > stored * 8:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise CheckpointError(
            f"{reader.file}: its sizes are those of a model of {sum(sizes)} parameters, whose {tensors.names[largest]} "
            f"has shape {list(tensors.shapes[largest])}, but the folder's files have {stored} bytes; expected the "
            f"sizes of the model in these files ({reader.named})"
        )


def _stored_bytes(path: Path) -> int | None:
    """Of all files of tensors; None where not all of them are there."""
    try:
        files = {SINGLE} if (path / SINGLE).exists() else set(read_weight_map(path, "model.path").values())
        return sum((path / file).stat().st_size for file in files)
    except (OSError, CheckpointError):
        return None
