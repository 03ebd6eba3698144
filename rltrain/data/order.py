"""The stream of prompts of a run: a pure function of the seed, so that a resumed run needs no state."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from rltrain.data.permutation import FeistelPermutation

KEPT_EPOCHS = 2
HELD_ROWS = 2**20
"""Of more rows the order is not held: what stands where is computed."""
COMPUTED_ROWS = 2**10
"""Of neighbouring positions, which mostly are asked for together."""


class Order(ABC):
    """Which row stands at which position of the stream; step k uses positions k * prompts_per_step and following."""

    @abstractmethod
    def row(self, position: int) -> int:
        """The row at this position, 0, 1, ... without an end."""

    def rows_for_step(self, step: int, prompts_per_step: int) -> list[int]:
        """[prompts_per_step] rows of step 0, 1, ..."""
        first = step * prompts_per_step
        return [self.row(position) for position in range(first, first + prompts_per_step)]


class PromptOrder(Order):
    """Row numbers in epochs one after the other, each in an order of its own if shuffled. Steps may cross epochs: a row
    comes twice in a step only where an epoch ends within it."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, stream: tuple[int, ...] = ()) -> None:
        """`stream` tells orders of one seed apart."""
        if num_rows < 1:
            raise ValueError(f"an order needs rows, got num_rows={num_rows}")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.stream = stream
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}
        self._computed: tuple[int, npt.NDArray[np.int64]] = -1, np.arange(0)

    def row(self, position: int) -> int:
        if self.shuffle and self.num_rows > HELD_ROWS:
            block, offset = divmod(position, COMPUTED_ROWS)
            if block != self._computed[0]:
                self._computed = block, self.rows(block * COMPUTED_ROWS, COMPUTED_ROWS)
            return int(self._computed[1][offset])
        epoch, index = divmod(position, self.num_rows)
        return int(self._permutation(epoch)[index]) if self.shuffle else index

    def rows(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """[count] the rows at `first` and the positions behind it."""
        epochs, places = np.divmod(np.arange(first, first + count), self.num_rows)
        if self.shuffle:
            for epoch in range(first // self.num_rows, (first + max(count, 1) - 1) // self.num_rows + 1):
                places[epochs == epoch] = self._permuted(epoch, places[epochs == epoch])
        return places

    def _permuted(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at these places of an epoch."""
        if self.num_rows > HELD_ROWS:
            return FeistelPermutation(self.num_rows, (self.seed, epoch, *self.stream)).of(places)
        return self._permutation(epoch)[places]

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            if len(self._epochs) == KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch, *self.stream]).permutation(self.num_rows)
        return self._epochs[epoch]
