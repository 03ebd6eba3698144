"""Weights change while engines decode: one engine of four ranks, one of a single rank, and a quick actor."""

from tests.distributed.cases_in_flight import CONFIG, ENGINES, NUM_RANKS, ORDER, PER_STEP
from tests.support.worlds import world

ranks = world("cases_in_flight:a_run", NUM_RANKS)


def test_all_ranks_join_every_sync_once_and_in_order(ranks):
    steps = [ORDER[position].step for position, _ in ORDER.syncs()]
    assert [result["joined"] for result in ranks] == [steps] * NUM_RANKS


def test_ranks_of_an_engine_change_weights_at_the_same_decode_step(ranks):
    """All ranks generated each token with the same version."""
    leader, *followers = ENGINES[0]
    assert ranks[leader]["positions"]
    assert all(ranks[follower] == ranks[leader] for follower in followers)


def test_weights_do_change_within_responses_and_never_back(ranks):
    versions = [response for ranks_of in ENGINES for response in ranks[ranks_of[0]]["versions"]]
    assert all(response == sorted(response) for response in versions)
    assert any(len({*response}) > 1 for response in versions)


def test_no_token_is_older_than_allowed(ranks):
    for result in (ranks[engine[0]] for engine in ENGINES):
        steps = [position // PER_STEP for position in result["positions"] for _ in range(2)]
        for step, versions in zip(steps, result["versions"], strict=True):
            assert step - min(versions) <= CONFIG.schedule.max_staleness


def test_every_group_is_drawn_once(ranks):
    drawn = [position for engine in ENGINES for position in ranks[engine[0]]["positions"]]
    assert sorted(drawn) == list(range(CONFIG.steps * PER_STEP))
