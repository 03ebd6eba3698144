"""What a model's config.json says, where it is at hand."""

from pathlib import Path
from typing import Any

from rltrain.runtime.json_text import read_json

SHAPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
"""Keys of config.json that frameworks let a run override."""


def model_config(path: object) -> dict[str, Any]:
    """Empty where there is no such file."""
    try:
        found = read_json(Path(str(path), "config.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_latent_attention(path: object) -> bool:
    return "kv_lora_rank" in model_config(path)


def language_model(path: object) -> dict[str, Any]:
    """As `model_config`, of models that encode pictures too what it says of the language model."""
    config = model_config(path)
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def has_delta_nets(path: object) -> bool:
    return "linear_num_key_heads" in language_model(path)


def overridden_key(key: str) -> tuple[str, ...] | None:
    """The path in config.json that a key of a source overrides; None where it overrides none."""
    parts = key.split(".")
    first = next((number for number, part in enumerate(parts) if part in SHAPE_KEYS), None)
    return None if first is None else tuple(parts[first:])


def says(path: object, overridden: tuple[str, ...], value: Any) -> bool:
    """Whether the config.json of the model in `path` has that value already, by transformers 4's or 5's names."""
    config = language_model(path)
    first, *rest = overridden
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found: Any = rope if first in ("rope_scaling", "rope_parameters") else config.get(first, rope.get(first))
    for part in rest:
        found = found.get(part) if isinstance(found, dict) else None
    return bool(found == value)
