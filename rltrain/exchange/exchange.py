"""Moves experience between roles: from every source replica's owner to the ranks of each destination replica.

Prompt groups are atomic and go to the replica that `data.assignment` gives them, which every rank computes alike from
the token counts of all groups; by which of its ranks they get there is in `fan_out`. A message is a fixed-size header
and one buffer of bytes, which is left out where it would be empty: a replica has the counts of all groups from one
owner, and most owners have nothing for most replicas of a large job. Traffic is host memory over a gloo group, so it
never holds a device, with tags that no collective has.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.cluster.grid import Grid
from rltrain.data.assignment import assign_groups
from rltrain.data.experience import FIELDS, WIDE, Experience, join
from rltrain.errors import ExchangeError
from rltrain.exchange.fan_out import intake, receivers
from rltrain.liveness.waiting import Waiter

HEADER = ("num_samples", "num_tokens", "num_groups")
OWN, RELAYED = 0, 2
"""First tag of messages from an owner, and of those from who passes on what owners on other nodes have sent."""
TAGS_PER_TRANSFER = 4
FIRST_TAG = 2**30
"""gloo numbers the collectives of a group from 0, and takes those for tags in some: messages on their way, in a group
that others use too, must not be among them."""
NUM_TAGS = 2**30
ALIGNMENT_BYTES = 8
Message = tuple[Tensor, Tensor]
"""Header and body."""


@dataclass(frozen=True)
class Shipment:
    """Samples on their way, and `group_tokens` [groups] of the whole chunk."""

    experience: Experience
    group_tokens: Tensor

    def with_fields(self, **values: Tensor) -> "Shipment":
        return replace(self, experience=self.experience.with_fields(**values))


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
        return FIRST_TAG + self.position * TAGS_PER_TRANSFER % NUM_TAGS + part


@dataclass(frozen=True)
class Sent:
    """What this rank sends by a route: the works, and the messages, which stay until these are done."""

    route: Route
    group_tokens: Tensor
    works: list[dist.Work] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)


class Exchange:
    """The two ends of every transfer for this rank. Sends stay in an outbox, works and tensors, until retired.

    `ranks_per_node` tells what goes between nodes. `serve` is what this rank does for others while it waits, if
    anything.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        waiter: Waiter,
        ranks_per_node: int,
        serve: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.group = group
        self.waiter = waiter
        self.ranks_per_node = ranks_per_node
        self.serve = serve
        self.outbox: dict[int, Sent] = {}
        self.relayed: list[Sent] = []
        self.to_self: dict[int, Shipment] = {}

    def post(self, route: Route, shipment: Shipment) -> None:
        """Send the route's fields without blocking, from an owner of the source; other ranks of a source replica
        have nothing to say."""
        owners = route.source.owners()
        if self.rank not in owners:
            return
        experience, group_tokens = shipment.experience.only(route.fields), shipment.group_tokens
        replica_of = assign_groups(group_tokens, route.destination.dp, route.num_blocks)[experience.group_ids]
        sent = Sent(route, group_tokens)
        nothing: tuple[Shipment, Message] | None = None
        for dp in range(route.destination.dp):
            samples = torch.nonzero(replica_of == dp).flatten()
            tells = owners[dp % len(owners)] == self.rank
            is_nothing = not (len(samples) or tells)
            if is_nothing and nothing:
                part, message = nothing
            else:
                part = Shipment(experience.select(samples), group_tokens if tells else group_tokens[:0])
                message = encode(part, route.fields)
                nothing = (part, message) if is_nothing else nothing
            peers = receivers(self.rank, route.destination.replica(dp), self.ranks_per_node)
            self._send(sent, OWN, message, [peer for peer in peers if peer != self.rank])
            if self.rank in peers:
                self.to_self[route.position] = part
        self.outbox[route.position] = sent

    def wait(self, route: Route) -> Shipment:
        """Everything that the source sent to this rank's replica, sorted by group id. Blocks."""
        replica = route.destination.replica(route.destination.coordinates(self.rank).dp)
        taken = intake(self.rank, route.source.owners(), replica, self.ranks_per_node)
        legs = [(rank, OWN) for rank in taken.owners]
        legs += [(taken.relay, RELAYED)] if taken.relay is not None else []
        arrived = self._receive(route, legs)
        if taken.followers:
            from_afar = together([arrived.pop((rank, OWN)) for rank in taken.from_afar])
            self._relay(route, from_afar, taken.followers)
            arrived[self.rank, RELAYED] = from_afar
        shipments = [*arrived.values()]
        if route.position in self.to_self:
            shipments.append(self.to_self.pop(route.position))
        return joined(shipments)

    def posted(self, position: int) -> Shipment:
        """What this rank posted there, in the fields that travel: a copy. Until it is retired."""
        posted = self.outbox[position]
        parts = joined([decode(header, body, posted.route.fields) for header, body in posted.messages])
        return replace(parts, group_tokens=posted.group_tokens.clone())

    def retire(self, transfers: Sequence[int]) -> None:
        """Wait until the sends of these positions have been received, and free their buffers."""
        for position in transfers:
            if position in self.outbox:
                self._await_delivery(self.outbox[position])
                del self.outbox[position]

    def finish(self) -> None:
        """Wait until neighbours have received what this rank passed on to them."""
        while self.relayed:
            self._await_delivery(self.relayed[0])
            del self.relayed[0]

    def _relay(self, route: Route, shipment: Shipment, followers: Sequence[int]) -> None:
        """Pass on what came from other nodes. What was passed on by earlier waits has been received by then, or soon
        is: those come before this one on every rank."""
        sent = Sent(route, shipment.group_tokens)
        self._send(sent, RELAYED, encode(shipment, route.fields), followers)
        self.finish()
        self.relayed.append(sent)

    def _send(self, sent: Sent, first_tag: int, message: Message, peers: Sequence[int]) -> None:
        header, body = message
        for peer in peers:
            for number, part in enumerate((header, body) if len(body) else (header,)):
                tag = sent.route.tag(first_tag + number)
                sent.works.append(started(dist.isend(part, peer, group=self.group, tag=tag)))
        sent.messages.append(message)
        sent.peers.update(peers)

    def _receive(self, route: Route, legs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Shipment]:
        """By sender and the first tag of its messages."""
        headers = {leg: torch.empty(header_length(route.fields), dtype=torch.int64) for leg in legs}
        self._fill(route, 0, headers)
        bodies = {leg: torch.empty(body_bytes(headers[leg], route.fields), dtype=torch.uint8) for leg in legs}
        self._fill(route, 1, {leg: body for leg, body in bodies.items() if len(body)})
        return {leg: decode(headers[leg], bodies[leg], route.fields) for leg in legs}

    def _fill(self, route: Route, part: int, buffers: Mapping[tuple[int, int], Tensor]) -> None:
        works = [
            started(dist.irecv(buffer, rank, group=self.group, tag=route.tag(first_tag + part)))
            for (rank, first_tag), buffer in buffers.items()
        ]
        self.waiter.wait(works, f"wait {route.name}", sorted({rank for rank, _ in buffers}), self.serve)

    def _await_delivery(self, sent: Sent) -> None:
        self.waiter.wait(sent.works, f"delivery of {sent.route.name}", sorted(sent.peers), self.serve)


