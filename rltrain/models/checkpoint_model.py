"""The model of a checkpoint folder: what its config.json says, held against the folder's files."""

import re
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path

from rltrain.errors import CheckpointError
from rltrain.models.architecture import CONFIG_FILE, Architecture, read_config
from rltrain.models.canonical import canonical_tensors
from rltrain.models.config_file import ConfigReader
from rltrain.models.delta_net import language_model
from rltrain.models.stored_names import INDEX_FILE, SINGLE_FILE, read_weight_map, stored_names

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
    names, files = _stored(path, config_key)
    _refuse_more_than_named(reader, "num_hidden_layers", architecture.num_layers, LAYER, names)
    for key in COUNTS_OF_EXPERTS:
        if reader.values.get(key) is not None:
            _refuse_more_than_named(reader, key, architecture.num_experts, EXPERT, names)
            break
    _refuse_more_than(_total_bytes(path, files), reader, architecture)
    return architecture


def _refuse_more_than_named(
    reader: ConfigReader, key: str, count: int, pattern: re.Pattern[str], names: Iterable[str]
) -> None:
    numbers = [int(match[1]) for name in names if (match := pattern.search(name))]
    if numbers and count > (named := max(numbers) + 1):
        raise reader.error(key, f"at most {named}, as many as the folder's files have tensors of")


def refuse_more_than_stored(reader: ConfigReader, path: Path, architecture: Architecture) -> None:
    """Raises CheckpointError where the folder's files are too small for a model of this size."""
    _, files = _stored(path, reader.config_key)
    _refuse_more_than(_total_bytes(path, files), reader, architecture)


def _stored(path: Path, config_key: str) -> tuple[Collection[str], set[str]]:
    """Returns the names of the tensors in a folder, and of their files. CheckpointError for a wrong index."""
    if not (path / SINGLE_FILE).exists() and (path / INDEX_FILE).exists():
        weight_map = read_weight_map(path, config_key)
        return weight_map.keys(), set(weight_map.values())
    return stored_names(path), {SINGLE_FILE}


def _total_bytes(path: Path, files: Iterable[str]) -> int | None:
    """Returns the size of all files; None where not all of them are there."""
    try:
        return sum((path / file).stat().st_size for file in files)
    except OSError:
        return None


def _refuse_more_than(stored: int | None, reader: ConfigReader, architecture: Architecture) -> None:
    tensors = canonical_tensors(architecture.value_model())  # without the vocabulary's head, which not all files have
    sizes = [prod(shape) for shape in tensors.shapes]
    if stored is not None and sum(sizes) * SMALLEST_ELEMENT_BITS > stored * 8:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise CheckpointError(
            f"{reader.file}: its sizes are those of a model of {sum(sizes)} parameters, whose {tensors.names[largest]} "
            f"has shape {list(tensors.shapes[largest])}, but the folder's files have {stored} bytes; expected the "
            f"sizes of the model in these files ({reader.named})"
        )
