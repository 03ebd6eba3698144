"""Cuts the exchanges of ranks into rounds of bounded size. Both ends cut alike, without communication.

All bytes from one rank to another in a stage form one stream. All ranks cut all their streams into the same number of
rounds, each stream into about equal runs. So no rank packs or receives more than a bucket in a round.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrain.models.table import ITEM_BYTES, Array, IntArray, TypeArray, wire_types
from rltrain.reshard.layout import BOX_FIELDS, elements, num_bytes
from rltrain.reshard.plan import RankPlan

ALIGNMENT = 16
"""Bytes. Runs begin at multiples of it in their streams and in staging buffers."""

MAX_GRANULE = 2**16
"""Bytes. Runs are multiples of a granule, so ranks with little to exchange need few messages."""


@dataclass(frozen=True, eq=False)
class Streams:
    """The sends or receives of one rank in a stage, as one stream per peer.

    `boxes` [TRANSFER] are sorted by peer. Box i has type `types[i]` on the wire and begins at byte `begin[i]` of its
    peer's stream. Within a stream wide elements precede narrow ones, so each is at a multiple of its size without
    padding. `peers` are ascending. Stream p has `num_bytes[p]` bytes and the boxes `first[p]:first[p + 1]`.
    """

    boxes: Array
    types: TypeArray
    begin: IntArray
    peers: IntArray
    first: IntArray
    num_bytes: IntArray

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


def streams(transfers: Array, types: TypeArray) -> Streams:
    """Returns the streams of `transfers` [TRANSFER]. These must be sorted by peer. `types` [tensors] are the types on
    the wire."""
    item = ITEM_BYTES[types[transfers["tensor"]]]
    if len(item) and item.min() != item.max():
        transfers = transfers[np.lexsort((-item, transfers["peer"]))]
    wire = types[transfers["tensor"]]
    size = num_bytes(transfers, types)
    peers, first = np.unique(transfers["peer"], return_index=True)
    end = np.cumsum(size)
    whole = np.diff(np.append((end - size)[first], end[-1:] if len(end) else 0))[: len(peers)]
    begin = end - size - np.repeat((end - size)[first], np.diff(np.append(first, len(size))))
    return Streams(transfers, wire, begin, peers.astype(np.int64), np.append(first, len(size)), whole)


def checksums(made: Streams) -> IntArray:
    """Returns a checksum of each stream, shape [peers]. It depends on every box, its type and its place. It is equal on
    both ends if they agree."""
    if not len(made.boxes):
        return np.zeros(0, dtype=np.int64)
    mixed = made.begin.astype(np.uint64)
    for name in BOX_FIELDS:
        mixed = _mix(mixed ^ made.boxes[name].astype(np.uint64))
    mixed = _mix(mixed ^ made.types.astype(np.uint64))
    return np.add.reduceat(mixed, made.first[:-1]).view(np.int64)


def stream_numbers(made: Streams, stage: int, sources: IntArray | int, destinations: IntArray | int) -> int:
    """Returns a sum over all streams, in 64 bits. Each stream contributes a number made from all its properties, both
    ends included."""
    mixed = checksums(made).view(np.uint64)
    for part in (stage, sources, destinations, made.num_bytes):
        mixed = _mix(mixed ^ np.broadcast_to(part, len(made.peers)).astype(np.uint64))
    return int(mixed.sum(dtype=np.uint64))


def distinct(made: Streams) -> tuple[Streams, IntArray]:
    """Returns (streams without duplicates, the number of each given stream there). Streams with the same boxes are
    duplicates."""
    _, first, kind = np.unique(checksums(made), return_index=True, return_inverse=True)
    kept = np.sort(first)
    counts = np.diff(made.first)
    boxes = np.isin(np.repeat(np.arange(len(counts)), counts), kept)
    ends = np.cumsum(counts[kept])
    result = Streams(
        made.boxes[boxes],
        made.types[boxes],
        made.begin[boxes],
        made.peers[kept],
        np.append(0, ends),
        made.num_bytes[kept],
    )
    return result, np.searchsorted(kept, first[kind])


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spreads numbers over 64 bits. Products wrap around."""
    numbers = (numbers + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    result: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(29))
    return result