def together(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, and what one of the parts says of all groups."""
    return Shipment(join(part.experience for part in parts), max((part.group_tokens for part in parts), key=len))


def joined(parts: Sequence[Shipment]) -> Shipment:
    """All samples of parts of one shipment, by group id, and what one of the parts says of all groups. A copy."""
    whole = together(parts)
    by_group = torch.argsort(whole.experience.group_ids, stable=True)
    return Shipment(whole.experience.select(by_group), whole.group_tokens.clone())


def started(work: dist.Work | None) -> dist.Work:
    """torch returns None to a rank outside the group; every rank is in the exchange's."""
    assert work is not None
    return work


def encode(shipment: Shipment, fields: Sequence[str]) -> Message:
    """Header [`header_length`] int64, its checksum last, and body [bytes] uint8: group_tokens, then each field, padded
    to whole 8 bytes."""
    experience, group_tokens = shipment.experience, shipment.group_tokens
    values = [getattr(experience, name) for name in fields]
    widths = [value.shape[1] for name, value in zip(fields, values, strict=True) if name in WIDE]
    counts = torch.tensor([experience.num_samples, int(experience.lengths.sum()), len(group_tokens), *widths])
    header = torch.cat([counts, torch.tensor([crc32(counts.numpy().tobytes())])])
    return header, torch.cat([as_bytes(group_tokens), *map(as_bytes, values)])


def decode(header: Tensor, body: Tensor, fields: Sequence[str]) -> Shipment:
    """The inverse of `encode`. Raises ExchangeError where they are of no shipment."""
    if len(body) != body_bytes(header, fields):
        raise ExchangeError(f"{len(body)} bytes of experience arrived; expected {body_bytes(header, fields)}")
    shapes = [(torch.int64, header[2:3].tolist()), *shapes_of(header, fields)]
    padded = torch.split(body, [padded_bytes(dtype, shape) for dtype, shape in shapes])
    group_tokens, *values = (
        piece[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        for piece, (dtype, shape) in zip(padded, shapes, strict=True)
    )
    shipment = Shipment(Experience(**dict(zip(fields, values, strict=True))), group_tokens)
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
    return padded_bytes(torch.int64, header[2:3].tolist()) + sum(
        padded_bytes(dtype, shape) for dtype, shape in shapes_of(header, fields)
    )


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
