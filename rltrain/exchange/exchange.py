"""Moves experience between roles, from the owner of each source replica to the ranks of each destination replica.

A prompt group is never split. `assign_groups` chooses its destination replica, and every rank computes the same choice
from the token counts of all groups. With `share_prefixes` a prefix counts once for the samples that share it.
`receivers` and `intake` choose the ranks on the way.

One owner per destination replica also sends the token counts of all groups and the source replica of each. The replica
derives from them the other owners with data for it. Those owners send only to replicas with groups of theirs.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
from torch import Tensor

from rltrain.data.experience import FIELDS, WIDE, Experience, assign_groups, join
from rltrain.errors import ExchangeError
from rltrain.exchange.image_requests import asked, decode_images, encode_images, keys_of
from rltrain.exchange.transport import InTransit, Transport
from rltrain.runtime.grid import Grid
from rltrain.runtime.image_files import ImageStore
from rltrain.runtime.job_store import Waiter

# Routing within a replica.
#
# A replica's data crosses the network once per node of the replica. An owner sends to all ranks of the replica on its
# own node, and to one rank on every other node. That rank relays the messages of all other nodes to its neighbours.
#
# So a rank may also wait for another rank of its replica. This adds no deadlock, because the task after the wait needs
# the other rank anyway.


@dataclass(frozen=True)
class Intake:
    """The senders of a replica's data to one rank, and the neighbours to which the rank relays it."""

    owners: tuple[int, ...]
    """Other ranks that send their data directly to this one."""
    from_afar: tuple[int, ...] = ()
    """Owners with messages to be relayed by this rank."""
    followers: tuple[int, ...] = ()
    """Neighbours that get the relayed messages."""
    relay: int | None = None
    """The neighbour that relays data from other nodes to this rank."""


