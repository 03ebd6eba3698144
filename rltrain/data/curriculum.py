"""From easy to hard over the first steps: a pure function of the position, as every order is."""

import numpy as np
import numpy.typing as npt

from rltrain.data.order import Order


class CurriculumOrder(Order):
    """In each of the first steps rows of a window that slides over all of them, sorted by difficulty; then another
    order from its beginning.

    A step's rows differ from each other where there are enough. Where the steps take as many rows as there are, each
    comes once, in sorted order but for the order within a step.
    """

    def __init__(
        self,
        difficulties: npt.NDArray[np.float64],
        *,
        steps: int,
        per_step: int,
        seed: int,
        shuffle: bool,
        then: Order,
    ) -> None:
        """`difficulties` [rows]; ties keep the rows' order. `per_step`: positions that a step takes."""
        self.sorted = np.argsort(difficulties, kind="stable")
        self.steps, self.per_step, self.seed, self.shuffle, self.then = steps, per_step, seed, shuffle, then
        self.window = min(len(difficulties), max(-(-len(difficulties) // steps), per_step))
        self._drawn: tuple[int, npt.NDArray[np.int64]] = (-1, np.arange(0))

    def row(self, position: int) -> int:
        step, offset = divmod(position, self.per_step)
        if step >= self.steps:
            return self.then.row(position - self.steps * self.per_step)
        if self._drawn[0] != step:
            self._drawn = step, self._draw(step)
        return int(self._drawn[1][offset % self.window])

    def _draw(self, step: int) -> npt.NDArray[np.int64]:
        """[window] the rows of the step's window, in the order in which they are taken."""
        first = step * (len(self.sorted) - self.window) // max(self.steps - 1, 1)
        rows = self.sorted[first : first + self.window]
        return np.random.default_rng([self.seed, step, self.window]).permutation(rows) if self.shuffle else rows
