"""Who exchanges with whom, so that after a few rounds every rank knows of all."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.reshard.agreement import all_reduce, rounds
from tests.unit.shared_store import on_ranks, open_store


@given(st.integers(1, 300))
def test_rounds_are_few_and_both_sides_of_each_know_of_it(num_ranks: int) -> None:
    of_all = [[*rounds(rank, num_ranks)] for rank in range(num_ranks)]
    assert max(map(len, of_all)) <= num_ranks.bit_length() + 1
    answers = {"exchange": "exchange", "give": "take", "take": "give"}
    for rank, mine in enumerate(of_all):
        for what, peer in mine:
            with_me = [(theirs, who) for theirs, who in of_all[peer] if who == rank]
            assert (answers[what], rank) in with_me and len(with_me) == sum(who == peer for _, who in mine)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_rank_has_the_sum_and_the_largest(num_ranks: int) -> None:
    numbers = [torch.tensor([rank + 1, -rank, 2**62, 7 * rank % 5]) for rank in range(num_ranks)]

    def of_rank(rank: int, store: dist.Store) -> list[list[int]]:
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, num_ranks)  # type: ignore[attr-defined]
        try:
            return [all_reduce(numbers[rank], how, group).tolist() for how in (torch.add, torch.maximum) * 2]
        finally:
            group.barrier().wait()

    whole = torch.stack(numbers)
    expected = [whole.sum(0).tolist(), whole.max(0).values.tolist()] * 2  # the sum wraps around, as in _imbalance
    with open_store() as store:
        assert on_ranks(store, of_rank, num_ranks) == [expected] * num_ranks
