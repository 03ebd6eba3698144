"""Which format a checkpoint has, and opening it."""

from pathlib import Path
from typing import Literal

from rltrain.checkpoint.conversion.megatron_source import MegatronSource
from rltrain.checkpoint.conversion.run_source import RunSource
from rltrain.checkpoint.conversion.sources import HfSource, Source
from rltrain.checkpoint.run.folder import is_of_run, name_of
from rltrain.errors import CheckpointError, named_by
from rltrain.models.architecture import CONFIG_FILE
from rltrain.models.table import INDEX_FILE, SINGLE_FILE

Format = Literal["hf", "megatron", "run"]
FORMAT_NAMES = {
    "hf": "Hugging Face (safetensors)",
    "megatron": "Megatron (torch_dist)",
    "run": "a run of rltrain (its training state)",
}
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json")


def format_of(path: Path, option: str) -> Format:
    """CheckpointError where `path` is no folder of a checkpoint; `option` named it."""
    if any((path / name).exists() for name in MEGATRON_FILES):
        return "megatron"
    if any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE, CONFIG_FILE)):
        return "hf"
    if is_of_run(path):
        return "run"
    what = "is no checkpoint" if path.is_dir() else "is not a folder"
    raise CheckpointError(
        f"{path} {what}; expected a Hugging Face checkpoint ({CONFIG_FILE} and {SINGLE_FILE} or {INDEX_FILE}), "
        f"Megatron's ({', '.join(MEGATRON_FILES)}), or a run's ({name_of(10)}) ({named_by(option)})"
    )


def open_source(path: Path, option: str, *, settings: Path | None = None, compare_tied_head: bool = True) -> Source:
    """The checkpoint at `path`; `settings` is the folder with the config.json of one that has none of its own."""
    found = format_of(path, option)
    if found == "megatron":
        return MegatronSource(path, option, settings)
    if found == "run":
        return RunSource(path, option, settings)
    return HfSource(path, option, compare_tied_head=compare_tied_head)
