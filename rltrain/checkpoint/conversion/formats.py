"""Which format a checkpoint has, and opening it."""

from pathlib import Path
from typing import Literal

from rltrain.checkpoint.conversion.megatron_source import MegatronSource
from rltrain.checkpoint.conversion.sources import HfSource, Source
from rltrain.checkpoint.hf_reader import INDEX_FILE, SINGLE_FILE
from rltrain.errors import CheckpointError, named_by
from rltrain.models.architecture import CONFIG_FILE

Format = Literal["hf", "megatron"]
FORMAT_NAMES = {"hf": "Hugging Face (safetensors)", "megatron": "Megatron (torch_dist)"}
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")


def format_of(path: Path, option: str) -> Format:
    """CheckpointError where `path` is no folder of a checkpoint; `option` named it."""
    if any((path / name).exists() for name in MEGATRON_FILES):
        return "megatron"
    if any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE, CONFIG_FILE)):
        return "hf"
    what = "is no checkpoint" if path.is_dir() else "is not a folder"
    raise CheckpointError(
        f"{path} {what}; expected a Hugging Face checkpoint ({CONFIG_FILE} and {SINGLE_FILE} or {INDEX_FILE}) or "
        f"Megatron's ({', '.join(MEGATRON_FILES)}) ({named_by(option)})"
    )


def open_source(path: Path, option: str, *, settings: Path | None = None, compare_tied_head: bool = True) -> Source:
    """The checkpoint at `path`; `settings` is the folder with a foreign Megatron checkpoint's config.json."""
    if format_of(path, option) == "megatron":
        return MegatronSource(path, option, settings)
    return HfSource(path, option, compare_tied_head=compare_tied_head)
