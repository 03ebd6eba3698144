"""Shares of demands against the exact smallest possible largest load."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.reshard.plan import pour, share_out

NUM_RANKS = 7


def smallest_largest_load(candidates: list[list[int]], demands: list[int]) -> float:
    """By Hall's theorem: the largest, over sets of ranks, of what only they can carry divided by their number."""
    ranks = sorted({rank for group in candidates for rank in group})
    subsets = [set(subset) for size in range(1, len(ranks) + 1) for subset in combinations(ranks, size)]
    return max(
        sum(demand for group, demand in zip(candidates, demands, strict=True) if subset.issuperset(group)) / len(subset)
        for subset in subsets
    )


GROUPS = st.lists(
    st.tuples(st.sets(st.integers(0, NUM_RANKS - 1), min_size=1).map(sorted), st.integers(0, 10**12)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=75)
@given(GROUPS)
def test_the_busiest_carries_hardly_more_than_it_must(groups: list[tuple[list[int], int]]) -> None:
    candidates, demands = [group for group, _ in groups], [demand for _, demand in groups]
    quotas = share_out([np.array(group) for group in candidates], demands)
    load = np.zeros(NUM_RANKS, dtype=np.int64)
    for group, demand, quota in zip(candidates, demands, quotas, strict=True):
        assert (quota >= 0).all() and quota.sum() == demand
        load[group] += quota
    assert load.max() <= 1.15 * smallest_largest_load(candidates, demands) + NUM_RANKS


def test_a_chain_of_choices_is_followed_to_its_end() -> None:
    """Rank 0 has more than its share, which all others together can relieve it of, each by way of the next one."""
    size, demand = 12, 10**9
    chain = [np.array([rank, rank + 1]) for rank in reversed(range(size - 1))]
    quotas = share_out([*chain, np.array([0])], [*[demand] * (size - 1), demand])
    load = np.zeros(size)
    for ranks, quota in zip([*chain, np.array([0])], quotas, strict=True):
        load[ranks] += quota
    assert load.max() <= 1.01 * demand


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=20), st.integers(0, 10**16))
def test_water_finds_its_level(held: list[int], amount: int) -> None:
    load = np.array(held)
    quota = pour(load, amount)
    assert quota.sum() == amount and (quota >= 0).all()
    filled = (load + quota)[quota > 0]
    assert len(filled) == 0 or filled.max() - filled.min() <= 1
    assert len(filled) == 0 or (load[quota == 0] >= filled.max() - 1).all()
