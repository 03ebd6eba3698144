"""The command `evaluate`, and how it makes a config for training one for an evaluation."""

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

# What launch/evaluate.py and `rltrain evaluate` do.


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 done, 2 a mistake the user can mend, 1 anything else."""
    if "RANK" not in os.environ:
        raise UserError("start me with torchrun --nproc-per-node N, on one rank or more")
    begin_as_rank()
    overrides = _overrides(arguments)
    from rltrain.trainer import run_job

    return run_job(arguments.config, overrides)


def check(arguments: argparse.Namespace, worlds: Sequence[tuple[int, int]]) -> None:
    """Refuse what `run` of the same arguments would refuse on the ranks of each of `worlds`, without any."""
    check_job(arguments.config, _overrides(arguments), worlds)


def _overrides(arguments: argparse.Namespace) -> list[str]:
    return evaluation_overrides(
        arguments.config, arguments.overrides, checkpoint=arguments.checkpoint, output=arguments.output
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives the parser the description and the arguments of the command."""
    parser.description = "Evaluate a Hugging Face checkpoint by data.eval and evaluation.sets of a config."
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder, or a name on the hub")
    parser.add_argument("--config", type=Path, required=True, help="YAML file, as for launch/train.py")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="for evaluation.json, metrics and samples; by default <output_dir>/evaluations/<name of the checkpoint>",
    )


# What makes of a config for training one for an evaluation alone.

KEPT = frozenset(
    {
        *("model", "data", "rollout", "env", "reward", "evaluation", "weight_sync", "logging", "residency", "timeouts"),
        *rewarding_roles(),
    }
)
"""Sections that mean the same without training; of the others the defaults are as good as anything."""


def _name_of(checkpoint: Path) -> str:
    """Returns the name of a checkpoint's folder, with that of the run where every run has such a folder."""
    run = checkpoint.parent.parent if checkpoint.parent.name == "hf_steps" else checkpoint.parent
    is_export = checkpoint.name in EXPORTS or checkpoint.parent.name == "hf_steps"
    return f"{run.name}_{checkpoint.name}" if is_export else checkpoint.name


def evaluation_overrides(path: Path, given: Sequence[str], *, checkpoint: str, output: Path | None) -> list[str]:
    """Overrides of the config file at `path` that have its evaluation sets drawn by `checkpoint`, once: `given` and
    what else is needed. All ranks host rollout and reward, and env and the models that tell the reward where the config
    has such, unless `given` places them otherwise; engines are those of role evaluation, where the config has such.
    Raises ConfigError, and CheckpointError where `checkpoint` is neither a folder nor can be a name on the hub."""
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
    """Of the config, those that may be left out."""
    fields = Config.model_fields.items()
    return {name for name, field in fields if not field.is_required() and section_of(field.annotation) is not None}


def _written(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
