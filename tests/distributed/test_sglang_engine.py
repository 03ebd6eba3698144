"""An SGLang engine over several ranks: all see the same, although only the first has the server."""

from tests.support.rollout_models import ragged_requests
from tests.support.sglang_server import next_token
from tests.support.worlds import run_case


def test_the_second_rank_sees_what_the_first_sees() -> None:
    first, second = run_case("cases_sglang_engine:follow_the_first_rank", 2)
    assert first == second
    requests = {request.id: request for request in ragged_requests()}
    for name in ("plain", "interrupted", "update"):
        assert sorted(done["id"] for done in first[name]) == sorted(requests)
        for done in first[name]:
            prompt = requests[done["id"]].prompt
            for place, (token, version) in enumerate(zip(done["tokens"], done["policy_versions"], strict=True)):
                assert token == next_token([*prompt, *done["tokens"][:place]], version)
            assert len(done["logprobs"]) == len(done["tokens"])
    assert any(sample["tokens"] for sample in first["suspended"])
    finished = {done["id"]: done for done in first["interrupted"]}
    for sample in first["suspended"]:
        mask = finished[sample["id"]]["loss_mask"]
        assert mask == [False] * len(sample["tokens"]) + [True] * (len(mask) - len(sample["tokens"]))
    assert {1, 2} >= set(first["update"][-1]["policy_versions"])
    num_unfinished, num_restarts, version, num_advances = first["facts"]
    assert (num_unfinished, num_restarts, version) == (0, 2, 2)
    assert num_advances == 3 * 3, "once per start on every rank"
    diverged, refused = first["errors"]
    assert "version 3" in diverged and diverged.endswith("0 unfinished")
    assert "status 400: no such thing as straße" in refused
