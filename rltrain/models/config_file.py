"""Typed access to a checkpoint's config.json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rltrain.errors import CheckpointError, named_by

Value = TypeVar("Value", int, float, bool)

LARGEST = 2**1023  # beyond which integers are no floats
EXPECTED = {bool: "true or false", int: "an integer", float: "a number"}


class ConfigReader:
    """Typed access to one JSON object; every complaint names the file, the key, the value and what was expected."""

    def __init__(
        self, file: Path, values: Mapping[str, Any] | None = None, *, prefix: str = "", config_key: str = "model.path"
    ) -> None:
        self.file, self.prefix, self.config_key = file, prefix, config_key
        self.values = _read_json(file, config_key) if values is None else values

    def inside(self, key: str, values: Mapping[str, Any]) -> "ConfigReader":
        """A reader of the object `values` that stands under `key`."""
        return ConfigReader(self.file, values, prefix=f"{self.prefix}{key}.", config_key=self.config_key)

    def error(self, key: str, expected: str) -> CheckpointError:
        found = json.dumps(self.values[key]) if key in self.values else "absent"
        return CheckpointError(
            f"{self.file}: {self.prefix}{key} is {found}; expected {expected} ({named_by(self.config_key)})"
        )

    def take(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value: object = self.values.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < LARGEST else math.inf
        if not isinstance(value, kind) or type(value) is not kind:  # True is an int to isinstance
            raise self.error(key, EXPECTED[kind])
        if kind is float and not math.isfinite(value):
            raise self.error(key, "a finite number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int, default)
        if value < 1:
            raise self.error(key, "at least 1")
        return value


def _read_json(file: Path, config_key: str) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; expected the folder of a Hugging Face checkpoint ({named_by(config_key)})"
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{file} cannot be read as JSON: {problem} ({named_by(config_key)})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}; expected a JSON object ({named_by(config_key)})")
    return values
