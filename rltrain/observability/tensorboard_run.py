"""A run's metrics in the files of TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from rltrain.config.schema import Config
from rltrain.errors import ConfigError, cannot_write
from rltrain.observability.run_logs import TENSORBOARD_FOLDER


class TensorboardRun:
    """Scalars under <output_dir>/tensorboard; of a run that went on from an earlier step TensorBoard hides what came
    after it. Raises ConfigError where it is not installed or cannot write."""

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
