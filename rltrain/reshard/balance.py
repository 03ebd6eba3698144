"""Which of several holders sends a box: the nearest, and among equally near ones such that bytes are balanced."""

import numpy as np
from numpy.typing import NDArray

from rltrain.reshard.layout import IntArray

Mask = NDArray[np.bool_]


def choose_sources(
    holds: Mask, fragment: IntArray, weight: IntArray, destination: IntArray, ranks: IntArray, ranks_per_node: int
) -> IntArray:
    """The source rank of every move. Deterministic, so that all ranks come to the same result.

    `holds` [fragments, ranks] says which of the source `ranks` (ascending) hold a fragment. A move takes `weight`
    elements of `fragment` to rank `destination`; moves are in the order in which neighbours should share a source.
    """
    chosen = np.full(len(fragment), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(ranks, destination), len(ranks) - 1)
    local = (ranks[place] == destination) & holds[fragment, place]
    chosen[local] = destination[local]
    load = np.zeros(len(ranks), dtype=np.int64)
    remote = np.flatnonzero(~local)
    for members, moves in _groups(
        holds, fragment[remote], destination[remote] // ranks_per_node, ranks // ranks_per_node
    ):
        shared = remote[moves]
        picked = members[_deal(weight[shared], load[members])]
        np.add.at(load, picked, weight[shared])
        chosen[shared] = ranks[picked]
    return chosen


def _groups(holds: Mask, fragment: IntArray, node: IntArray, rank_node: IntArray) -> list[tuple[IntArray, IntArray]]:
    """Moves with equal candidates: (candidates, moves). Groups with the least choice come first."""
    sets, set_of_fragment = np.unique(holds, axis=0, return_inverse=True)
    wanted = set_of_fragment.reshape(-1)[fragment]
    keys, group = np.unique(np.stack([wanted, node], axis=1), axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(group.reshape(-1), minlength=len(keys)))
    groups = []
    for (wanted_set, wanted_node), start, end in zip(keys, [0, *ends], ends, strict=False):
        near = sets[wanted_set] & (rank_node == wanted_node)
        groups.append((np.flatnonzero(near if near.any() else sets[wanted_set]), order[start:end]))
    return sorted(groups, key=lambda item: len(item[0]))


def _deal(weight: IntArray, load: IntArray) -> IntArray:
    """For every move the place of its candidate: consecutive runs, as long as each candidate's load leaves room for."""
    room = np.maximum(_level(load, int(weight.sum())) - load, 0.0)
    middle = np.cumsum(weight) - weight / 2
    dealt = np.searchsorted(np.cumsum(room), middle, side="right")
    return np.minimum(dealt, len(load) - 1).astype(np.int64)


def _level(load: IntArray, amount: int) -> float:
    """The height to which `amount` fills vessels that already hold `load`."""
    ascending = np.sort(load)
    count = np.arange(1, len(load) + 1)
    levels = (np.cumsum(ascending) + amount) / count
    above = np.append(ascending[1:], np.iinfo(np.int64).max)
    return float(levels[np.argmax(levels <= above)])
