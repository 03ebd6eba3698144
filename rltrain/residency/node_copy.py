"""What is equal on several ranks of a node, kept on the host by one of them for all."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from rltrain.residency.host_tensors import HostTensors
from rltrain.runtime.job_store import JobStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeCopy:
    """Of `what`, in words, on the `ranks` of a node that have it in common: the first one's memory is everybody's."""

    job_store: JobStore
    what: str
    ranks: tuple[int, ...]
    """Ascending; this one among them."""

    @classmethod
    def among(cls, job_store: JobStore, what: str, ranks: Sequence[int], parts: Sequence[int]) -> Self:
        """Those of `ranks` on this rank's node whose part of a layout, in `parts`, is the same as this rank's."""
        world = job_store.world
        return cls(job_store, what, equals_on_node(ranks, parts, world.rank, world.ranks_per_node))

    @property
    def is_first(self) -> bool:
        return self.job_store.world.rank == self.ranks[0]

    def tensors(self, like: Mapping[str, Tensor], fill: Callable[[HostTensors], None]) -> HostTensors:
        """Memory for tensors of the shapes and types of `like`: what the first rank gave to `fill`; this rank's own,
        given to `fill` here, where the first one's cannot be reached from here."""
        device, first = self.job_store.world.device, self.ranks[0]
        if not self.is_first:
            place = self.job_store.get(self._key("place"), f"rank {first} to make room for {self.what} on this node")
            try:
                return HostTensors.of_another(place, like, device)
            except OSError as error:  # in a container of its own, say
                mine = self.job_store.world.rank
                logger.warning("rank %d cannot share %s of rank %d: %s", mine, self.what, first, error)
        host = HostTensors(like, device)
        fill(host)
        if self.is_first and len(self.ranks) > 1:
            self.job_store.put(self._key("place"), host.place)
        return host

    def renewed(self, count: int) -> None:
        """The first rank has written all of its memory for the `count`th time, from 1 on; the others have done with
        what it had before."""
        if len(self.ranks) > 1:
            self.job_store.put(self._key(count), True)
            self.job_store.forget(self._key(count - 1))

    def await_renewed(self, count: int) -> None:
        """Until the first rank has said so."""
        first = self.ranks[0]
        self.job_store.get(self._key(count), f"rank {first} to have all of {self.what}, for the {count}th time")

    def _key(self, of: str | int) -> str:
        return f"node_copy/{self.what}/{self.ranks[0]}/{of}"


def equals_on_node(ranks: Sequence[int], parts: Sequence[int], rank: int, ranks_per_node: int) -> tuple[int, ...]:
    """Those of `ranks` on the node of `rank` whose part of a layout is the same as that of `rank`, ascending."""
    part = parts[ranks.index(rank)]
    equal = (peer for peer, its in zip(ranks, parts, strict=True) if its == part)
    return tuple(sorted(peer for peer in equal if peer // ranks_per_node == rank // ranks_per_node))
