"""Weights moved and saved by four real ranks."""

from itertools import product

import pytest

from tests.distributed.cases_reshard import ARCHITECTURES, CHECKS, PLACEMENTS, pairs_of, union_of
from tests.support.worlds import Ranks, world

ranks = world("cases_reshard:all_checks")


@pytest.mark.parametrize("check", CHECKS)
def test_every_placement_equals_the_oracle(check: str, ranks: Ranks) -> None:
    for rank, results in enumerate(ranks):
        expected = {f"{placement}, {name}" for placement, name in pairs_of(check) if rank in union_of(placement)}
        assert set(results[check]) == expected
        for name, found in results[check].items():
            assert found["wrong"] == [], f"{name} on rank {rank}"
            for key in ("again", "staging", "launches", "sent", "received", "moved", "local", "network", "seconds"):
                assert found[key], f"{key} of {name} on rank {rank}: {found}"
            assert found["bandwidth"] >= 0
    compared = sum(found["compared"] for results in ranks for found in results[check].values())
    assert compared > 150


def test_every_placement_meets_every_architecture() -> None:
    assert {pair for check in CHECKS for pair in pairs_of(check)} == {*product(PLACEMENTS, ARCHITECTURES)}


@pytest.mark.parametrize("check", ["one bucket", "shared memory, out of step"])
def test_waiting_for_the_others_to_come_is_told_from_work(check: str, ranks: Ranks) -> None:
    for name in {name for results in ranks for name in results[check]}:
        found = [results[check][name] for results in ranks if name in results[check]]
        assert max(rank["came"] for rank in found) <= min(rank["met"] for rank in found), name
        assert all(rank["without_the_wait"] for rank in found), name


def test_large_boxes_are_sent_in_place(ranks: Ranks) -> None:
    in_one_bucket, in_place = (
        sum(found["in_place"] for results in ranks for found in results[check].values())
        for check in ("one bucket", "in place")
    )
    assert in_place > 10 * in_one_bucket


def test_each_byte_enters_a_node_once_and_fans_out_there(ranks: Ranks) -> None:
    for results, check in product(ranks, ["two nodes", "two nodes, shared memory"]):
        assert {found["ratio"] for found in results[check].values()} == {1.0}
    name = "disaggregated tp2 -> tp1 dp2, llama"
    assert [results["two nodes"][name]["fanned_out"] > 0 for results in ranks] == [False, False, True, True]
    assert not any(found["fanned_out"] for results in ranks for found in results["one bucket"].values())


def test_what_neighbours_read_is_packed_once_and_passes_through_no_wire(ranks: Ranks) -> None:
    name = "one rank feeds all, llama"
    shared, wired = (ranks[3][check][name] for check in ("shared memory", "small buckets"))
    assert shared["sharing"] == [True, False] and wired["sharing"] == [False, False]
    sent_to = shared["sent_to"]
    assert sent_to["0"] == sent_to["2"] and shared["packed"] == sent_to["0"] + sent_to["1"], (
        "ranks 0 and 2 read the same"
    )
    name = "disaggregated tp2 -> tp1 dp2, llama"
    sharing = [results["two nodes, shared memory"][name]["sharing"] for results in ranks]
    assert sharing == [[False, False]] * 2 + [[False, True]] * 2


def test_ranks_share_memory_where_both_can_map_it(ranks: Ranks) -> None:
    placement = "one rank feeds all"
    neighbours = {
        "shared memory": [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]],
        "shared memory, but for one": [[1, 3], [0, 3], [], [0, 1]],
        "two nodes, shared memory": [[1], [0], [3], [2]],
        "one bucket": [[], [], [], []],
    }
    for check, expected in neighbours.items():
        name = f"{placement}, {dict(pairs_of(check))[placement]}"
        assert [results[check][name]["neighbours"] for results in ranks] == expected


def test_buckets_are_bounded(ranks: Ranks) -> None:
    for rank, results in enumerate(ranks):
        assert {found["num_rounds"] for found in results["one bucket"].values()} <= {0, 1}
        name = "disaggregated tp2 -> tp1 dp2, qwen3, one KV head"
        assert results["small buckets"][name]["num_rounds"] > 10, f"rank {rank}"


@pytest.mark.parametrize("check", ["round trip", "round trip, one file per writer"])
def test_saved_checkpoints_equal_the_loaded_ones(check: str, ranks: Ranks) -> None:
    assert len(ranks[0][check]) == 2
    for found in ranks[0][check]:
        assert found["wrong"] == []
        assert found["same_names"] and found["loads_alike"]
        assert found["left_behind"] == []
        assert found["num_tensors"] > 40
        assert len(found["files"]) == 4 if check.endswith("writer") else len(found["files"]) > 4
