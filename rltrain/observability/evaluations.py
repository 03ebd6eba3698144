"""What follows from an evaluation: pass@k, the best policy, the verdict that ranks read, a table."""

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

# What a policy would reach with k samples of a prompt, estimated without bias from n >= k that were drawn.


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The probability that at least one of k samples passes: Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1.

        pass@k = 1 - C(n - c, k) / C(n, k)

    with c of n samples passed: the share of the subsets of k samples that hold one which passed. ValueError unless
    1 <= k <= n and 0 <= c <= n.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"{num_passed} of {num_samples} samples cannot have passed")
    _require_subset(num_samples, k)
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected largest reward of k samples: the mean over all subsets of k of the n `rewards`.

        best@k = sum_i C(i - 1, k - 1) / C(n, k) r_(i)

    where r_(1) <= ... <= r_(n): the i-th smallest is the largest of that many subsets. With rewards of 0 and 1 it is
    pass@k, with k = 1 the mean. ValueError unless 1 <= k <= n.
    """
    _require_subset(len(rewards), k)
    subsets = comb(len(rewards), k)
    return fsum(comb(i, k - 1) / subsets * reward for i, reward in enumerate(sorted(rewards)))


def sizes_up_to(num_samples: int) -> list[int]:
    """The k that are reported: 1, 2, 4, ... and `num_samples` itself."""
    powers = [1 << i for i in range(num_samples.bit_length())]
    return powers if powers[-1] == num_samples else [*powers, num_samples]


def _require_subset(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} of {num_samples} samples; expected 1 to {num_samples}")


# What follows from an evaluation: the reward's leader leaves it in the job's store, where other ranks read it.


def best_verdict_of(step: int) -> str:
    """Key of the evaluation as the best so far, null if it is not."""
    return f"evaluation/best/{step}"


def end_verdict_of(step: int) -> str:
    """Key of whether the evaluation ends training."""
    return f"evaluation/end/{step}"


REACHED = "evaluation/reached"
"""Key that is there once an evaluation by engines of their own has reached the goal."""


def stop_verdict_of(step: int) -> str:
    """Key of whether such a run ends after a step: what the first rank to have done with it knew."""
    return f"evaluation/stop/{step}"


def reported(metrics: Mapping[str, float], name: str, config_key: str) -> float:
    """ConfigError where an evaluation does not report what the config key names."""
    if name not in metrics:
        raise ConfigError(f"{config_key}: got {name!r}, which no evaluation reported; expected {one_of(name, metrics)}")
    return metrics[name]


# Which evaluation was the best so far, by the metric that evaluation.keep_best names.

BEST_FOLDER = "hf_best"
"""Of output_dir: the best policy."""
BEST_FILE = "best.json"
"""In it: its step, and the metric's name and value."""
BEST_STATE_FILE = "best.safetensors"
"""Of a checkpoint."""


@dataclass(frozen=True)
class Best:
    step: int
    metric: str
    value: float

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class BestSoFar:
    """Of the evaluations of a run, whatever was interrupted between them."""

    def __init__(self, settings: KeepBest) -> None:
        self.settings = settings
        self.best: Best | None = None

    def offer(self, step: int, value: float) -> Best | None:
        """The evaluation of `step` as the best so far; None if it is not better than all before. Of equal ones the
        first is the best; a value that is not a number is none."""
        if math.isnan(value) or (self.best is not None and not self._is_better(value, self.best.value)):
            return None
        self.best = Best(step, self.settings.metric, value)
        return self.best

    def verdict(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any] | None:
        """`offer`, of what an evaluation reported, as JSON can write it."""
        best = self.offer(step, reported(metrics, self.settings.metric, "evaluation.keep_best.metric"))
        return asdict(best) if best else None

    def _is_better(self, value: float, than: float) -> bool:
        return value > than if self.settings.mode == "max" else value < than

    def state(self) -> str:
        """For `restore`, in a run that goes on."""
        return json.dumps({"mode": self.settings.mode, "best": asdict(self.best) if self.best else None})

    def restore(self, state: str) -> None:
        """Nothing where another metric or mode was compared."""
        saved = json.loads(state)
        if saved["best"] is not None and saved["mode"] == self.settings.mode:
            best = Best(**saved["best"])
            if best.metric == self.settings.metric:
                self.best = best


# The end of a run that evaluates a checkpoint: a table for people, and a file for programs.

OF_TRAINING = "policy_version"
"""Says nothing of a checkpoint."""
EVALUATION_FILE = "evaluation.json"


class EvaluationTable:
    """Prints what is reported of each evaluation set, and writes it to <output_dir>/evaluation.json:
    {"checkpoint": folder, "sets": {name: {metric: value}}}. For one rank of the job. ConfigError where the file cannot
    be written."""

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
        """Nothing is left to write."""


def _table(title: str, sets: Mapping[str, Mapping[str, float]]) -> Table:
    """A row for each metric, a column for each set."""
    table = Table(title=title)
    table.add_column("metric")
    for name in sets:
        table.add_column(name, justify="right")
    for metric in dict.fromkeys(metric for values in sets.values() for metric in values):
        row = (values.get(metric) for values in sets.values())
        table.add_row(metric, *("" if value is None else f"{value:.4g}" for value in row))
    return table
