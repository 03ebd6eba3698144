"""Who sends which box to whom: every rank works it out for itself from the two layouts, without communication."""

from dataclasses import dataclass

import numpy as np

from rltrain.models.table import Array, TypeArray
from rltrain.reshard.layout import BOX_FIELDS

Parameters = tuple[tuple[str, tuple[int, ...]], ...]

_BOX = [(name, np.int64) for name in BOX_FIELDS]
_PLACE = ("parameter", "offset", "stride")

TRANSFER = np.dtype([("peer", np.int64), *_BOX, *((name, np.int64) for name in _PLACE)])
"""A box that goes to or comes from rank `peer`, and where it lies in this rank's parameters."""

COPY = np.dtype([*_BOX, *((f"{side}_{name}", np.int64) for side in ("source", "destination") for name in _PLACE)])
"""A box that this rank has in both layouts, and where it lies in each."""


@dataclass(frozen=True, eq=False)
class Stage:
    """What one rank sends and receives [TRANSFER], sorted by peer and box, so that both ends of a pair have the same
    boxes in the same order and the bytes between them need no description."""

    sends: Array
    receives: Array


@dataclass(frozen=True)
class Traffic:
    """Bytes of one reshard, over all ranks together.

    `local` stays on a rank and `node` goes between ranks of a node. `network_minimum` is what nodes need and do not
    hold, counted once per node: the least that can go between nodes.
    """

    local: int
    node: int
    network_minimum: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's part in a reshard.

    First `direct`: from ranks that hold a box in the source layout, at places in source parameters, to places in
    destination parameters; and `copies` [COPY], which stay on the rank. Then `fan_out`: what one rank of a node has
    received for several goes to the others, at places in destination parameters on both ends. Parameters are empty
    where the rank is not in that layout. Types are per canonical tensor; on the wire of `direct` a box has the narrower
    of its two types, on that of `fan_out` the destination's.
    """

    rank: int
    source_parameters: Parameters
    destination_parameters: Parameters
    source_types: TypeArray
    destination_types: TypeArray
    copies: Array
    direct: Stage
    fan_out: Stage
    traffic: Traffic
