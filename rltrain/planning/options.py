"""Options of a dry run, and shapes of models that are not on this machine."""

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

# What the command line asks of a dry run.


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


# Whether a job that nobody has asked for could be asked for.


def is_legal(job: PlannedJob) -> bool:
    """Whether nothing would refuse it."""
    try:
        check_config(job.config)
        check_schedule(job.config, job.placement, job.grids)
        check_against_architecture(job.config, job.grids, job.architectures)
    except UserError:
        return False
    return True


# The shapes of models that are not on this machine yet, for a dry run: rltrain ships those that its configs name.

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
