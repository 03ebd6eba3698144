"""Sharing demands out among those who can meet them, so that the busiest carries as little as possible.

Integer arithmetic throughout: every rank must come to the same result, whatever processor it runs on.
"""

from collections.abc import Sequence

import numpy as np

from rltrain.models.table import IntArray

MAX_SWEEPS = 300
TOLERANCE = 2000
"""Sweeps end when no quota moves by more than the total demand divided by this and by the number of ranks."""


def share_out(candidates: Sequence[IntArray], demands: Sequence[int]) -> list[IntArray]:
    """For every demand its split over its candidates (distinct rank numbers): quotas that sum to the demand.

    Each demand in turn is poured over its candidates like water over uneven ground, given what the others have put on
    them, until nothing moves. This is block coordinate descent on the sum of squared loads, which is convex, so it
    approaches the split whose largest load is the smallest possible.
    """
    num_ranks = 1 + max((int(ranks.max()) for ranks in candidates), default=-1)
    load = np.zeros(num_ranks, dtype=np.int64)
    quotas = [np.zeros(len(ranks), dtype=np.int64) for ranks in candidates]
    for number, (ranks, demand) in enumerate(zip(candidates, demands, strict=True)):
        if len(ranks) == 1:
            quotas[number][0] = demand
            load[ranks] += demand
    shared = [number for number, ranks in enumerate(candidates) if len(ranks) > 1]
    tolerance = sum(demands) // (TOLERANCE * max(num_ranks, 1))
    for _ in range(MAX_SWEEPS):
        moved = 0
        for number in shared:
            ranks = candidates[number]
            load[ranks] -= quotas[number]
            quota = pour(load[ranks], demands[number])
            moved = max(moved, int(np.abs(quota - quotas[number]).max()))
            quotas[number] = quota
            load[ranks] += quota
        if moved <= tolerance:
            break
    return quotas


def pour(load: IntArray, amount: int) -> IntArray:
    """What each of the vessels that hold `load` gets when `amount` fills them to one level as far as possible."""
    ascending = np.sort(load)
    held = np.cumsum(ascending)
    # With the k lowest vessels filled to one level, the next one up must not be below that level.
    levels = (held + amount) // np.arange(1, len(load) + 1)
    above = np.append(ascending[1:], np.iinfo(np.int64).max)
    level = levels[np.argmax(levels <= above)]
    quota: IntArray = np.maximum(level - load, 0)
    left_over = amount - int(quota.sum())
    lowest = np.argsort(load + quota, kind="stable")[:left_over]
    quota[lowest] += 1
    return quota
