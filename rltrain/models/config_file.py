"""Typed access to a checkpoint's config.json."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rltrain.errors import CheckpointError, named_by
from rltrain.runtime.json_text import parse_json

Value = TypeVar("Value", int, float, bool)

EXPECTED = {bool: "true or false", int: "an integer", float: "a number"}
LARGEST = {
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "hidden_size": 2**18,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
}
"""Limits of counts. Published models are far below them. Tensors of larger sizes would not fit into any memory."""
LARGEST_COUNT = 2**20
"""The limit of all other counts."""
LARGEST_WHOLE_FLOAT = 2**53
SHOWN_CHARS = 200


class ConfigReader:
    """A typed reader of one JSON object. Every error names the file, the key, the value and the expected value."""

    def __init__(
        self, file: Path, values: Mapping[str, Any] | None = None, *, prefix: str = "", config_key: str = "model.path"
    ) -> None:
        self.file, self.prefix, self.config_key = file, prefix, config_key
        self.values = read_object(file, config_key) if values is None else values

    def inside(self, key: str, values: Mapping[str, Any]) -> "ConfigReader":
        """Returns a reader of the object `values` under `key`."""
        return ConfigReader(self.file, values, prefix=f"{self.prefix}{key}.", config_key=self.config_key)

    @property
    def named(self) -> str:
        """The config key of the folder, for messages."""
        return named_by(self.config_key)

    def error(self, key: str, expected: str) -> CheckpointError:
        found = _shown(self.values[key]) if key in self.values else "absent"
        return CheckpointError(f"{self.file}: {self.prefix}{key} is {found}; expected {expected} ({self.named})")

    def take(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value: object = self.values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int and abs(value) <= LARGEST_WHOLE_FLOAT:
            value = float(value)
        if not isinstance(value, kind) or type(value) is not kind:  # True is an int to isinstance
            raise self.error(key, EXPECTED[kind])
        if kind is float and not math.isfinite(value):
            raise self.error(key, "a finite number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < 1:
            raise self.error(key, "at least 1")
        if value > (most := LARGEST.get(key, LARGEST_COUNT)):
            raise self.error(key, f"at most {most}")
        return value

    def are_all(self, key: str, allowed: Collection[object], count: int | None = None) -> bool:
        """Returns whether the value of `key` is a list with elements from `allowed` only, of length `count` if
        given."""
        values = self.values.get(key)
        return (
            isinstance(values, list)
            and count in (None, len(values))
            and all(isinstance(value, str | int) and value in allowed for value in values)
        )

    def token(self, key: str, value: object, vocab_size: int, *, least: int = 0) -> int:
        """Returns `value` as a token id of the vocabulary. `key` is for messages."""
        if type(value) is not int:
            raise self.error(key, "an integer or a list of integers")
        if not least <= value < vocab_size:
            raise self.error(key, f"from {least} to {vocab_size - 1}, as vocab_size is {vocab_size}")
        return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def read_object(file: Path, config_key: str) -> dict[str, Any]:
    """Returns the JSON object in a checkpoint's file. Raises CheckpointError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; expected the folder of a Hugging Face checkpoint ({named_by(config_key)})"
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{file} cannot be read as JSON: {problem} ({named_by(config_key)})") from None
    return parse_object(text, file, config_key)


def parse_object(text: str, file: Path, config_key: str = "model.path") -> dict[str, Any]:
    """Returns the JSON object in the text of a checkpoint's file. Raises CheckpointError if there is none."""
    try:
        values = parse_json(text)
    except ValueError as problem:
        raise CheckpointError(f"{file} cannot be read as JSON: {problem} ({named_by(config_key)})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}; expected a JSON object ({named_by(config_key)})")
    return values
