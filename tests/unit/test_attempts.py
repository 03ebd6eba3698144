"""Ranks that torchrun has restarted meet those of their own attempt only."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rltrain.errors import StallError
from rltrain.runtime.world import join_attempt
from tests.unit.shared_store import Jobs, at_the_same_time, open_store

NUM_RANKS = 3


@pytest.fixture
def stores() -> Iterator[list[dist.Store]]:
    with open_store() as store:
        yield Jobs(store, NUM_RANKS).start(NUM_RANKS)


def join_all(stores: list[dist.Store]) -> list[int]:
    return at_the_same_time(stores, lambda rank, store: join_attempt(store, rank, NUM_RANKS, timeout_s=10))


def test_every_attempt_has_a_number_of_its_own(stores: list[dist.Store]) -> None:
    assert [join_all(stores) for _ in range(4)] == [[attempt] * NUM_RANKS for attempt in range(4)]


def test_the_store_keeps_the_last_two_attempts(stores: list[dist.Store]) -> None:
    numbers = []
    for attempt in range(6):
        join_all(stores)
        stores[1].set(f"attempt{attempt}/a/key", "of a rank")
        numbers.append(stores[1].num_keys())  # after what it has set: another connection may be served before
    assert stores[2].check(["attempt4/a/key", "attempt5/a/key"]) and not stores[2].check(["attempt3/a/key"])
    assert numbers[2:] == numbers[2:3] * 4


@pytest.mark.parametrize("came", [[0], [1], [2, 0], [1, 2]])
def test_ranks_that_came_in_vain_do_not_count(stores: list[dist.Store], came: list[int]) -> None:
    """An attempt in which a rank dies before it joins."""
    for rank in came:
        with pytest.raises(StallError, match="have not started within|for rank 0 to start"):
            join_attempt(stores[rank], rank, NUM_RANKS, timeout_s=0.1)
    attempts = join_all(stores)
    assert attempts == [int(0 in came)] * NUM_RANKS


def test_the_ranks_that_are_missing_are_named(stores: list[dist.Store]) -> None:
    with pytest.raises(StallError, match=r"ranks \[1, 2\] have not started within 0.1 s"):
        join_attempt(stores[0], 0, NUM_RANKS, timeout_s=0.1)
