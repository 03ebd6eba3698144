"""The copies of a reshard on one rank, as slices of one table: local ones, and per stage and round pack and unpack."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rltrain.models.table import Array, IntArray, TypeArray
from rltrain.reshard.fp8_scales import BlockTable
from rltrain.reshard.native import SLICE, quantises
from rltrain.reshard.plan import RankPlan
from rltrain.reshard.rounds import (
    NO_HEADERS,
    NOBODY,
    STAGES,
    Cut,
    Headers,
    Messages,
    ReadPlaces,
    Rounds,
    StageKind,
    StageStreams,
    cut,
    fixed_places,
)


@dataclass(frozen=True)
class BaseNumbers:
    """How a table numbers the memory that it addresses: source parameters, destination parameters, two staging buffers
    to send from, two to receive into, the table of block magnitudes, two slots that neighbours read, and two slots of
    each of these `neighbours`."""

    num_source: int
    num_destination: int
    neighbours: tuple[int, ...] = ()

    @property
    def destination(self) -> int:
        return self.num_source

    @property
    def send(self) -> int:
        return self.num_source + self.num_destination

    @property
    def receive(self) -> int:
        return self.send + 2

    @property
    def amax(self) -> int:
        return self.receive + 2

    @property
    def slots(self) -> int:
        return self.amax + 1

    def packed(self, kind: StageKind) -> int:
        """The first of two bases into which a stage packs."""
        return self.slots if kind.shared else self.send

    def received(self, kind: StageKind, peers: IntArray) -> IntArray:
        """The first of the two bases from which a stage unpacks what comes from each of `peers`."""
        if not kind.shared:
            return np.full(len(peers), self.receive)
        bases: IntArray = self.slots + 2 + 2 * np.searchsorted(self.neighbours, peers)
        return bases


FIRST_TAG = 2**30
"""Of messages: above the tags of whatever else uses their group."""


class Message(NamedTuple):
    """`num_bytes` at byte `offset` of base number `base`, to or from rank `peer`; `tag` is the same on both ends."""

    peer: int
    tag: int
    base: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class StageSteps:
    """A stage on one rank. Round k packs slices `pack[k]:pack[k + 1]` of the table, sends the messages `sends[k]` and
    receives `receives[k]`, and unpacks slices `unpack[k]:unpack[k + 1]`. What needs no staging buffer is outside of the
    rounds: `sends_in_place` and `receives_in_place`.

    In shared memory messages are unpacked from where their sender packed them, and several ranks may read the same.
    """

    kind: StageKind
    num_rounds: int
    sends: list[list[Message]]
    receives: list[list[Message]]
    sends_in_place: list[Message]
    receives_in_place: list[Message]
    pack: list[int]
    unpack: list[int]
    send_bytes: int
    """What a staging buffer, or a slot, to send from must hold."""
    receive_bytes: int
    header_bytes: int = 0
    """Of every message."""


@dataclass(frozen=True, eq=False)
class Steps:
    """All of a reshard on one rank: `slices` [SLICE], of which the first `num_copies` are the local copies."""

    slices: Array
    num_copies: int
    stages: tuple[StageSteps, ...]
    bases: BaseNumbers

    @property
    def slot_bytes(self) -> int:
        """What a slot in shared memory must hold."""
        return max(stage.send_bytes for stage in self.stages if stage.kind.shared)


def make_steps(
    plan: RankPlan,
    exchanged: tuple[StageStreams, ...],
    rounds: tuple[Rounds, ...],
    *,
    read: ReadPlaces = NOBODY,
    blocks: BlockTable | None = None,
    large_bytes: int | None = None,
    headers: Headers = NO_HEADERS,
) -> Steps:
    """`read` is of the neighbours that `exchanged` was made for; `blocks` must be given where the plan quantises;
    `large_bytes` is as in `cut`, for what does not pass through shared memory. A message with a
    header is staged, and is the only one of its stream in a round."""
    bases = BaseNumbers(len(plan.source_parameters), len(plan.destination_parameters), read.neighbours)
    builder = _Builder(bases, blocks)
    builder.add(_local_slices(plan, bases), plan.copies)
    stages = []
    for number, (stage, how) in enumerate(zip(exchanged, rounds, strict=True)):
        header_bytes = headers[number]
        types = plan.destination_types if stage.kind.fans_out else plan.source_types
        if stage.kind.shared or header_bytes:
            packs = cut(stage.packed, how, types, places=fixed_places(stage.packed.num_bytes, how, header_bytes))
            places = fixed_places(stage.receives.num_bytes, how, header_bytes)
            if stage.kind.shared:
                places = read.on(stage.receives.peers, number)
            unpacks = cut(stage.receives, how, plan.destination_types, places=places)
        else:
            packs = cut(stage.packed, how, types, large_bytes)
            unpacks = cut(stage.receives, how, plan.destination_types, large_bytes)
        stages.append(_stage_steps(plan, stage, (packs, unpacks), builder, FIRST_TAG + number, header_bytes))
    return Steps(np.concatenate(builder.tables), len(plan.copies), tuple(stages), bases)


def _stage_steps(
    plan: RankPlan,
    stage: StageStreams,
    ends: tuple[Cut, Cut],
    builder: "_Builder",
    first_tag: int,
    header_bytes: int,
) -> StageSteps:
    """`ends` is what the rank sends and what it receives, cut into rounds."""
    bases, kind, (packs, unpacks) = builder.bases, stage.kind, ends
    source, types = (bases.destination, plan.destination_types) if kind.fans_out else (0, plan.source_types)
    staging = bases.packed(kind)
    first_pack = builder.add(_pack_slices(packs, source, types, staging), packs.boxes)
    arriving = bases.received(kind, unpacks.boxes["peer"])
    unpack = _unpack_slices(unpacks, bases.destination, plan.destination_types, arriving)
    first_unpack = builder.add(unpack, unpacks.boxes)
    sends, sends_in_place = _addressed(packs.messages, source, staging, first_tag, header_bytes)
    arriving = bases.received(kind, unpacks.messages.peers)
    receives, receives_in_place = _addressed(unpacks.messages, bases.destination, arriving, first_tag, header_bytes)
    return StageSteps(
        kind,
        len(packs.starts) - 1,
        sends=_to_all_readers(sends, stage),
        receives=receives,
        sends_in_place=sends_in_place,
        receives_in_place=receives_in_place,
        pack=(first_pack + packs.starts).tolist(),
        unpack=(first_unpack + unpacks.starts).tolist(),
        send_bytes=packs.messages.staged_bytes,
        receive_bytes=0 if kind.shared else unpacks.messages.staged_bytes,
        header_bytes=header_bytes,
    )


def _to_all_readers(rounds: list[list[Message]], stage: StageStreams) -> list[list[Message]]:
    """The messages of packed streams, once for every peer that is sent one."""
    readers: dict[int, list[int]] = {peer: [] for peer in stage.packed.peers.tolist()}
    for peer, first in zip(stage.sends.peers.tolist(), stage.packed.peers[stage.packed_as].tolist(), strict=True):
        readers[first].append(peer)
    return [
        [message._replace(peer=peer) for message in messages for peer in readers[message.peer]] for messages in rounds
    ]


class _Builder:
    """Puts a table together."""

    def __init__(self, bases: BaseNumbers, blocks: BlockTable | None) -> None:
        self.bases = bases
        self.tables: list[Array] = []
        self._blocks, self._length = blocks, 0

    def add(self, slices: Array, boxes: Array) -> int:
        """Append `slices`, which copy `boxes`; the number of the first one."""
        _place_blocks(slices, boxes, self._blocks, self.bases.amax)
        self.tables.append(slices)
        self._length += len(slices)
        return self._length - len(slices)


def _addressed(
    messages: Messages, parameters: int, staging: int | IntArray, first_tag: int, header_bytes: int
) -> tuple[list[list[Message]], list[Message]]:
    """(staged messages of every round, with their headers, messages in place). Parameters are numbered from base
    `parameters`, staging buffers from `staging`."""
    number: IntArray = np.repeat(np.arange(len(messages.starts) - 1), np.diff(messages.starts))
    staged = messages.parameters < 0
    base = np.where(staged, staging + number % 2, parameters + messages.parameters)
    tags = first_tag + len(STAGES) * messages.numbers
    columns = (messages.peers, tags, base, messages.offsets - header_bytes, messages.sizes + header_bytes)
    rows = [Message(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    rounds: list[list[Message]] = [[] for _ in messages.starts[1:]]
    for i in np.flatnonzero(staged).tolist():
        rounds[number[i]].append(rows[i])
    return rounds, [rows[i] for i in np.flatnonzero(~staged).tolist()]


def _local_slices(plan: RankPlan, bases: BaseNumbers) -> Array:
    slices = _blank(plan.copies)
    for side, name, base in (("src", "source", 0), ("dst", "destination", bases.destination)):
        slices[f"{side}_base"] = base + plan.copies[f"{name}_parameter"]
        slices[f"{side}_offset"], slices[f"{side}_stride"] = (plan.copies[f"{name}_{f}"] for f in ("offset", "stride"))
    slices["src_type"] = plan.source_types[plan.copies["tensor"]]
    slices["dst_type"] = plan.destination_types[plan.copies["tensor"]]
    return slices


def _pack_slices(made: Cut, base: int, types: TypeArray, staging: int) -> Array:
    slices = _blank(made.boxes)
    _at_parameter(slices, "src", made.boxes, base, types)
    _at_staging(slices, "dst", made, staging)
    return slices


def _unpack_slices(made: Cut, base: int, types: TypeArray, staging: IntArray) -> Array:
    slices = _blank(made.boxes)
    _at_staging(slices, "src", made, staging)
    _at_parameter(slices, "dst", made.boxes, base, types)
    return slices


def _blank(boxes: Array) -> Array:
    slices = np.zeros(len(boxes), dtype=SLICE)
    slices["rows"], slices["cols"], slices["amax_base"] = boxes["rows"], boxes["cols"], -1
    return slices


def _at_parameter(slices: Array, side: str, boxes: Array, base: int, types: TypeArray) -> None:
    slices[f"{side}_base"] = base + boxes["parameter"]
    slices[f"{side}_offset"], slices[f"{side}_stride"] = boxes["offset"], boxes["stride"]
    slices[f"{side}_type"] = types[boxes["tensor"]]


def _at_staging(slices: Array, side: str, made: Cut, base: int | IntArray) -> None:
    """Rounds take turns between the two buffers from `base`, which may be another one for each box; a box lies there
    without gaps."""
    number: IntArray = np.repeat(np.arange(len(made.starts) - 1), np.diff(made.starts))
    slices[f"{side}_base"] = base + number % 2
    slices[f"{side}_offset"], slices[f"{side}_stride"] = made.staged, made.boxes["cols"]
    slices[f"{side}_type"] = made.types


def _place_blocks(slices: Array, boxes: Array, blocks: BlockTable | None, base: int) -> None:
    rows = np.flatnonzero(quantises(slices))
    if not len(rows):
        return
    if blocks is None:
        raise ValueError("the destination quantises to FP8: the places of its blocks must be given")
    places = blocks.places(boxes[rows])
    for name in ("amax_offset", "amax_stride", "row_phase", "col_phase"):
        slices[name][rows] = places[name]
    slices["amax_base"][rows] = base
