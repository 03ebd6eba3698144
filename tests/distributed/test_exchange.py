"""The exchange between roles on real gloo ranks."""

from tests.distributed.torchrun import run_distributed

CASES = "tests.distributed.cases_exchange"


def test_every_group_arrives_once_and_whole_between_random_grids():
    results = run_distributed(f"{CASES}:random_routes", 4, {"num_transfers": 60})
    assert sum(result["received"] for result in results) > 100
    assert all(result["outbox"] == 0 and result["kept"] == 0 for result in results)


def test_a_late_rank_is_reported_by_name_and_does_no_harm():
    results = run_distributed(f"{CASES}:late_source", 2)
    assert results[1]["tokens"] == results[0]["tokens"]
    assert "rank 1 waits at wait samples[0]: rank 0 is at generate[0]" in results[1]["reports"][0]


def test_a_missing_rank_ends_the_wait_with_its_name():
    message = run_distributed(f"{CASES}:missing_source", 2)[1]
    assert "rank 1 waits at wait samples[7]: rank 0 is at generate[7] (rollout)" in message
    assert "timeouts.no_progress_s" in message
    assert "after 1 s" in message