@dataclass(frozen=True)
class Rounds:
    """The cut of all ranks' streams in a stage. Each stream has `count` runs, ending at multiples of `granule`
    bytes."""

    count: int
    granule: int

    def bounds(self, num_bytes: IntArray) -> IntArray:
        """Returns the bounds of the runs of streams with `num_bytes`, shape [streams, count + 1]. Run k has the bytes
        from bound k to bound k + 1."""
        shares = np.arange(self.count + 1)
        # In two steps, because bytes x rounds may not fit into 64 bits.
        whole, rest = np.divmod(num_bytes[:, None], max(self.count, 1))
        bounds: IntArray = (whole * shares + rest * shares // max(self.count, 1)) // self.granule * self.granule
        bounds[:, -1] = num_bytes
        return bounds


def choose_rounds(max_bytes: int, max_peers: int, bucket_bytes: int) -> Rounds:
    """Returns the fewest rounds with at most `bucket_bytes` packed or received by any rank in each. Alignment is
    included.

    `max_bytes` is the maximum sent or received by any rank in the stage. `max_peers` is the maximum number of peers.
    Raises ValueError if the bucket cannot hold a message per peer.
    """
    if max_bytes == 0:
        return Rounds(0, ALIGNMENT)
    granule = MAX_GRANULE
    # A run is at most a granule longer than an equal share, and a message is rounded up to the next place.
    while granule > ALIGNMENT and 8 * granule * max_peers > bucket_bytes:
        granule //= 2
    shared = bucket_bytes - 2 * granule * max_peers
    if shared <= 0:
        raise ValueError(
            f"buckets of {bucket_bytes} bytes are too small for {max_peers} peers: expected more than "
            f"{2 * granule * max_peers} (config key weight_sync.bucket_mb)"
        )
    return Rounds(-(-max_bytes // shared), granule)


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages sent or received by a rank in a stage. Round k has the messages `starts[k]:starts[k + 1]`.

    Message i is number `numbers[i]` between this rank and rank `peers[i]`, on both of them. It is `sizes[i]` bytes at
    byte `offsets[i]` of parameter `parameters[i]`. If this is -1, it is in the staging buffer.
    """

    peers: IntArray
    numbers: IntArray
    sizes: IntArray
    offsets: IntArray
    parameters: IntArray
    starts: IntArray

    @property
    def staged_bytes(self) -> int:
        """Maximum bytes of the staging buffer used by a round."""
        return int((self.offsets + self.sizes)[self.parameters < 0].max(initial=0))


@dataclass(frozen=True, eq=False)
class Cut:
    """Streams cut into rounds, with the boxes to be packed or unpacked.

    Round k has the `boxes` [TRANSFER] from `starts[k]` to `starts[k + 1]`. Box i has type `types[i]` in the staging
    buffer and begins at its element `staged[i]`.
    """

    boxes: Array
    types: TypeArray
    staged: IntArray
    starts: IntArray
    messages: Messages


def cut(
    made: Streams, rounds: Rounds, held: TypeArray, large_bytes: int | None = None, places: IntArray | None = None
) -> Cut:
    """Cuts streams into rounds. A box in several rounds is cut between elements: part of a row, whole rows, part of a
    row.

    With `large_bytes`, a box of at least this size has separate messages, on both ends of a stream. A message is
    transferred in place if its elements are adjacent in one parameter and have their type on the wire. All others are
    staged. Without `large_bytes`, every run is one staged message.

    `held` [tensors] are the types in the parameters. `places` [streams] is the byte of the staging buffer for each
    stream's runs, in all rounds. Without it, the runs of a round follow each other.
    """
    if len(made.boxes) == 0:
        return _nothing(made, rounds)
    bounds = rounds.bounds(made.num_bytes)
    whole, low, high, run = _runs_of(made, bounds)
    index, fields = _rectangles(made.boxes[whole], low, high)
    whole, run = whole[index], run[index]
    stream, number = np.divmod(run, rounds.count + 1)
    order = np.argsort(number, kind="stable")
    whole, stream, number = whole[order], stream[order], number[order]
    boxes, types = made.boxes[whole], made.types[whole]
    for name, values in fields.items():
        boxes[name] = values[order]
    item = ITEM_BYTES[types]
    segment = _segments(made, large_bytes)[whole]
    first = np.flatnonzero(_changes(number, stream, segment))
    message = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(whole))))
    in_place = np.zeros(len(first), dtype=bool)
    if large_bytes is not None:
        in_place = _in_place(boxes, held[boxes["tensor"]] == types, message, len(first))
    num_bytes = elements(boxes) * item
    staged = _staged(np.where(in_place[message], 0, num_bytes), number, stream, places)
    messages = Messages(
        peers=made.peers[stream[first]],
        numbers=_numbers_within(stream[first]),
        sizes=np.bincount(message, weights=num_bytes, minlength=len(first)).astype(np.int64),
        offsets=np.where(in_place, boxes["offset"][first] * item[first], staged[first]),
        parameters=np.where(in_place, boxes["parameter"][first], -1),
        starts=np.searchsorted(number[first], np.arange(rounds.count + 1)),
    )
    kept = np.flatnonzero(~in_place[message])
    starts = np.searchsorted(number[kept], np.arange(rounds.count + 1))
    return Cut(boxes[kept], types[kept], staged[kept] // item[kept], starts, messages)


def _nothing(made: Streams, rounds: Rounds) -> Cut:
    none, starts = np.zeros(0, dtype=np.int64), np.zeros(rounds.count + 1, dtype=np.int64)
    return Cut(made.boxes, made.types, none, starts, Messages(none, none, none, none, none, starts))


def fixed_places(num_bytes: IntArray, rounds: Rounds, header_bytes: int = 0) -> IntArray:
    """Returns places for `cut` with room for the longest run of each stream, shape [streams]. There are `header_bytes`,
    a multiple of ALIGNMENT, before each."""
    longest = np.diff(rounds.bounds(num_bytes), axis=1).max(axis=1, initial=0)
    room = -(-longest // ALIGNMENT) * ALIGNMENT
    places: IntArray = np.cumsum(room + header_bytes) - room
    return places


def _staged(num_bytes: IntArray, number: IntArray, stream: IntArray, places: IntArray | None) -> IntArray:
    """Returns the first byte of each box in its round's staging buffer, shape [boxes]. A box takes `num_bytes` of it.

    Runs begin at multiples of ALIGNMENT. Within a run boxes follow each other, wide elements before narrow ones.
    """
    end = np.cumsum(num_bytes)
    run = np.flatnonzero(_changes(number, stream))
    length = np.diff(np.append(run, len(end)))
    before = (end - num_bytes)[run]
    place = places[stream[run]] if places is not None else _in_turn(np.diff(np.append(before, end[-1:])), number[run])
    staged: IntArray = end - num_bytes + np.repeat(place - before, length)
    return staged


def _in_turn(size: IntArray, number: IntArray) -> IntArray:
    """Returns the first byte of each run of `size` bytes in its round's staging buffer, shape [runs]."""
    size = -(-size // ALIGNMENT) * ALIGNMENT
    place: IntArray = np.cumsum(size) - size
    first = np.flatnonzero(_changes(number))
    place -= np.repeat(place[first], np.diff(np.append(first, len(number))))
    return place


def _numbers_within(group: IntArray) -> IntArray:
    """Returns the number of earlier rows in each row's group, shape [rows]."""
    order = np.argsort(group, kind="stable")
    _, begins, counts = np.unique(group[order], return_index=True, return_counts=True)
    numbers = np.empty(len(group), dtype=np.int64)
    numbers[order] = np.arange(len(group)) - np.repeat(begins, counts)
    return numbers


def _changes(*columns: IntArray) -> NDArray[np.bool_]:
    """Returns whether each row differs from the previous one. The first one does."""
    changes: NDArray[np.bool_] = np.logical_or.reduce([np.diff(column, prepend=-1) != 0 for column in columns])
    return changes


def _segments(made: Streams, large_bytes: int | None) -> IntArray:
    """Returns ascending numbers, shape [boxes]. Neighbours in a stream have equal numbers if they share messages."""
    size = elements(made.boxes) * ITEM_BYTES[made.types]
    large = size >= large_bytes if large_bytes is not None else np.zeros(len(size), dtype=bool)
    begins = large | np.concatenate([[False], large])[: len(large)] | (made.begin == 0)
    segments: IntArray = np.cumsum(begins)
    return segments


def _in_place(boxes: Array, same_type: NDArray[np.bool_], message: IntArray, num_messages: int) -> NDArray[np.bool_]:
    """Returns whether each message can be transferred in place, shape [messages]. Its elements must be adjacent in one
    parameter, in order, and have their type on the wire."""
    apart = ~same_type | (boxes["rows"] > 1) & (boxes["stride"] != boxes["cols"])
    end = boxes["offset"] + elements(boxes)
    follows = (boxes["offset"][1:] == end[:-1]) & (boxes["parameter"][1:] == boxes["parameter"][:-1])
    apart[1:] |= ~follows & (message[1:] == message[:-1])
    in_place: NDArray[np.bool_] = np.bincount(message, weights=apart, minlength=num_messages) == 0
    return in_place


def _runs_of(made: Streams, bounds: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns (box, first element, end, run). A box occurs once for every run with elements of it. Run k of stream p
    has the number p * (rounds + 1) + k."""
    stream = np.repeat(np.arange(len(made.peers)), np.diff(made.first))
    base = np.cumsum(made.num_bytes) - made.num_bytes
    item = ITEM_BYTES[made.types]
    begin = base[stream] + made.begin
    end = begin + elements(made.boxes) * item
    flat = (base[:, None] + bounds).reshape(-1)
    first = np.searchsorted(flat, begin, side="right") - 1
    count = np.searchsorted(flat, end - 1, side="right") - first
    box = np.repeat(np.arange(len(begin)), count)
    run = first[box] + np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    low = (np.maximum(flat[run], begin[box]) - begin[box]) // item[box]
    high = (np.minimum(flat[run + 1], end[box]) - begin[box]) // item[box]
    kept = high > low
    return box[kept], low[kept], high[kept], run[kept]


def _rectangles(boxes: Array, low: IntArray, high: IntArray) -> tuple[IntArray, dict[str, IntArray]]:
    """Returns the elements [low, high) of every box as rectangles (index, fields).

    `index` is the original box of each rectangle. `fields` are new values of its fields.
    """
    parts = np.flatnonzero((low > 0) | (high < elements(boxes)))
    cols, low_row, high_row = (
        boxes["cols"][parts],
        low[parts] // boxes["cols"][parts],
        high[parts] // boxes["cols"][parts],
    )
    first_row = -(-low[parts] // cols)
    within = high_row < first_row
    zeros = np.zeros_like(cols)
    head = (
        low_row,
        low[parts] % cols,
        zeros + 1,
        np.where(within, high[parts] - low[parts], first_row * cols - low[parts]),
    )
    body = (first_row, zeros, np.maximum(high_row - first_row, 0), cols)
    tail = (high_row, zeros, zeros + 1, np.where(within, 0, high[parts] - high_row * cols))
    row, col, rows, widths = (np.stack(columns, axis=1).reshape(-1) for columns in zip(head, body, tail, strict=True))
    # Each cut box gives three rectangles, and some of them are empty. All other boxes stay unchanged.
    count = np.ones(len(boxes), dtype=np.int64)
    count[parts] = 3
    index = np.repeat(np.arange(len(boxes)), count)
    from_parts = count[index] == 3
    shape = {name: boxes[name][index] for name in ("rows", "cols")}
    moved = {name: np.zeros(len(index), dtype=np.int64) for name in ("row", "col")}
    for values, given in ((shape, {"rows": rows, "cols": widths}), (moved, {"row": row, "col": col})):
        for name, found in given.items():
            values[name][from_parts] = found
    kept = (shape["rows"] > 0) & (shape["cols"] > 0)
    index = index[kept]
    row, col = moved["row"][kept], moved["col"][kept]
    fields = {
        "row": boxes["row"][index] + row,
        "col": boxes["col"][index] + col,
        "rows": shape["rows"][kept],
        "cols": shape["cols"][kept],
        "offset": boxes["offset"][index] + row * boxes["stride"][index] + col,
    }
    return index, fields


# The stages of a reshard, and one rank's streams in each, over a wire or in shared memory.

SHARED_BYTES = 2**22
"""Maximum bytes of a round in shared memory. Its packed bytes are then read from the processors' caches."""


class StageKind(NamedTuple):
    """A stage of a plan over a wire, or its part in `shared` memory."""

    name: str
    fans_out: bool
    shared: bool

    def round_bytes(self, bucket_bytes: int) -> int:
        """Returns the maximum bytes packed by a rank in a round, with buckets of `bucket_bytes`."""
        return min(bucket_bytes, SHARED_BYTES) if self.shared else bucket_bytes


STAGES = (
    StageKind("direct", fans_out=False, shared=False),
    StageKind("direct, in shared memory", fans_out=False, shared=True),
    StageKind("fan_out", fans_out=True, shared=False),
    StageKind("fan_out, in shared memory", fans_out=True, shared=True),
)


Headers = tuple[int, ...]
"""Bytes of the header before each message's packed bytes, shape [stages]. It is 0 for messages without a header."""

NO_HEADERS: Headers = (0,) * len(STAGES)


@dataclass(frozen=True, eq=False)
class StageStreams:
    """The streams of one rank in one stage, before they are cut into rounds.

    The rank packs the streams `packed`. Stream i of `sends` is number `packed_as[i]` of them. In shared memory several
    receivers may read the same one.
    """

    kind: StageKind
    sends: Streams
    receives: Streams
    packed: Streams
    packed_as: IntArray


def stage_streams(plan: RankPlan, neighbours: Collection[int] = ()) -> tuple[StageStreams, ...]:
    """Returns the streams of each of STAGES. Exchanges with `neighbours` are in shared memory."""
    wire = wire_types(plan.source_types, plan.destination_types)
    exchanged = []
    for kind in STAGES:
        stage, types = (plan.fan_out, plan.destination_types) if kind.fans_out else (plan.direct, wire)
        near = [np.isin(boxes["peer"], list(neighbours)) for boxes in (stage.sends, stage.receives)]
        sends, receives = (
            streams(boxes[chosen == kind.shared], types)
            for boxes, chosen in zip((stage.sends, stage.receives), near, strict=True)
        )
        packed, packed_as = distinct(sends) if kind.shared else (sends, np.arange(len(sends.peers)))
        exchanged.append(StageStreams(kind, sends, receives, packed, packed_as))
    return tuple(exchanged)


def shared_places(
    exchanged: tuple[StageStreams, ...], rounds: tuple[Rounds, ...], ranks: list[int], headers: Headers = NO_HEADERS
) -> IntArray:
    """Returns the place of each receiver's bytes in this rank's slots, after the message's header. It is a byte offset,
    shape [ranks, stages]."""
    places = np.zeros((len(ranks), len(exchanged)), dtype=np.int64)
    for number, (stage, how) in enumerate(zip(exchanged, rounds, strict=True)):
        if stage.kind.shared:
            rows = [ranks.index(peer) for peer in stage.sends.peers.tolist()]
            places[rows, number] = fixed_places(stage.packed.num_bytes, how, headers[number])[stage.packed_as]
    return places


@dataclass(frozen=True, eq=False)
class ReadPlaces:
    """The `shared_places` for this rank, computed by its `neighbours`, ascending. `places` has shape [neighbours,
    stages]."""

    neighbours: tuple[int, ...] = ()
    places: IntArray = field(default_factory=lambda: np.zeros((0, len(STAGES)), dtype=np.int64))

    def on(self, peers: IntArray, stage: int) -> IntArray:
        """Returns the byte offset to read from in the slots of each of `peers`, shape [peers]. All must be
        neighbours."""
        places: IntArray = self.places[np.searchsorted(self.neighbours, peers), stage]
        return places


NOBODY = ReadPlaces()
