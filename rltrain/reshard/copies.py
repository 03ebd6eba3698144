"""The copies of a reshard on one rank, as slices of one table. There are local copies, and a pack and an unpack per
stage and round."""

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
    """The numbers of a table's bases.

    Source parameters come first. Then come destination parameters, two staging buffers to send from, two to receive
    into, and the table of block magnitudes. The last are this rank's two slots in shared memory, and two slots of each
    of these `neighbours`.
    """

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
        """Returns the first of two bases for packing a stage."""
        return self.slots if kind.shared else self.send

    def received(self, kind: StageKind, peers: IntArray) -> IntArray:
        """Returns the first of two bases for unpacking a stage, for each of `peers`."""
        if not kind.shared:
            return np.full(len(peers), self.receive)
        bases: IntArray = self.slots + 2 + 2 * np.searchsorted(self.neighbours, peers)
        return bases


FIRST_TAG = 2**30
"""The first tag of messages, above the tags of other code on the group."""


class Message(NamedTuple):
    """A message of `num_bytes` at byte `offset` of base number `base`, to or from rank `peer`. `tag` is the same on
    both ends."""

    peer: int
    tag: int
    base: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class StageSteps:
    """A stage on one rank.

    Round k packs slices `pack[k]:pack[k + 1]` of the table, sends the messages `sends[k]`, receives `receives[k]` and
    unpacks slices `unpack[k]:unpack[k + 1]`. Messages without staging are outside of the rounds, in `sends_in_place`
    and `receives_in_place`.

    In shared memory, receivers unpack messages from the memory of their sender. Several ranks may read the same
    message.
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
    """Bytes of a staging buffer, or of a slot, to send from."""
    receive_bytes: int
    header_bytes: int = 0
    """Bytes of every message's header."""


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a reshard on one rank. The first `num_copies` of `slices` [SLICE] are the local copies."""

    slices: Array
    num_copies: int
    stages: tuple[StageSteps, ...]
    bases: BaseNumbers

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in shared memory."""
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
    """Returns the steps of `plan` on its rank.

    `read` has the neighbours used for `exchanged`. `blocks` is required if the plan quantises. `large_bytes` is as in
    `cut`, for messages outside shared memory. A message with a header is staged, and is the only one of its stream in a
    round.
    """
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
    """Returns the steps of a stage. `ends` are the rank's sends and receives, cut into rounds."""
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
    """Returns the messages of packed streams, repeated for each receiver."""
    readers: dict[int, list[int]] = {peer: [] for peer in stage.packed.peers.tolist()}
    for peer, first in zip(stage.sends.peers.tolist(), stage.packed.peers[stage.packed_as].tolist(), strict=True):
        readers[first].append(peer)
    return [
        [message._replace(peer=peer) for message in messages for peer in readers[message.peer]] for messages in rounds
    ]


class _Builder:
    """The slices of a table, collected part by part."""

    def __init__(self, bases: BaseNumbers, blocks: BlockTable | None) -> None:
        self.bases = bases
        self.tables: list[Array] = []
        self._blocks, self._length = blocks, 0

    def add(self, slices: Array, boxes: Array) -> int:
        """Appends `slices`, the copies of `boxes`. Returns the number of the first one."""
        _place_blocks(slices, boxes, self._blocks, self.bases.amax)
        self.tables.append(slices)
        self._length += len(slices)
        return self._length - len(slices)


def _addressed(
    messages: Messages, parameters: int, staging: int | IntArray, first_tag: int, header_bytes: int
) -> tuple[list[list[Message]], list[Message]]:
    """Returns (staged messages of every round with their headers, messages in place). `parameters` is the first base of
    the parameters, and `staging` the first base of the staging buffers."""
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
    """Sets one side of slices to staging buffers. Rounds alternate between the two buffers from `base` on, and each box
    may have another `base`. A box has no gaps there."""
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
