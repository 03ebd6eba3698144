"""Writes a run's numbers to metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, cannot_write, writing
from rltrain.observability.reporter import Sink
from rltrain.observability.run_logs import METRICS_FILE, TENSORBOARD_FOLDER, WANDB_ID_FILE, append_to, read_id

# Metrics in the files of TensorBoard.


class TensorboardRun:
    """A writer of scalars to <output_dir>/tensorboard. In a resumed run TensorBoard hides earlier scalars from
    `first_step` on.

    Raises ConfigError if TensorBoard is not installed or cannot write.
    """

    def __init__(self, config: Config, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "logging.tensorboard is true, but the package tensorboard is not installed: install it "
                "(pip install tensorboard), or remove logging.tensorboard"
            ) from error
        folder = Path(config.output_dir, TENSORBOARD_FOLDER)
        try:
            self._writer = SummaryWriter(str(folder), purge_step=first_step or None)
        except OSError as error:
            raise cannot_write(error.filename or folder, error, "logging.tensorboard") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# Metrics in Weights & Biases.


class WandbRun:
    """A run in Weights & Biases. With `goes_on` it continues the run whose id is in the output folder.

    Raises ConfigError if Weights & Biases cannot start.
    """

    def __init__(self, config: Config, goes_on: bool) -> None:
        self._run = _start(config, goes_on)
        self._step = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics. Late metrics get the latest step, because steps of a run never go back there."""
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


# All destinations of a run's numbers: metrics.jsonl, and others from the config.

logger = logging.getLogger(__name__)


class MetricsWriter:
    """A writer of one line per step to <output_dir>/metrics.jsonl: {"step": ..., "time_s": ..., metric name: value,
    ...}.

    `time_s` is seconds since the writer was made. In a resumed run it continues from the file's last record. For one
    rank of the job. Raises ConfigError if output_dir cannot be written.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir, METRICS_FILE)
        append_to(self.path, "")
        self._start = time.monotonic() - self._last_time_s()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one record. It is in the file when this returns. Values that are not finite become null, with a
        warning.

        Raises ConfigError if the record cannot be written.
        """
        record: dict[str, Any] = {"step": step, "time_s": round(time.monotonic() - self._start, 3)}
        for name, value in metrics.items():
            if not math.isfinite(value):
                logger.warning("%s is %s at step %d; written to %s as null", name, value, step, self.path)
            record[name] = value if math.isfinite(value) else None
        append_to(self.path, json.dumps(record, allow_nan=False) + "\n")

    def close(self) -> None:
        """Does nothing, because all records are written."""

    def _last_time_s(self) -> float:
        """Returns time_s of the last record, or 0 if there is none."""
        with writing(self.path), self.path.open(encoding="utf-8", errors="replace") as lines:
            last = deque(lines, maxlen=1)
        try:
            return float(json.loads(last[0])["time_s"]) if last else 0.0
        except (ValueError, KeyError, TypeError):
            return 0.0


class Sinks:
    """All destinations of a run's metrics, as plain numbers. For one rank of the job.

    `first_step` is the run's first step in this process. With `goes_on` it follows a checkpoint. Raises ConfigError if
    a configured destination cannot be opened.
    """

    def __init__(self, config: Config, *, goes_on: bool = False, first_step: int = 0) -> None:
        self._sinks: list[Sink] = [MetricsWriter(config)]
        if config.logging.wandb.project is not None:
            self._sinks.append(WandbRun(config, goes_on))
        if config.logging.tensorboard:
            self._sinks.append(TensorboardRun(config, first_step))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: _plain_number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        while self._sinks:
            self._sinks.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain_number(value: Any) -> int | float:
    """Returns a Python number for one of Python, numpy or torch."""
    return value if type(value) in (int, float) else float(value)
