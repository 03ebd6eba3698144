"""What a checkpoint's files call its tensors, where that is not told by its config.json."""

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from rltrain.errors import CheckpointError, named_by
from rltrain.runtime.json_text import parse_json, read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""At the beginning of a safetensors file: how long the JSON object is that follows."""
MOST_HEADER_BYTES = 100_000_000
"""The safetensors library reads no longer header either."""


def stored_names(folder: Path) -> Collection[str]:
    """Of the tensors in a folder of Hugging Face's format; none where it has no files of them, or damaged ones, which
    whoever reads them tells of."""
    try:
        if (folder / SINGLE_FILE).exists():
            with (folder / SINGLE_FILE).open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                if length > MOST_HEADER_BYTES:
                    return ()
                return parse_json(file.read(length)).keys() - {"__metadata__"}
        return read_weight_map(folder, "model.path").keys() if (folder / INDEX_FILE).exists() else ()
    except (OSError, ValueError, TypeError, AttributeError, CheckpointError):
        return ()


def read_weight_map(folder: Path, config_key: str) -> dict[str, str]:
    """Returns the file of each tensor by the index in `folder`. Links are followed, as copies of the hub consist of
    them. CheckpointError where the index is none, or names a file outside the folder."""
    index = folder / INDEX_FILE
    try:
        files = read_json(index)["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{index} is not a safetensors index: {problem!r} ({named_by(config_key)})") from None
    for name, file in files:
        if not _is_inside(file):
            raise CheckpointError(
                f"{index}: weight_map has {file!r:.200} for {name!r:.200}; expected the name of a file in that folder "
                f"({named_by(config_key)})"
            )
    return dict(files)


def _is_inside(file: object) -> bool:
    """Whether it is the name of a file in a folder or below it."""
    if not isinstance(file, str) or not file or "\0" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and path != PurePosixPath() and ".." not in path.parts
