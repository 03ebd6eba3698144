"""Moves experience between roles: from every source replica's owner to the ranks of each destination replica.

Prompt groups are atomic and go to the replica that `data.assignment` gives them, which every rank computes alike from
the token counts of all groups; by which of its ranks they get there is in `fan_out`. Of each destination replica one
owner tells it of all groups: their token counts, and which source replica has which. So it knows who else has something
for it, and owners send to those replicas alone for which they have groups.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
from torch import Tensor

from rltrain.data.experience import FIELDS, WIDE, Experience, assign_groups, join
from rltrain.errors import ExchangeError
from rltrain.exchange.transport import InTransit, Transport
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import Waiter

# By which ranks a transfer enters the nodes of a replica, and who passes it on there.
#
# What a replica is due crosses the network once for each of its nodes: an owner sends it to all ranks of the replica
# on its own node, and to one rank on every other, which passes on to its neighbours in one message what all owners on
# other nodes have sent. So no rank but that one hears of owners on other nodes.
#
# So a rank waits for one of its own replica too, with which the task behind the wait has it wait anyway: an order that
# can finish still can.


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


# Shipments of experience, and the messages that carry them: a header of whole numbers and one buffer of bytes.

HEADER = ("num_samples", "num_tokens", "num_groups")
ALIGNMENT_BYTES = HEADER_ITEM_BYTES = 8
Message = tuple[Tensor, Tensor]
"""Header and body."""


@dataclass(frozen=True)
class Shipment:
    """Samples on their way, and of all groups of the chunk, which `experience` has a part of: `group_tokens` [groups],
    and `holders` [groups], the replicas of the role that the samples are with."""

    experience: Experience
    group_tokens: Tensor
    holders: Tensor

    def with_fields(self, **values: Tensor) -> "Shipment":
        return replace(self, experience=self.experience.with_fields(**values))

    def without_samples(self) -> "Shipment":
        return replace(self, experience=self.experience.select(torch.empty(0, dtype=torch.int64)))


def together(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, and what one of the parts says of all groups."""
    told = max(parts, key=lambda part: len(part.group_tokens))
    return replace(told, experience=join(part.experience for part in parts))


