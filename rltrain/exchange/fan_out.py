"""By which ranks a transfer enters the nodes of a replica, and who passes it on there.

What a replica is due crosses the network once for each of its nodes: an owner sends it to all ranks of the replica on
its own node, and to one rank on every other, which passes on to its neighbours in one message what all owners on other
nodes have sent. So no rank but that one hears of owners on other nodes.

So a rank waits for one of its own replica too, with which the task behind the wait has it wait anyway: an order that
can finish still can.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Intake:
    """From whom a rank gets what its replica is due, and to whom it passes that on."""

    owners: tuple[int, ...]
    """Other ranks that send to this one what they have."""
    from_afar: tuple[int, ...] = ()
    """Those of them whose messages this rank passes on."""
    followers: tuple[int, ...] = ()
    """The neighbours to which it does."""
    relay: int | None = None
    """The neighbour that passes on to this rank what comes from other nodes."""


def receivers(owner: int, replica: Sequence[int], ranks_per_node: int) -> list[int]:
    """To whom `owner` sends what `replica` is due, itself among them where it is of the replica."""
    entrances: dict[int, int] = {}
    for rank in replica:
        entrances.setdefault(rank // ranks_per_node, rank)
    here = owner // ranks_per_node
    return [rank for rank in replica if rank // ranks_per_node == here or rank == entrances[rank // ranks_per_node]]


def intake(rank: int, owners: Sequence[int], replica: Sequence[int], ranks_per_node: int) -> Intake:
    """Of `rank` in `replica`, where `owners` send: the other end of `receivers`."""
    here = rank // ranks_per_node
    others = tuple(owner for owner in owners if owner != rank)
    entrance, *behind = (peer for peer in replica if peer // ranks_per_node == here)
    near = tuple(owner for owner in others if owner // ranks_per_node == here)
    if len(near) == len(others) or not behind:
        return Intake(others)
    if rank != entrance:
        return Intake(near, relay=entrance)
    return Intake(others, from_afar=tuple(o for o in others if o not in near), followers=tuple(behind))
