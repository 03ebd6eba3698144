"""The tokens that end a text, by the files of a checkpoint."""

from pathlib import Path
from typing import cast

from rltrain.models.config_file import ConfigReader

GENERATION_CONFIG_FILE = "generation_config.json"


def read_eos(path: Path, config: ConfigReader) -> tuple[int, ...]:
    """generation_config.json is what ends a generation in transformers; config.json only where that says nothing."""
    readers = [config]
    if (path / GENERATION_CONFIG_FILE).exists():
        readers.insert(0, ConfigReader(path / GENERATION_CONFIG_FILE, config_key=config.config_key))
    for reader in readers:
        value = reader.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise reader.error("eos_token_id", "an integer or a list of integers")
        return tuple(cast(list[int], ids))
    return ()
