"""Where a run's numbers go: metrics.jsonl, and Weights & Biases where it is configured."""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, cannot_write
from rltrain.observability.run_logs import METRICS_FILE, WANDB_ID_FILE, read_id

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one line per step to <output_dir>/metrics.jsonl: {"step": ..., "time_s": ..., metric name: value, ...}.

    `time_s` is seconds since the writer was made. For one rank of the job. Errors: ConfigError when output_dir cannot
    be written, or when logging.wandb.project is set and Weights & Biases cannot start.

    A run that `goes_on` from a checkpoint goes on in Weights & Biases too, as the run whose id it left in its folder.
    """

    def __init__(self, config: Config, goes_on: bool = False) -> None:
        self.path = Path(config.output_dir, METRICS_FILE)
        self._append("")
        self._start = time.monotonic()
        self._wandb_run = _start_wandb(config, goes_on) if config.logging.wandb.project is not None else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record, on disk when this returns. Values that are not finite are written as null, with a warning.
        ConfigError where it cannot be written."""
        numbers = {name: _plain_number(value) for name, value in metrics.items()}
        record: dict[str, Any] = {"step": step, "time_s": round(time.monotonic() - self._start, 3)}
        for name, value in numbers.items():
            if not math.isfinite(value):
                logger.warning("%s is %s at step %d; written to %s as null", name, value, step, self.path)
            record[name] = value if math.isfinite(value) else None
        self._append(json.dumps(record, allow_nan=False) + "\n")
        if self._wandb_run is not None:
            self._wandb_run.log(numbers, step=step)

    def close(self) -> None:
        """Finish the wandb run."""
        if self._wandb_run is not None:
            self._wandb_run.finish()
            self._wandb_run = None

    def _append(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _plain_number(value: Any) -> int | float:
    """A Python number from one of Python's, numpy's or torch's."""
    return value if type(value) in (int, float) else float(value)


def _start_wandb(config: Config, goes_on: bool) -> Any:
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
