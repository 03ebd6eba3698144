"""The exchange between roles on real gloo ranks."""

from tests.support.worlds import run_case


def test_every_group_arrives_once_and_whole_between_random_grids():
    results = run_case("cases_exchange:random_routes", num_transfers=60)
    assert sum(result["received"] for result in results) > 100
    assert all(result["kept"] == 0 for result in results)
    assert sum(result["relayed"] for result in results) > 5


def test_a_late_rank_is_reported_by_name_and_does_no_harm():
    results = run_case("cases_exchange:late_source", 2)
    assert results[1]["tokens"] == results[0]["tokens"]
    assert "rank 1 waits at wait samples[0]: rank 0 is at generate[0]" in results[1]["reports"][0]


def test_missing_ranks_end_the_waits_with_their_names():
    _, of_source, _, of_neighbour = run_case("cases_exchange:missing_ranks")
    for message, waiting, missing in ((of_source, 1, 0), (of_neighbour, 3, 2)):
        assert f"rank {waiting} waits at wait samples[7]: rank {missing} is at generate[7] (rollout)" in message
        assert "timeouts.no_progress_s" in message and "after 1 s" in message
