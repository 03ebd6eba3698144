"""The command `evaluate`. It turns a config for training into one for evaluation."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltrain.cli.train import begin_as_rank, check_job
from rltrain.config.explain import section_of
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import UserError
from rltrain.observability.run_logs import EXPORTS
from rltrain.tasks.roles import rewarding_roles

# The commands launch/evaluate.py and `rltrain evaluate`.


def run(arguments: argparse.Namespace) -> int:
    """Runs the evaluation on this rank. Returns the exit status: 0 for success, 2 for a mistake of the user, 1 for
    anything else."""
    if "RANK" not in os.environ:
        raise UserError("start this script with torchrun --nproc-per-node N")
    begin_as_rank()
    overrides = _overrides(arguments)
    from rltrain.trainer import run_job

    return run_job(arguments.config, overrides)


def check(arguments: argparse.Namespace, worlds: Sequence[tuple[int, int]]) -> None:
    """Checks the arguments of `run` before any rank is started. Raises UserError if all `worlds` would be refused."""
    check_job(arguments.config, _overrides(arguments), worlds)


def _overrides(arguments: argparse.Namespace) -> list[str]:
    return evaluation_overrides(
        arguments.config, arguments.overrides, checkpoint=arguments.checkpoint, output=arguments.output
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = "Evaluates a Hugging Face checkpoint on data.eval and evaluation.sets of a config."
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder, or a name on the hub")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, as for launch/train.py")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for evaluation.json, metrics and samples (default: <output_dir>/evaluations/<checkpoint>)",
    )


# The config of the evaluation.

KEPT = frozenset(
    {
        *("model", "data", "rollout", "env", "reward", "evaluation", "weight_sync", "logging", "residency", "timeouts"),
        *rewarding_roles(),
    }
)
"""Sections with the same meaning without training. All other sections are reset to their defaults."""


def _name_of(checkpoint: Path) -> str:
    """Returns the name of a checkpoint's folder. It includes the run for folders with the same name in every run."""
    run = checkpoint.parent.parent if checkpoint.parent.name == "hf_steps" else checkpoint.parent
    is_export = checkpoint.name in EXPORTS or checkpoint.parent.name == "hf_steps"
    return f"{run.name}_{checkpoint.name}" if is_export else checkpoint.name


def evaluation_overrides(path: Path, given: Sequence[str], *, checkpoint: str, output: Path | None) -> list[str]:
    """Returns overrides of the config file at `path` for one evaluation of `checkpoint`. They include `given`.

    All ranks host rollout and reward, and if configured env and the models of the reward, unless `given` places them.
    Engines are those of role evaluation if it is configured. Raises ConfigError if the config is wrong, and
    CheckpointError if `checkpoint` is neither a folder nor a name on the hub.
    """
    from rltrain.data.hub import named_checkpoint  # loads pyarrow, which no help needs

    found = named_checkpoint(checkpoint, "--checkpoint")
    config = load_config(path, given)
    roles = ["rollout", "reward", *(["env"] if config.env.function or config.env.agent else [])]
    roles += [role for role in rewarding_roles() if getattr(config, role).path is not None]
    of_engines = config.evaluation.model_dump(mode="json", include={*config.evaluation.engine_keys})
    name = _name_of(found.resolve()) if isinstance(found, Path) else Path(found.name).name
    output = output or Path(config.output_dir, "evaluations", name)
    before = {
        **{name: {} for name in _sections() - KEPT},
        "placement": {", ".join(roles): "all"},
        "reward": config.reward.model_dump(mode="json", exclude_unset=True),
        "evaluation.logged_prompts": "all",
        **{f"rollout.{key}": value for key, value in of_engines.items()},
    }
    after = {
        "algorithm": "evaluate",
        "steps": 1,
        "data.solved_rate": None,
        "model.path": checkpoint,
        "weight_sync.adapters": "merged",
        "output_dir": str(output),
        "checkpoint": {"resume": "none", "save_hf": False, "save_every_s": 0},
        "evaluation.stop_at": None,
        "evaluation.stop_metric": None,
        "evaluation.keep_best": None,
        **{f"evaluation.{key}": None for key in of_engines},
        "logging.wandb": {},
        "logging.tensorboard": False,
    }
    return [*_written(before), *given, *_written(after)]


def _sections() -> set[str]:
    """Returns the optional sections of the config."""
    fields = Config.model_fields.items()
    return {name for name, field in fields if not field.is_required() and section_of(field.annotation) is not None}


def _written(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
