"""The stages of a reshard: what one rank sends and receives in each, over a wire or in memory that ranks share."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rltrain.models.table import IntArray, wire_types
from rltrain.reshard.plan.rank_plan import RankPlan
from rltrain.reshard.plan.rounds import Rounds, Streams, distinct, fixed_places, streams

SHARED_BYTES = 2**22
"""Of a round at most, in shared memory: what was packed is then read from the processors' caches."""


class StageKind(NamedTuple):
    """A stage of a plan, or the part of one that passes through `shared` memory instead of over a wire."""

    name: str
    fans_out: bool
    shared: bool

    def round_bytes(self, bucket_bytes: int) -> int:
        """What a rank may pack in a round where buckets hold `bucket_bytes`."""
        return min(bucket_bytes, SHARED_BYTES) if self.shared else bucket_bytes


STAGES = (
    StageKind("direct", fans_out=False, shared=False),
    StageKind("direct, in shared memory", fans_out=False, shared=True),
    StageKind("fan_out", fans_out=True, shared=False),
    StageKind("fan_out, in shared memory", fans_out=True, shared=True),
)


Headers = tuple[int, ...]
"""[stages]: bytes before what is packed of each message of a stage; 0 where messages have no header."""

NO_HEADERS: Headers = (0,) * len(STAGES)


@dataclass(frozen=True, eq=False)
class StageStreams:
    """What one rank exchanges in one stage, before it is cut into rounds.

    It packs the streams `packed`, of which stream i of `sends` is number `packed_as[i]`: in shared memory several
    receivers may read the same.
    """

    kind: StageKind
    sends: Streams
    receives: Streams
    packed: Streams
    packed_as: IntArray


def stage_streams(plan: RankPlan, neighbours: Collection[int] = ()) -> tuple[StageStreams, ...]:
    """Of STAGES; what goes to or comes from `neighbours` does so in shared memory."""
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
    """[ranks, stages]: from which byte of this rank's slots on each of `ranks` finds what it receives from it, behind
    the message's header."""
    places = np.zeros((len(ranks), len(exchanged)), dtype=np.int64)
    for number, (stage, how) in enumerate(zip(exchanged, rounds, strict=True)):
        if stage.kind.shared:
            rows = [ranks.index(peer) for peer in stage.sends.peers.tolist()]
            places[rows, number] = fixed_places(stage.packed.num_bytes, how, headers[number])[stage.packed_as]
    return places


@dataclass(frozen=True, eq=False)
class ReadPlaces:
    """`places` [neighbours, stages]: the `shared_places` for this rank that its `neighbours`, ascending, came to."""

    neighbours: tuple[int, ...] = ()
    places: IntArray = field(default_factory=lambda: np.zeros((0, len(STAGES)), dtype=np.int64))

    def on(self, peers: IntArray, stage: int) -> IntArray:
        """[peers], each one of the neighbours: from which byte of its slots this rank reads."""
        places: IntArray = self.places[np.searchsorted(self.neighbours, peers), stage]
        return places


NOBODY = ReadPlaces()
