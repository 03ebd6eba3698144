"""The tokens that end a text, by the files of a checkpoint."""

from pathlib import Path

from rltrain.models.config_file import ConfigReader

GENERATION_CONFIG_FILE = "generation_config.json"


def read_eos(path: Path, config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json is what ends a generation in transformers; config.json only where that says nothing. Both
    name tokens of a vocabulary of `vocab_size`, or CheckpointError is raised."""
    readers = [config]
    if (path / GENERATION_CONFIG_FILE).exists():
        readers.insert(0, ConfigReader(path / GENERATION_CONFIG_FILE, config_key=config.config_key))
    told = [_read_ids(reader, vocab_size) for reader in readers]
    return next((ids for ids in told if ids is not None), ())


def _read_ids(reader: ConfigReader, vocab_size: int) -> tuple[int, ...] | None:
    value = reader.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    return tuple(reader.token("eos_token_id", token, vocab_size) for token in ids)


def check_padding(config: ConfigReader, vocab_size: int) -> None:
    """CheckpointError where the pad token, for whose embedding transformers makes an exception, is none of the
    vocabulary. Some configs say -1 where there is none."""
    if (token := config.values.get("pad_token_id")) is not None:
        config.token("pad_token_id", token, vocab_size, least=-1)
