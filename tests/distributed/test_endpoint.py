"""An endpoint in front of an engine of two ranks: both generate the same turns as an engine of one rank."""

from pathlib import Path

import pytest

from rltrain.rollout.sample import Sample
from tests.distributed.cases_endpoint import NUM_CONVERSATIONS, NUM_TURNS, TURN_TOKENS, drawn_alone
from tests.support.rollout_models import write_checkpoint
from tests.support.worlds import run_case
from tests.through_json import read


def test_turns_on_an_engine_of_two_ranks_are_those_on_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "qwen3")
    leader, follower = run_case("cases_endpoint:converse", 2, path=path)
    assert leader["log"] == follower["log"] and not follower["said"]
    said = [read(Sample, record) for record in leader["said"]]
    assert len(said) == NUM_CONVERSATIONS * NUM_TURNS
    assert {version for sample in said for version in sample.policy_versions} == {0, 1}
    stopped_early = [sample for sample in said if sample.id % 2 and len(sample.last_turn) < TURN_TOKENS]
    assert stopped_early, "requests' own strings have ended turns"
    for sample, alone in zip(said, drawn_alone(path, said), strict=True):
        assert alone.tokens == sample.tokens
        assert alone.logprobs == pytest.approx(sample.logprobs, abs=4e-5)
