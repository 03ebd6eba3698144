"""The model of a checkpoint folder, and its features without general support."""

import re
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path

from rltrain.errors import CheckpointError
from rltrain.models.architecture import CONFIG_FILE, Architecture, language_model, read_config
from rltrain.models.canonical import canonical_tensors
from rltrain.models.config_file import ConfigReader
from rltrain.models.registry import FAMILIES
from rltrain.models.rope_scaling import DynamicScaling, LongRopeScaling
from rltrain.models.table import INDEX_FILE, SINGLE_FILE, read_weight_map, stored_names
from rltrain.runtime.json_text import read_json

# The model in config.json, compared with the files of the folder.

LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")
COUNTS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
COUNTS_OF_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
"""Keys with the number of layers for multi-token prediction."""
SMALLEST_ELEMENT_BITS = 4


def read_architecture(path: Path, config_key: str = "model.path", *, sees: bool = False) -> Architecture:
    """Returns the architecture in `path`/config.json, as written by transformers 4 or 5, with the vocabulary's head.

    With `sees` it includes the vision tower. `config_key` names the folder in messages. Raises CheckpointError if the
    file is missing, the model needs an unsupported feature or should see and has no supported tower, or the folder's
    files hold a smaller model.
    """
    architecture = read_config(path, config_key, sees=sees)
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
        raise reader.error(key, f"at most {named}, the number in the folder's files")


def refuse_more_than_stored(reader: ConfigReader, path: Path, architecture: Architecture) -> None:
    """Raises CheckpointError if the folder's files are too small for a model of this size."""
    _, files = _stored(path, reader.config_key)
    _refuse_more_than(_total_bytes(path, files), reader, architecture)


def _stored(path: Path, config_key: str) -> tuple[Collection[str], set[str]]:
    """Returns the names of the tensors in a folder and of their files. Raises CheckpointError if the index is
    invalid."""
    if not (path / SINGLE_FILE).exists() and (path / INDEX_FILE).exists():
        weight_map = read_weight_map(path, config_key)
        return weight_map.keys(), set(weight_map.values())
    return stored_names(path), {SINGLE_FILE}


def _total_bytes(path: Path, files: Iterable[str]) -> int | None:
    """Returns the size of all files, or None if one is missing."""
    try:
        return sum((path / file).stat().st_size for file in files)
    except OSError:
        return None


def _refuse_more_than(stored: int | None, reader: ConfigReader, architecture: Architecture) -> None:
    tensors = canonical_tensors(architecture.value_model())  # no vocabulary head: not all files have one
    sizes = [prod(shape) for shape in tensors.shapes]
    if stored is not None and sum(sizes) * SMALLEST_ELEMENT_BITS > stored * 8:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise CheckpointError(
            f"{reader.file}: its sizes are those of a model of {sum(sizes)} parameters: {tensors.names[largest]} has "
            f"shape {list(tensors.shapes[largest])}, but the folder's files have {stored} bytes; expected the sizes "
            f"of the model in these files ({reader.named})"
        )


# Checkpoints that score texts, in the form of transformers' models for sequence classification.

SUFFIX = "ForSequenceClassification"
DEFAULT_LABELS = 2
"""The default number of labels."""


def require_classifier(path: Path, config_key: str) -> None:
    """Raises CheckpointError if the model in `path` does not produce exactly one score."""
    reader = ConfigReader(path / CONFIG_FILE, config_key=config_key)
    names = reader.values.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SUFFIX) for name in names):
        raise reader.error("architectures", f"a classifier, [..., *{SUFFIX}], since role reward_model scores with it")
    labels = reader.values.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else reader.count("num_labels", default=DEFAULT_LABELS)
    if num_labels != 1:
        raise reader.error("id2label", f"one label (its score is the reward), not {num_labels}")


def padding_token(path: Path, config_key: str) -> int | None:
    """Returns the padding token, or None. transformers scores a text at its last token other than this one."""
    token = ConfigReader(path / CONFIG_FILE, config_key=config_key).values.get("pad_token_id")
    return token if type(token) is int else None


# Layers for multi-token prediction.


def num_predicting(path: Path, family: str) -> int:
    """Returns the number of layers for multi-token prediction in `path`, by its config.json or else by tensor names.
    Returns 0 if the file cannot be read. Other functions report that."""
    row = FAMILIES.get(family)
    if row is None or row.prediction is None:
        return 0
    try:
        settings = read_json(path / CONFIG_FILE)
        settings |= settings.get(row.nested or "", {})
        told = [settings[key] for key in row.prediction.counts if isinstance(settings.get(key), int)]
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
    if told:
        return int(told[0])
    return int(any(name.startswith(row.prediction.prefix) for name in stored_names(path)))


# Features of models beyond standard attention, MLPs and norms, in words.


def local_mechanisms(architecture: Architecture) -> list[str]:
    """Returns the features that can only be trained with Megatron's own layers."""
    found = {
        "sliding windows": architecture.windows is not None,
        "norms after attention and MLPs": architecture.post_norms,
        "rotation of neighbours in heads": architecture.rotates_pairs,
        "norms over all heads": architecture.norms_projections,
        "soft-capped scores or logits": (architecture.attention_softcap, architecture.logits_softcap) != (None, None),
        "attention sinks": architecture.attention_sinks,
        "scaled rotations of a part of heads (YaRN, LongRoPE)": (
            architecture.rotary_dim is not None and architecture.rotation_magnitude != 1
        ),
        "biases in MLPs": architecture.mlp_bias,
        "gated delta nets": architecture.delta is not None,
        "norms with biases": architecture.norm_bias,
        "an activation other than SiLU": architecture.activation != "silu",
        "a vision tower": architecture.vision is not None,
        "rotations by three positions": architecture.mrope is not None,
    }
    return [mechanism for mechanism, is_there in found.items() if is_there]


def positions_of(architecture: Architecture) -> str:
    """Returns the number of positions in words, with the reason if config.json has more."""
    told = f"{architecture.max_positions} positions"
    if isinstance(architecture.rope_scaling, LongRopeScaling):
        told += (
            " (the limit of LongRoPE's short factors: beyond it, the long factors would change the rotation of all "
            "earlier tokens)"
        )
    if isinstance(architecture.rope_scaling, DynamicScaling):
        told += (
            " (max_position_embeddings: beyond it, dynamic RoPE scaling would change the rotation of all earlier "
            "tokens; yarn or linear in rope_scaling would not)"
        )
    return told
