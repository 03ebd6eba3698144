"""The floating-point operations that models of this rank do, as models.flops counts them, and the tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from rltrain.models import Architecture
from rltrain.models.flops import forward_flops


class Begun(NamedTuple):
    operations: float = 0.0
    tokens: float = 0.0


class Operations:
    """This rank's share of those that its replicas have begun since they were last taken."""

    def __init__(self) -> None:
        self._begun = Begun()

    def add(self, architecture: Architecture, lengths: Sequence[int], num_ranks: int, *, backward: bool) -> None:
        """Of sequences of these lengths, forward and perhaps `backward`, on a replica of `num_ranks`."""
        cost = forward_flops(architecture)
        operations = cost.training(lengths) if backward else cost.forward(lengths)
        self._begun = Begun(
            self._begun.operations + operations / num_ranks, self._begun.tokens + sum(lengths) / num_ranks
        )

    def take(self) -> Begun:
        begun, self._begun = self._begun, Begun()
        return begun
