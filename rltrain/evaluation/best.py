"""Which evaluation was the best so far, by the metric that evaluation.keep_best names."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rltrain.config.schema import KeepBest
from rltrain.evaluation.verdicts import reported

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
