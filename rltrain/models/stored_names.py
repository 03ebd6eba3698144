"""What a checkpoint's files call its tensors, where that is not told by its config.json."""

import json
from collections.abc import Collection
from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""At the beginning of a safetensors file: how long the JSON object is that follows."""


def stored_names(folder: Path) -> Collection[str]:
    """Of the tensors in a folder of Hugging Face's format; none where it has no files of them, or damaged ones, which
    whoever reads them tells of."""
    try:
        if (folder / SINGLE).exists():
            with (folder / SINGLE).open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                return json.loads(file.read(length)).keys() - {"__metadata__"}
        return json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError):
        return ()
