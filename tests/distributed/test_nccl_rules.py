"""Transfers that use NCCL on GPUs, under its rules on the CPU (tests/support/nccl_rules.py)."""

import re
from pathlib import Path

import pytest

from tests.distributed.cases_nccl_rules import NUM_STEPS, PIPELINES
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, run_case, world

pytestmark = pytest.mark.slow  # tests/unit has stand-ins of communicators


@made_once
def ranks(folder: Path) -> Ranks:
    path = make_checkpoints(folder, ["qwen3"], num_hidden_layers=4)["qwen3"]
    return run_case("cases_nccl_rules:all_cases", checkpoint=path)


told = world("cases_nccl_rules:broken_rules")


@pytest.mark.parametrize("group", ["kept", "reopened"])
def test_rounds_of_a_reshard_are_single_calls_that_match(ranks: Ranks, group: str) -> None:
    for rank in ranks:
        assert rank[f"reshard/{group}"]["wrong"] == [] and rank[f"reshard/{group}"]["num_rounds"] > 4
    assert sum(rank[f"reshard/{group}"]["compared"] for rank in ranks) > 150
    assert ranks[1][f"reshard/{group}"]["idle"], "some rank has nothing to send or to receive"


def test_both_ends_know_how_long_messages_of_what_changed_are(ranks: Ranks) -> None:
    runs = [run for rank in ranks for run in rank["delta"]]
    assert len(runs) > 40 and not any(run["wrong"] for run in runs)
    assert any(run["compared"] and run["changed"] == 0 for run in runs), "only headers are sent"
    assert any(0 < run["changed"] < run["compared"] for run in runs)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_pipelines_train_as_over_gloo(ranks: Ranks, pipeline: str) -> None:
    for number in PIPELINES[pipeline].ranks:
        found, expected = ranks[number][f"{pipeline}/nccl"], ranks[number][f"{pipeline}/gloo"]
        assert len(expected) == NUM_STEPS and found == pytest.approx(expected, rel=1e-5)


def test_groups_that_come_and_go_between_tasks_reduce_over_their_ranks(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["communicators"]["wrong"] == 0 and rank["communicators"]["right"] > 20
        assert rank["communicators"]["generations"] > 12


def test_members_release_a_communicator_at_places_of_their_own() -> None:
    """In NCCL the first member that destroys a communicator may wait for the other."""
    found = run_case("cases_nccl_rules:released_one_after_the_other", 2)
    assert found == [[3.0, 3.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("breach", "rank", "error"),
    [
        ("a_message_over_a_subclass", 0, r"RuntimeError: a message over ranks \(0, 1\) is issued alone"),
        ("both_send_first", 1, "send of 16 bytes to rank 0, by rank 1, meets a send of 16 bytes: expected a receive"),
        ("a_first_call_of_some", 0, r"rank 0 waits for ranks \[2, 3\] in the first call on it, send of 16 bytes to 1"),
        ("sizes_that_differ", 0, "send of 16 bytes to rank 1, by rank 0, meets a receive of 32 bytes"),
        ("collectives_out_of_order", 1, "call 1 on .*: allreduce of 16 bytes by rank 1, barrier by rank 0"),
        ("a_graph_that_is_left", 0, "is destroyed while 1 recorded graphs hold it"),
        ("a_communicator_that_some_destroy", 0, r"rank 0 waits for ranks \[1\] in destroying it"),
    ],
)
def test_what_hangs_on_nccl_is_an_error_that_names_it(told: Ranks, breach: str, rank: int, error: str) -> None:
    assert re.search(error, told[rank][breach]), told[rank][breach]
