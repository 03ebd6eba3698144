"""Options of a dry run, and config.json files of models that are not on this machine."""

from dataclasses import dataclass
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.data.hub import checkpoint_paths, with_checkpoint_paths
from rltrain.errors import UserError
from rltrain.planning.hardware import DEFAULT_GPU
from rltrain.planning.planned import PlannedJob
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.planning.validation_schedule import check_schedule

# Command-line options of a dry run.


@dataclass(frozen=True)
class DryRunOptions:
    """`gpu` is a name of `rltrain.planning.hardware.GPUS` or a YAML file. `calibrate` is the output_dir of a run."""

    world_size: int = 1
    ranks_per_node: int = 8
    gpu: str = DEFAULT_GPU
    every_rank: bool = False
    search: bool = False
    calibrate: Path | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None


# Checks of configs proposed by a search.


def is_legal(job: PlannedJob) -> bool:
    """Returns whether every check accepts the job."""
    try:
        check_config(job.config)
        check_schedule(job.config, job.placement, job.grids)
        check_against_architecture(job.config, job.grids, job.architectures)
    except UserError:
        return False
    return True


# Shapes of models missing on this machine, for a dry run. rltrain ships the models of its configs.

SHIPPED = Path(__file__).parent / "shipped_models"
"""Folders named after models, each with only a config.json."""


def with_shipped_shapes(config: Config) -> tuple[Config, list[str]]:
    """Returns the config with shipped folders in place of folders that do not exist, and a line for each of them."""
    found = {path: folder for path in checkpoint_paths(config).values() if (folder := shipped_folder(path))}
    lines = [
        f"{key}: {path} does not exist yet; its shape is the one in rltrain's config.json of {found[path].name}"
        for key, path in checkpoint_paths(config).items()
        if path in found
    ]
    return with_checkpoint_paths(config, {path: str(folder) for path, folder in found.items()}), lines


def shipped_folder(path: str) -> Path | None:
    """Returns the shipped folder named like the last matching part of `path`. None if `path` exists or nothing matches.

    Examples: models/Qwen3-0.6B, Qwen/Qwen3-0.6B@main, or an output of the quickstart such as runs/quickstart/sft/hf.
    """
    if Path(path).exists():
        return None
    shipped = {folder.name: folder for folder in SHIPPED.iterdir()}
    parts = reversed(Path(path.partition("@")[0]).parts)
    return next((shipped[part] for part in parts if part in shipped), None)
