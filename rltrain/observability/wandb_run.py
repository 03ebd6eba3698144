"""A run's metrics in Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, cannot_write
from rltrain.observability.run_logs import WANDB_ID_FILE, read_id


class WandbRun:
    """A run that `goes_on` from a checkpoint goes on as the run whose id it left in its folder.

    Raises ConfigError where Weights & Biases cannot start.
    """

    def __init__(self, config: Config, goes_on: bool) -> None:
        self._run = _start(config, goes_on)
        self._step = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """What comes late stands at the step that has been reached: steps of a run never go back there."""
        self._step = max(self._step, step)
        self._run.log(dict(metrics), step=self._step)

    def close(self) -> None:
        self._run.finish()


def _start(config: Config, goes_on: bool) -> Any:
    settings, id_file = config.logging.wandb, Path(config.output_dir, WANDB_ID_FILE)
    earlier = read_id(id_file) if goes_on else None
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"logging.wandb.project is {settings.project!r}, but the package wandb is not installed: "
            "install it (pip install wandb), or remove logging.wandb.project"
        ) from error
    try:
        run = wandb.init(
            id=earlier,
            resume="allow",
            project=settings.project,
            name=settings.name,
            mode=settings.mode or ("online" if wandb.login(prompt=False, verify=False) else "offline"),
            dir=config.output_dir,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),
        )
        id_file.write_text(f"{run.id}\n", encoding="utf-8")
        return run
    except OSError as error:
        raise cannot_write(error.filename or id_file, error, "logging.wandb.project") from error
    except wandb.Error as error:
        raise ConfigError(
            f"logging.wandb.project is {settings.project!r}, but wandb did not start: {error}; "
            "set logging.wandb.mode: offline, or remove logging.wandb.project"
        ) from error
