"""The shapes of models that are not on this machine yet, for a dry run: rltrain ships those that its configs name."""

from pathlib import Path

from rltrain.config.schema import Config
from rltrain.data.hub import checkpoint_paths, with_checkpoint_paths

SHIPPED = Path(__file__).parent / "shipped_models"
"""Folders named after models, each with a config.json alone."""


def with_shipped_shapes(config: Config) -> tuple[Config, list[str]]:
    """Returns the config with shipped folders in place of folders that do not exist, and a line for each of them."""
    found = {path: folder for path in checkpoint_paths(config).values() if (folder := shipped_folder(path))}
    lines = [
        f"{key}: {path} does not exist yet; the shape is that of the config.json of {found[path].name} that rltrain has"
        for key, path in checkpoint_paths(config).items()
        if path in found
    ]
    return with_checkpoint_paths(config, {path: str(folder) for path, folder in found.items()}), lines


def shipped_folder(path: str) -> Path | None:
    """Returns the shipped folder that has the last possible part of `path` for its name; None where `path` exists.

    Such is models/Qwen3-0.6B, Qwen/Qwen3-0.6B@main, or what a run of the quickstart writes: runs/quickstart/sft/hf.
    """
    if Path(path).exists():
        return None
    shipped = {folder.name: folder for folder in SHIPPED.iterdir()}
    parts = reversed(Path(path.partition("@")[0]).parts)
    return next((shipped[part] for part in parts if part in shipped), None)