def receivers(owner: int, replica: Sequence[int], ranks_per_node: int) -> list[int]:
    """Returns the ranks of `replica` that get messages directly from `owner`. It includes `owner` if it is in the
    replica."""
    entrances: dict[int, int] = {}
    for rank in replica:
        entrances.setdefault(rank // ranks_per_node, rank)
    here = owner // ranks_per_node
    return [rank for rank in replica if rank // ranks_per_node == here or rank == entrances[rank // ranks_per_node]]


def intake(rank: int, owners: Sequence[int], replica: Sequence[int], ranks_per_node: int) -> Intake:
    """Returns the intake of `rank` in `replica` for data from `owners`. It is the inverse of `receivers`."""
    here = rank // ranks_per_node
    others = tuple(owner for owner in owners if owner != rank)
    entrance, *behind = (peer for peer in replica if peer // ranks_per_node == here)
    near = tuple(owner for owner in others if owner // ranks_per_node == here)
    if len(near) == len(others) or not behind:
        return Intake(others)
    if rank != entrance:
        return Intake(near, relay=entrance)
    return Intake(others, from_afar=tuple(o for o in others if o not in near), followers=tuple(behind))


# Shipments of experience and their messages: an integer header and one buffer of bytes.

HEADER = ("num_samples", "num_tokens", "num_groups")
ALIGNMENT_BYTES = HEADER_ITEM_BYTES = 8
Message = tuple[Tensor, Tensor]
"""(header, body)."""


@dataclass(frozen=True)
class Shipment:
    """Samples on their way between roles, and metadata of all groups of the chunk.

    `experience` has some of the chunk's samples. `group_tokens` [groups] has the token count of every group of the
    chunk, by which replicas are balanced. `holders` [groups] has the source replica of every group.
    """

    experience: Experience
    group_tokens: Tensor
    holders: Tensor

    def with_fields(self, **values: Tensor) -> "Shipment":
        return replace(self, experience=self.experience.with_fields(**values))

    def without_samples(self) -> "Shipment":
        return replace(self, experience=self.experience.select(torch.empty(0, dtype=torch.int64)))


def together(parts: Sequence[Shipment]) -> Shipment:
    """Returns all samples of the parts of one shipment, with the group metadata of one part."""
    told = max(parts, key=lambda part: len(part.group_tokens))
    return replace(told, experience=join(part.experience for part in parts))


def joined(parts: Sequence[Shipment]) -> Shipment:
    """Returns a copy of all samples of the parts of one shipment, by group id, with the group metadata of one part."""
    whole = together(parts)
    by_group = torch.argsort(whole.experience.group_ids, stable=True)
    return Shipment(whole.experience.select(by_group), whole.group_tokens.clone(), whole.holders.clone())


def encode(shipment: Shipment, fields: Sequence[str]) -> Message:
    """Encodes a shipment as (header, body).

    The header is int64 of length `header_length`, with its checksum last. The body is uint8: `group_tokens` and
    `holders` as int32, then each field, each padded to a multiple of 8 bytes.
    """
    experience, group_tokens, holders = shipment.experience, shipment.group_tokens, shipment.holders
    values = [getattr(experience, name) for name in fields]
    widths = [value.shape[1] for name, value in zip(fields, values, strict=True) if name in WIDE]
    counts = torch.tensor([experience.num_samples, int(experience.lengths.sum()), len(group_tokens), *widths])
    header = torch.cat([counts, torch.tensor([crc32(counts.numpy().tobytes())])])
    return header, torch.cat([as_bytes(values) for values in (group_tokens.int(), holders.int(), *values)])


def opened(message: Tensor, fields: Sequence[str]) -> Shipment:
    """Decodes a message with header and body in one uint8 tensor. Raises ExchangeError if it is damaged."""
    num_bytes = HEADER_ITEM_BYTES * header_length(fields)
    if len(message) < num_bytes:
        raise ExchangeError(f"{len(message)} bytes of experience arrived; expected a header of at least {num_bytes}")
    return decode(message[:num_bytes].view(torch.int64), message[num_bytes:], fields)


def decode(header: Tensor, body: Tensor, fields: Sequence[str]) -> Shipment:
    """Decodes a shipment made by `encode`. Raises ExchangeError if header and body do not belong to one shipment."""
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
            f"samples of {lengths.tolist()[:8]} tokens arrived (the first 8); expected {int(header[1])} in all. They "
            "were damaged in transit, or ranks run different versions of rltrain"
        )
    return shipment


def header_length(fields: Sequence[str]) -> int:
    return len(HEADER) + sum(name in WIDE for name in fields) + 1


def body_bytes(header: Tensor, fields: Sequence[str]) -> int:
    """Returns the size of the body in bytes. Raises ExchangeError if the header's checksum is wrong."""
    if crc32(header[:-1].numpy().tobytes()) != int(header[-1]):
        raise ExchangeError(
            f"the header of a shipment, {header.tolist()}, does not match its checksum: it was damaged in "
            "transit, or ranks run different versions of rltrain"
        )
    of_groups = padded_bytes(torch.int32, header[2:3].tolist())
    return 2 * of_groups + sum(padded_bytes(dtype, shape) for dtype, shape in shapes_of(header, fields))


def shapes_of(header: Tensor, fields: Sequence[str]) -> list[tuple[torch.dtype, list[int]]]:
    """Returns (dtype, shape) of each field's tensor."""
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


OWN, RELAYED, REQUEST, IMAGES = range(4)
"""Kinds of messages: from the owner itself, or relayed from owners on other nodes. A receiver on another node requests
the missing images of a message, and the owner sends them."""
Leg = tuple[int, int]
"""(sending rank, OWN or RELAYED)."""


@dataclass(frozen=True)
class Route:
    """One transfer of one step. `position` of its post in the order gives it unique message tags."""

    name: str
    source: Grid
    destination: Grid
    fields: tuple[str, ...]
    position: int
    num_blocks: int = 1

    def tag(self, part: int) -> int:
        return 4 * self.position + part

    def replica_of(self, group_tokens: Tensor) -> Tensor:
        """Returns the destination replica of each group, shape [groups]."""
        return assign_groups(group_tokens, self.destination.dp, self.num_blocks)

    def teller(self, dp: int) -> int:
        """Returns the owner that sends the metadata of all groups to destination replica `dp`."""
        return self.source.owner(dp % self.source.dp)


@dataclass(frozen=True)
class Sent:
    """The messages sent by this rank over a route. They are kept until all have been received."""

    route: Route
    of_groups: Shipment
    """Metadata of all groups, without samples."""
    deliveries: list[InTransit] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


class Exchange:
    """Both ends of all transfers of this rank. Sent messages stay in an outbox until `retire`.

    `ranks_per_node` determines the messages between nodes. `serve` is called while this rank waits, to do work for
    others. `images` has the images of experience on this rank's node. `wait` adds those that it lacks.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        waiter: Waiter,
        ranks_per_node: int,
        serve: Callable[[], None] | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self.images = images
        self.image_bytes_sent = 0
        """Bytes of pixels sent to other nodes."""
        self.rank = rank
        self.transport = transport
        self.waiter = waiter
        self.ranks_per_node = ranks_per_node
        self.serve = serve
        self.outbox: dict[int, Sent] = {}
        self.relayed: list[Sent] = []
        self.to_self: dict[int, Shipment] = {}

    def post(self, route: Route, shipment: Shipment) -> None:
        """Sends the route's fields without blocking. It has no effect on ranks that own no source replica.

        Raises ExchangeError if a sample's group is held by another replica according to `holders`.
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
                f"{route.name} (the first 8), but other ranks should have them. Please report this bug of rltrain"
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
        """Waits for all data of this rank's replica and returns it sorted by group id."""
        dp = route.destination.coordinates(self.rank).dp
        arrived = self._receive(route, self._intake_from(route, dp, [route.teller(dp)]))
        of_self = [self.to_self.pop(route.position)] if route.position in self.to_self else []
        told = together([*arrived.values(), *of_self])
        replica_of = route.replica_of(told.group_tokens)
        taken = self._intake_from(route, dp, senders(route, told.holders, replica_of == dp, route.teller(dp)))
        arrived |= self._receive(route, taken, already=arrived.keys())
        for (owner, kind), shipment in sorted(arrived.items(), key=lambda one: one[0]):
            if kind == OWN and not self._is_near(owner):
                self._fetch_images(route, owner, keys_of(shipment.experience))
        if taken.followers:
            from_afar = together([arrived.pop((rank, OWN)) for rank in taken.from_afar])
            self._relay(route, from_afar, taken.followers)
            arrived[self.rank, RELAYED] = from_afar
        return replace(joined([*arrived.values(), *of_self]), holders=replica_of)

    def posted(self, position: int) -> Shipment:
        """Returns a copy of the shipment posted at `position`, with its travelling fields. Only valid until it is
        retired."""
        sent = self.outbox[position]
        return joined([sent.of_groups, *(decode(*message, sent.route.fields) for message in sent.messages)])

    def retire(self, transfers: Sequence[int]) -> None:
        """Waits until the messages posted at these positions have been received. Then frees their buffers."""
        for position in transfers:
            if position in self.outbox:
                self._await(self.outbox[position].deliveries, f"delivery of {self.outbox[position].route.name}")
                del self.outbox[position]

    def finish(self) -> None:
        """Waits until all messages relayed by this rank have been received.

        A rank relays data from other nodes to the ranks of its replica on its own node. Messages of `post` are not
        included, since `retire` waits for them.
        """
        while self.relayed:
            self._await(self.relayed[0].deliveries, f"delivery of {self.relayed[0].route.name}")
            del self.relayed[0]

    def _intake_from(self, route: Route, dp: int, owners: Sequence[int]) -> Intake:
        """Returns this rank's intake of data from `owners` to replica `dp`."""
        return intake(self.rank, owners, route.destination.replica(dp), self.ranks_per_node)

    def _relay(self, route: Route, shipment: Shipment, followers: Sequence[int]) -> None:
        """Relays data from other nodes. Waits until earlier relayed messages are received, which cannot block for long:
        every rank makes those waits before this one."""
        sent = Sent(route, shipment.without_samples())
        self._send(sent, RELAYED, shipment, followers)
        self.finish()
        self.relayed.append(sent)

    def _is_near(self, peer: int) -> bool:
        """Returns whether a rank is on this node."""
        return peer // self.ranks_per_node == self.rank // self.ranks_per_node

    def _fetch_images(self, route: Route, owner: int, keys: Sequence[int]) -> None:
        """Adds the images that this node lacks from the node of `owner`. Only one rank of a node does so at a time."""
        if self.images is None or not keys:
            return
        store, what = self.images, f"images of {route.name}"
        self.waiter.until(store.begin_fetch, what, self._neighbours, self.serve)
        try:
            request = self.transport.send(owner, route.tag(REQUEST), [torch.tensor(store.missing(keys))])
            answer = self.transport.receive(owner, route.tag(IMAGES))
            self._await([request, answer], what)
            for key, pixels in decode_images(answer.message):
                store.put(key, pixels, step=0)
        finally:
            store.end_fetch()

    @property
    def _neighbours(self) -> list[int]:
        """The other ranks of this node."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return [rank for rank in range(first, first + self.ranks_per_node) if rank != self.rank]

    def _offer_images(self, sent: Sent, peers: Sequence[int]) -> None:
        """Answers the requests of ranks on other nodes for images."""
        far = [peer for peer in peers if not self._is_near(peer)]
        tags = sent.route.tag(REQUEST), sent.route.tag(IMAGES)
        sent.deliveries.extend(self.transport.answer(peer, tags[0], self._images_asked, tags[1]) for peer in far)

    def _images_asked(self, message: Tensor) -> list[Tensor]:
        """Returns the answer to a request. Called by the thread of the transport."""
        assert self.images is not None, "only experience of runs with images has keys"
        answer = encode_images(self.images, asked(message))
        self.image_bytes_sent += sum(part.numel() for part in answer[1:])
        return answer

    def _send(self, sent: Sent, leg: int, shipment: Shipment, peers: Sequence[int]) -> None:
        if leg == OWN and self.images is not None and keys_of(shipment.experience):
            self._offer_images(sent, peers)
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
    """Returns the owners with data for a replica, including `teller`. `is_due` marks the replica's groups.

    Raises ExchangeError if a group's holder is not a replica of the source.
    """
    owners, found = route.source.owners(), holders[is_due].unique().tolist()
    if found and not (found[0] >= 0 and found[-1] < len(owners)):
        raise ExchangeError(
            f"groups of {route.name} name the source replicas {found[:8]} (the first 8), but there are {len(owners)}: "
            "the data was damaged in transit, or ranks run different versions of rltrain"
        )
    return sorted({teller, *(owners[holder] for holder in found)})


# Experience in checkpoints: shipments as tensors of a file, and their new senders.

Key = tuple[str, str, int, int]
"""(source role, transfer, step, chunk)."""

GROUP_TOKENS = "group_tokens"


def as_tensors(shipments: Mapping[Key, Shipment]) -> dict[str, Tensor]:
    """Returns every field under the name "source/transfer/step/chunk/field"."""
    return {
        "/".join([*map(str, key), name]): values
        for key, shipment in shipments.items()
        for name, values in {**shipment.experience.columns(), GROUP_TOKENS: shipment.group_tokens}.items()
    }


def read_parts(saved: Sequence[Mapping[str, Tensor]]) -> dict[Key, list[Shipment]]:
    """Returns the parts of every shipment, one for each saving rank, in the order of the ranks."""
    parts: dict[Key, list[Shipment]] = {}
    for tensors in saved:
        columns: dict[Key, dict[str, Tensor]] = {}
        for path, values in tensors.items():
            source, transfer, step, chunk, name = path.split("/")
            columns.setdefault((source, transfer, int(step), int(chunk)), {})[name] = values
        for key, of_shipment in columns.items():
            group_tokens = of_shipment.pop(GROUP_TOKENS)
            unassigned = torch.zeros_like(group_tokens)  # until `share` assigns them
            parts.setdefault(key, []).append(Shipment(Experience(**of_shipment), group_tokens, unassigned))
    return parts


def share(parts: Sequence[Shipment], replica: int, num_replicas: int) -> Shipment:
    """Returns the shipment to be sent by `replica`. Part i belongs to replica i mod num_replicas. It may have no
    samples."""
    holders = torch.zeros_like(parts[0].group_tokens)
    for number, part in enumerate(parts):
        holders[part.experience.group_ids] = number % num_replicas
    mine = parts[replica::num_replicas]
    if not mine:
        return replace(parts[0].without_samples(), holders=holders)
    return replace(joined(mine), holders=holders)
