"""The stream of prompts of a run: a pure function of the seed, so that a resumed run needs no state."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class PromptOrder:
    """Row numbers in epochs one after the other, each in an order of its own if shuffled. Steps may cross epochs."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise ValueError(f"an order needs rows, got num_rows={num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle

    def rows_for_step(self, step: int, prompts_per_step: int) -> list[int]:
        """[prompts_per_step] rows of step 0, 1, ...; a row comes twice only where an epoch ends within the step."""
        first = step * prompts_per_step
        return [self.row(position) for position in range(first, first + prompts_per_step)]

    def row(self, position: int) -> int:
        """The row at this position of the stream; step k uses positions k * prompts_per_step and following."""
        epoch, index = divmod(position, self.num_rows)
        return int(_permutation(self.num_rows, self.seed, epoch)[index]) if self.shuffle else index


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
