"""Results of an evaluation: pass@k, the best policy, verdicts for other ranks, and a table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb, fsum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rltrain.config.schema import Config, KeepBest
from rltrain.errors import ConfigError, one_of, writing

# Unbiased estimates of the results with k samples of a prompt, from n >= k samples.


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the probability that at least one of k samples passes, with c of n samples passed.

        pass@k = 1 - C(n - c, k) / C(n, k)

    This is the share of the subsets of k samples with at least one passed sample (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", equation 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"{num_passed} of {num_samples} samples cannot have passed")
    _require_subset(num_samples, k)
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Returns the expected largest reward of k samples: its mean over all subsets of k of the n `rewards`.

        best@k = sum_i C(i - 1, k - 1) / C(n, k) r_(i)

    Here r_(1) <= ... <= r_(n), and the i-th smallest reward is the largest of C(i - 1, k - 1) subsets. With rewards of
    0 and 1 it equals pass@k. With k = 1 it is the mean. Raises ValueError unless 1 <= k <= n.
    """
    _require_subset(len(rewards), k)
    subsets = comb(len(rewards), k)
    return fsum(comb(i, k - 1) / subsets * reward for i, reward in enumerate(sorted(rewards)))


def sizes_up_to(num_samples: int) -> list[int]:
    """Returns the reported values of k: 1, 2, 4, ... and `num_samples` itself."""
    powers = [1 << i for i in range(num_samples.bit_length())]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def _require_subset(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} of {num_samples} samples; expected 1 to {num_samples}")


# Verdicts on an evaluation. The reward's leader puts them into the job's store, and other ranks read them.


def best_verdict_of(step: int) -> str:
    """Returns the key of the evaluation if it is the best so far. Its value is null if it is not."""
    return f"evaluation/best/{step}"


def end_verdict_of(step: int) -> str:
    """Returns the key of the verdict whether the evaluation ends training."""
    return f"evaluation/end/{step}"


REACHED = "evaluation/reached"
"""Key that exists once an evaluation of role evaluation has reached the goal."""


def stop_verdict_of(step: int) -> str:
    """Returns the key of the verdict whether a run with role evaluation ends after a step. The first rank to finish the
    step decides."""
    return f"evaluation/stop/{step}"


def reported(metrics: Mapping[str, float], name: str, config_key: str) -> float:
    """Returns a metric of an evaluation. Raises ConfigError if the metric named by the config key is missing."""
    if name not in metrics:
        raise ConfigError(f"{config_key}: got {name!r}, but no evaluation reports it; expected {one_of(name, metrics)}")
    return metrics[name]


# The best evaluation so far, by the metric of evaluation.keep_best.

BEST_FOLDER = "hf_best"
"""Folder of output_dir with the best policy."""
BEST_FILE = "best.json"
"""File in this folder with the step, and the metric's name and value."""
BEST_STATE_FILE = "best.safetensors"
"""File of a checkpoint."""


@dataclass(frozen=True)
class Best:
    step: int
    metric: str
    value: float

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class BestSoFar:
    """The best evaluation of a run, across interruptions."""

    def __init__(self, settings: KeepBest) -> None:
        self.settings = settings
        self.best: Best | None = None

    def offer(self, step: int, value: float) -> Best | None:
        """Returns the evaluation of `step` if it is better than all before, else None.

        Of equal evaluations the first is the best. NaN never is.
        """
        if math.isnan(value) or (self.best is not None and not self._is_better(value, self.best.value)):
            return None
        self.best = Best(step, self.settings.metric, value)
        return self.best

    def verdict(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """Makes an `offer` of an evaluation's metrics. Returns its result as JSON values."""
        best = self.offer(step, reported(metrics, self.settings.metric, "evaluation.keep_best.metric"))
        return asdict(best) if best else None

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self.settings.mode == "max" else value < than

    def state(self) -> str:
        """Returns the state for `restore` in a resumed run."""
        return json.dumps({"mode": self.settings.mode, "best": asdict(self.best) if self.best else None})

    def restore(self, state: str) -> None:
        """Restores a state. Ignores it if it compared another metric or in another mode."""
        saved = json.loads(state)
        if saved["best"] is not None and saved["mode"] == self.settings.mode:
            best = Best(**saved["best"])
            if best.metric == self.settings.metric:
                self.best = best


# The end of a run that evaluates a checkpoint: a table for users, and a file for programs.

OF_TRAINING = "policy_version"
"""A metric of training without a meaning for a checkpoint."""
EVALUATION_FILE = "evaluation.json"


class EvaluationTable:
    """A table of the metrics of each evaluation set, printed and written to <output_dir>/evaluation.json.

    The file has {"checkpoint": folder, "sets": {name: {metric: value}}}. For one rank of the job. Raises ConfigError if
    the file cannot be written.
    """

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config, self.console = config, console or Console()
        self.path = Path(config.output_dir, EVALUATION_FILE)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        sets = {
            plan.name: {
                own: value
                for name, value in metrics.items()
                if (own := plan.own_name(name)) is not None and own != OF_TRAINING
            }
            for plan in self.config.evaluations
        }
        report = {"checkpoint": self.config.model.path, "sets": sets}
        with writing(self.path):
            self.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if self.config.logging.progress:
            self.console.print(_table(self.config.model.path, sets))
            self.console.print(f"written to {self.path}", highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Does nothing, because all metrics are written."""


def _table(title: str, sets: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns a table with a row per metric and a column per set."""
    table = Table(title=title)
    table.add_column("metric")
    for name in sets:
        table.add_column(name, justify="right")
    for metric in dict.fromkeys(metric for values in sets.values() for metric in values):
        row = (values.get(metric) for values in sets.values())
        table.add_row(metric, *("" if value is None else f"{value:.4g}" for value in row))
    return table