def joined(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, by group id, and what one of the parts says of all groups. A copy."""
    whole = together(parts)
    by_group = torch.argsort(whole.experience.group_ids, stable=True)
    return Shipment(whole.experience.select(by_group), whole.group_tokens.clone(), whole.holders.clone())


def encode(shipment: Shipment, fields: Sequence[str]) -> Message:
    """Header [`header_length`] int64, its checksum last, and body [bytes] uint8: group_tokens and holders as int32 and
    then each field, padded to whole 8 bytes."""
    experience, group_tokens, holders = shipment.experience, shipment.group_tokens, shipment.holders
    values = [getattr(experience, name) for name in fields]
    widths = [value.shape[1] for name, value in zip(fields, values, strict=True) if name in WIDE]
    counts = torch.tensor([experience.num_samples, int(experience.lengths.sum()), len(group_tokens), *widths])
    header = torch.cat([counts, torch.tensor([crc32(counts.numpy().tobytes())])])
    return header, torch.cat([as_bytes(values) for values in (group_tokens.int(), holders.int(), *values)])


def opened(message: Tensor, fields: Sequence[str]) -> Shipment:
    """What a message [bytes] uint8, header and body in one, carries. Raises ExchangeError as `decode` does."""
    num_bytes = HEADER_ITEM_BYTES * header_length(fields)
    if len(message) < num_bytes:
        raise ExchangeError(f"{len(message)} bytes of experience arrived; expected a header of {num_bytes} at least")
    return decode(message[:num_bytes].view(torch.int64), message[num_bytes:], fields)


def decode(header: Tensor, body: Tensor, fields: Sequence[str]) -> Shipment:
    """The inverse of `encode`. Raises ExchangeError where they are of no shipment."""
    if len(body) != body_bytes(header, fields):
        raise ExchangeError(f"{len(body)} bytes of experience arrived; expected {body_bytes(header, fields)}")
    num_groups = header[2:3].tolist()
    shapes = [(torch.int32, num_groups), (torch.int32, num_groups), *shapes_of(header, fields)]
    padded = torch.split(body, [padded_bytes(dtype, shape) for dtype, shape in shapes])
    group_tokens, holders, *values = (
        piece[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        for piece, (dtype, shape) in zip(padded, shapes, strict=True)
    )
    shipment = Shipment(Experience(**dict(zip(fields, values, strict=True))), group_tokens.long(), holders.long())
    lengths = shipment.experience.lengths
    if bool((lengths < 0).any()) or int(lengths.sum()) != int(header[1]):
        raise ExchangeError(
            f"samples of {lengths.tolist()[:8]} tokens arrived (the first 8); expected {int(header[1])} in all: they "
            "were damaged on the way, or ranks run other versions of rltrain"
        )
    return shipment


def header_length(fields: Sequence[str]) -> int:
    return len(HEADER) + sum(name in WIDE for name in fields) + 1


def body_bytes(header: Tensor, fields: Sequence[str]) -> int:
    """Of the body that follows. Raises ExchangeError where the header is not what was sent."""
    if crc32(header[:-1].numpy().tobytes()) != int(header[-1]):
        raise ExchangeError(
            f"the header of a shipment, {header.tolist()}, does not fit its checksum: it was damaged on the way, or "
            "ranks run other versions of rltrain"
        )
    of_groups = padded_bytes(torch.int32, header[2:3].tolist())
    return 2 * of_groups + sum(padded_bytes(dtype, shape) for dtype, shape in shapes_of(header, fields))


def shapes_of(header: Tensor, fields: Sequence[str]) -> list[tuple[torch.dtype, list[int]]]:
    """(dtype, shape) of each field's tensor."""
    num_samples, num_tokens, _, *widths, _ = header.tolist()
    remaining = iter(widths)
    shapes = []
    for name in fields:
        dtype, extent = FIELDS[name]
        length = num_samples if extent == "sample" else num_tokens
        shapes.append((dtype, [length, next(remaining)] if name in WIDE else [length]))
    return shapes


def padded_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return -(-dtype.itemsize * math.prod(shape) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def as_bytes(values: Tensor) -> Tensor:
    flat = values.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT_BYTES))


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
    deliveries: list[InTransit] = field(default_factory=list)
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

    def _await(self, deliveries: Sequence[InTransit], what: str) -> None:
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


# Experience that crosses a checkpoint: shipments as the tensors of a file, and who sends them on.

Key = tuple[str, str, int, int]
"""Source role, transfer, step and chunk."""

GROUP_TOKENS = "group_tokens"


def as_tensors(shipments: Mapping[Key, Shipment]) -> dict[str, Tensor]:
    """Every field under "source/transfer/step/chunk/field"."""
    return {
        "/".join([*map(str, key), name]): values
        for key, shipment in shipments.items()
        for name, values in {**shipment.experience.columns(), GROUP_TOKENS: shipment.group_tokens}.items()
    }


def read_parts(saved: Sequence[Mapping[str, Tensor]]) -> dict[Key, list[Shipment]]:
    """What each of the ranks that saved had of every shipment, in the ranks' order."""
    parts: dict[Key, list[Shipment]] = {}
    for tensors in saved:
        columns: dict[Key, dict[str, Tensor]] = {}
        for path, values in tensors.items():
            source, transfer, step, chunk, name = path.split("/")
            columns.setdefault((source, transfer, int(step), int(chunk)), {})[name] = values
        for key, of_shipment in columns.items():
            group_tokens = of_shipment.pop(GROUP_TOKENS)
            of_nobody = torch.zeros_like(group_tokens)  # until they are shared out
            parts.setdefault(key, []).append(Shipment(Experience(**of_shipment), group_tokens, of_nobody))
    return parts


def share(parts: Sequence[Shipment], replica: int, num_replicas: int) -> Shipment:
    """What replica `replica` sends on: part i is that of replica i mod num_replicas. It may hold no samples."""
    holders = torch.zeros_like(parts[0].group_tokens)
    for number, part in enumerate(parts):
        holders[part.experience.group_ids] = number % num_replicas
    mine = parts[replica::num_replicas]
    if not mine:
        return replace(parts[0].without_samples(), holders=holders)
    return replace(joined(mine), holders=holders)
