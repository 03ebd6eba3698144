"""Moves experience between roles: from every source replica's owner to the ranks of each destination replica.

Prompt groups are atomic and go to the replica that `data.assignment` gives them, which every rank computes alike from
the token counts of all groups; by which of its ranks they get there is in `fan_out`. Of each destination replica one
owner tells it of all groups: their token counts, and which source replica has which. So it knows who else has something
for it, and owners send to those replicas alone for which they have groups.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rltrain.data.experience import assign_groups
from rltrain.errors import ExchangeError
from rltrain.exchange.fan_out import Intake, intake, receivers
from rltrain.exchange.shipment import Message, Shipment, decode, encode, joined, opened, together
from rltrain.exchange.transport import Delivery, Transport
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import Waiter

OWN, RELAYED = 0, 1
"""Of messages from an owner, and of those from who passes on what owners on other nodes have sent."""
Leg = tuple[int, int]
"""The rank that a message comes from, and which of the two it is."""


@dataclass(frozen=True)
class Route:
    """One transfer of one step. `position` of its post in the order makes its message tags its own among those of all
    that is on its way."""

    name: str
    source: Grid
    destination: Grid
    fields: tuple[str, ...]
    position: int
    num_blocks: int = 1

    def tag(self, part: int) -> int:
        return 2 * self.position + part

    def replica_of(self, group_tokens: Tensor) -> Tensor:
        """[groups] the destination replica that each goes to."""
        return assign_groups(group_tokens, self.destination.dp, self.num_blocks)

    def teller(self, dp: int) -> int:
        """The owner that tells destination replica `dp` of all groups."""
        return self.source.owner(dp % self.source.dp)


@dataclass(frozen=True)
class Sent:
    """What this rank sends by a route: the messages, which stay until all have been received."""

    route: Route
    of_groups: Shipment
    """What is said of all groups, without samples."""
    deliveries: list[Delivery] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


class Exchange:
    """The two ends of every transfer for this rank. Sends stay in an outbox until retired.

    `ranks_per_node` tells what goes between nodes. `serve` is what this rank does for others while it waits, if
    anything.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        waiter: Waiter,
        ranks_per_node: int,
        serve: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.transport = transport
        self.waiter = waiter
        self.ranks_per_node = ranks_per_node
        self.serve = serve
        self.outbox: dict[int, Sent] = {}
        self.relayed: list[Sent] = []
        self.to_self: dict[int, Shipment] = {}

    def post(self, route: Route, shipment: Shipment) -> None:
        """Send the route's fields without blocking, from an owner of the source; other ranks of a source replica
        have nothing to say. ExchangeError where there are samples of a group that is said to be with another replica.
        """
        owners = route.source.owners()
        if self.rank not in owners:
            return
        shipment = replace(shipment, experience=shipment.experience.only(route.fields))
        experience, holders = shipment.experience, shipment.holders
        group_ids, is_held = experience.group_ids, holders == owners.index(self.rank)
        if not bool(is_held[group_ids].all()):
            raise ExchangeError(
                f"rank {self.rank} has samples of groups {group_ids[~is_held[group_ids]].unique().tolist()[:8]} of "
                f"{route.name} (the first 8), which are said to be with other ranks: a bug of rltrain, to be reported"
            )
        replica_of = route.replica_of(shipment.group_tokens)
        sent = Sent(route, shipment.without_samples())
        told = {dp for dp in range(route.destination.dp) if route.teller(dp) == self.rank}
        for dp in sorted(told | {*replica_of[is_held].tolist()}):
            samples = experience.select(torch.nonzero(replica_of[group_ids] == dp).flatten())
            num_told = len(holders) if dp in told else 0
            part = Shipment(samples, shipment.group_tokens[:num_told], holders[:num_told])
            peers = receivers(self.rank, route.destination.replica(dp), self.ranks_per_node)
            self._send(sent, OWN, part, [peer for peer in peers if peer != self.rank])
            if self.rank in peers:
                self.to_self[route.position] = part
        self.outbox[route.position] = sent

    def wait(self, route: Route) -> Shipment:
        """Everything that the source sent to this rank's replica, sorted by group id. Blocks."""
        dp = route.destination.coordinates(self.rank).dp
        arrived = self._receive(route, self._taken(route, dp, [route.teller(dp)]))
        of_self = [self.to_self.pop(route.position)] if route.position in self.to_self else []
        told = together([*arrived.values(), *of_self])
        replica_of = route.replica_of(told.group_tokens)
        taken = self._taken(route, dp, senders(route, told.holders, replica_of == dp, route.teller(dp)))
        arrived |= self._receive(route, taken, already=arrived.keys())
        if taken.followers:
            from_afar = together([arrived.pop((rank, OWN)) for rank in taken.from_afar])
            self._relay(route, from_afar, taken.followers)
            arrived[self.rank, RELAYED] = from_afar
        return replace(joined([*arrived.values(), *of_self]), holders=replica_of)

    def posted(self, position: int) -> Shipment:
        """What this rank posted there, in the fields that travel: a copy. Until it is retired."""
        sent = self.outbox[position]
        return joined([sent.of_groups, *(decode(*message, sent.route.fields) for message in sent.messages)])

    def retire(self, transfers: Sequence[int]) -> None:
        """Wait until the sends of these positions have been received, and free their buffers."""
        for position in transfers:
            if position in self.outbox:
                self._await(self.outbox[position].deliveries, f"delivery of {self.outbox[position].route.name}")
                del self.outbox[position]

    def finish(self) -> None:
        """Wait until neighbours have received what this rank passed on to them."""
        while self.relayed:
            self._await(self.relayed[0].deliveries, f"delivery of {self.relayed[0].route.name}")
            del self.relayed[0]

    def _taken(self, route: Route, dp: int, owners: Sequence[int]) -> Intake:
        """How what `owners` send to replica `dp` comes to this rank."""
        return intake(self.rank, owners, route.destination.replica(dp), self.ranks_per_node)

    def _relay(self, route: Route, shipment: Shipment, followers: Sequence[int]) -> None:
        """Pass on what came from other nodes. What was passed on by earlier waits has been received by then, or soon
        is: those come before this one on every rank."""
        sent = Sent(route, shipment.without_samples())
        self._send(sent, RELAYED, shipment, followers)
        self.finish()
        self.relayed.append(sent)

    def _send(self, sent: Sent, leg: int, shipment: Shipment, peers: Sequence[int]) -> None:
        message = encode(shipment, sent.route.fields)
        sent.deliveries.extend(self.transport.send(peer, sent.route.tag(leg), message) for peer in peers)
        sent.messages.append(message)

    def _receive(self, route: Route, taken: Intake, already: Collection[Leg] = ()) -> dict[Leg, Shipment]:
        legs = [(rank, OWN) for rank in taken.owners]
        legs += [(taken.relay, RELAYED)] if taken.relay is not None else []
        missing = [leg for leg in legs if leg not in already]
        deliveries = [self.transport.receive(rank, route.tag(leg)) for rank, leg in missing]
        self._await(deliveries, f"wait {route.name}")
        return {leg: opened(one.message, route.fields) for leg, one in zip(missing, deliveries, strict=True)}

    def _await(self, deliveries: Sequence[Delivery], what: str) -> None:
        ranks = sorted({delivery.peer for delivery in deliveries})
        self.waiter.until(lambda seconds: self.transport.wait(deliveries, seconds), what, ranks, self.serve)


def senders(route: Route, holders: Tensor, is_due: Tensor, teller: int) -> list[int]:
    """The owners, the teller among them, that have something for a replica, which some groups are due. Raises
    ExchangeError where a group is said to be with nobody."""
    owners, found = route.source.owners(), holders[is_due].unique().tolist()
    if found and not (found[0] >= 0 and found[-1] < len(owners)):
        raise ExchangeError(
            f"groups of {route.name} are said to be with replicas {found[:8]} (the first 8) of {len(owners)}: this was "
            "damaged on the way, or ranks run other versions of rltrain"
        )
    return sorted({teller, *(owners[holder] for holder in found)})
