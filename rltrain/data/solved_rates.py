"""How often the prompts of a run are solved, as far as is known, and what follows for drawing them again."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rltrain.config import schema

Outcomes = Mapping[int, tuple[int, int]]
"""Row -> (samples that solve it, samples drawn of it), of a training step."""

Mask = npt.NDArray[np.bool_]


class SolvedRates:
    """Of `num_rows` rows. Arrays are [rows]."""

    def __init__(self, num_rows: int, settings: schema.SolvedRate) -> None:
        self.settings = settings
        self.rates = np.full(num_rows, np.nan)
        """Estimates; nan: no sample of the row was scored yet."""
        self.streaks = np.zeros(num_rows, np.int64)
        """Times in a row that all samples solved it."""

    def learn(self, outcomes: Outcomes) -> None:
        """What a step has shown."""
        memory = self.settings.memory
        for row, (solved, drawn) in sorted(outcomes.items()):
            rate, before = solved / drawn, self.rates[row]
            self.rates[row] = rate if np.isnan(before) else memory * before + (1 - memory) * rate
            self.streaks[row] = self.streaks[row] + 1 if solved == drawn else 0

    @property
    def is_retired(self) -> Mask:
        """Whether the row has been solved so often that it is not drawn any more."""
        after = self.settings.retire_after
        return np.zeros(len(self.rates), bool) if after is None else self.streaks >= after

    @property
    def is_wanted(self) -> Mask:
        """Whether the row is drawn each time that its turn comes: nothing is known of it, or its rate is in the
        window."""
        rates = np.where(np.isnan(self.rates), self.settings.low, self.rates)
        return (rates >= self.settings.low) & (rates <= self.settings.high) & ~self.is_retired

    def metrics(self) -> dict[str, float]:
        """Shares of the rows by what is known of them."""
        is_known = ~np.isnan(self.rates)
        known, num_rows = self.rates[is_known], len(self.rates)
        too_hard, too_easy = (known < self.settings.low).sum(), (known > self.settings.high).sum()
        shares = {
            "unseen": num_rows - len(known),
            "too_hard": too_hard,
            "too_easy": too_easy,
            "in_window": len(known) - too_hard - too_easy,
        }
        return {
            **{f"curriculum/{name}": float(count / num_rows) for name, count in shares.items()},
            "curriculum/retired": float(self.is_retired.sum()),
            **({"curriculum/solved_rate_mean": float(known.mean())} if len(known) else {}),
        }
