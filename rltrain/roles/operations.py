"""The floating-point operations that models of this rank do, as models.flops counts them."""

from collections.abc import Sequence

from rltrain.models import Architecture
from rltrain.models.flops import forward_flops


class Operations:
    """This rank's share of those that its replicas have begun since they were last taken."""

    def __init__(self) -> None:
        self._begun = 0.0

    def add(self, architecture: Architecture, lengths: Sequence[int], num_ranks: int, *, backward: bool) -> None:
        """Of sequences of these lengths, forward and perhaps `backward`, on a replica of `num_ranks`."""
        cost = forward_flops(architecture)
        self._begun += (cost.training(lengths) if backward else cost.forward(lengths)) / num_ranks

    def take(self) -> float:
        begun, self._begun = self._begun, 0.0
        return begun
