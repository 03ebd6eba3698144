"""What a model's config.json says, where it is at hand."""

from pathlib import Path
from typing import Any

from rltrain.json_text import read_json


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
