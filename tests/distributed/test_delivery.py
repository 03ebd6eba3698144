"""The ranks of one engine deliver together and agree on the outcome."""

from tests.support.worlds import run_case


def test_ranks_of_an_engine_deliver_their_shares_and_fail_together() -> None:
    by_rank = run_case("cases_delivery:deliver_over_ranks", 2)
    first = by_rank[0]
    assert first["layout"] == first["whole"] == first["changes"] == first["again"] == "good"
    assert (first["version"], first["version again"]) == (1, 3)
    assert first["shares"] and first["changed shares"] and first["shares again"]
    assert first["last rank lacks a parameter"].startswith("EngineLost")
    assert "the engine has no parameter lm_head.weight" in first["last rank lacks a parameter"]
    assert first["layout of the last rank"].startswith("EngineError")
    assert "it has no parameter lm_head.weight" in first["layout of the last rank"]
    assert first["dies"].startswith("EngineLost") and "connection reset" in first["dies"]
    assert all(other == first for other in by_rank)
