"""Records of samples for people: one JSON object per line, appended while the run goes on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.errors import cannot_write


class SampleLog:
    """A file of <output_dir>, made with its folder at the first record. ConfigError where it cannot be written."""

    def __init__(self, output_dir: str, name: str) -> None:
        self.name, self.path = name, Path(output_dir, name)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, *records: Mapping[str, Any]) -> None:
        """On disk when this returns."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
        except OSError as error:
            raise cannot_write(self.path, error) from error
