"""Experience in flight at a cut of the order reaches its receivers in the resumed run."""

from typing import Any

import pytest

from tests.distributed.cases_transfers import NUM_RANKS, NUM_SAMPLES, NUM_STEPS, PER_STEP
from tests.support.worlds import run_case

SAMPLES_CROSS = {"actor,reward": "0", "reference": "1"}
"""A reward that shares ranks with training scores after the cut, in other placements before it."""

ON_ANOTHER_NODE = "a replica of two ranks on another node"
PLACEMENTS = {
    "more engines": ({**SAMPLES_CROSS, "rollout": "2"}, {**SAMPLES_CROSS, "rollout": "2-3"}),
    "fewer engines": ({**SAMPLES_CROSS, "rollout": "1-3"}, {**SAMPLES_CROSS, "rollout": "3"}),
    "fewer rewards, more actors": (
        {"actor,reference": "0", "rollout": "1", "reward": "2-3"},
        {"actor,reference": "0-1", "rollout": "3", "reward": "2"},
    ),
    ON_ANOTHER_NODE: (
        {"actor,reference": "0-1", "rollout,reward": "2-3"},
        {"actor,reference": "0-1", "rollout,reward": "2"},
    ),
}
TRAINING_TP = {ON_ANOTHER_NODE: 2}
NUM_OWNERS = {"more engines": 1, "fewer engines": 3, "fewer rewards, more actors": 2, ON_ANOTHER_NODE: 2}
"""Number of source ranks of the experience in flight."""
CUT = 3


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    """Returns the results of every rank, by placements."""
    placements = [(*pair, TRAINING_TP.get(name, 1)) for name, pair in PLACEMENTS.items()]
    ranks = run_case("cases_transfers:cut_and_go_on", NUM_RANKS, placements=placements, step=CUT)
    return dict(zip(PLACEMENTS, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_training_gets_from_the_cut_on_what_it_would_have_got(results, placements):
    ranks = results[placements]
    undisturbed = {sample: values for rank in ranks for sample, values in rank["before"].items()}
    resumed = {sample: values for rank in ranks for sample, values in rank["after"].items()}
    assert len(undisturbed) == NUM_STEPS * PER_STEP * NUM_SAMPLES
    assert resumed == {sample: values for sample, values in undisturbed.items() if values[0][0] >= CUT}
    times = TRAINING_TP.get(placements, 1)
    assert sum(len(rank["after"]) for rank in ranks) == times * len(resumed), "a replica gets no sample twice"
    assert all(undisturbed[sample] == values for rank in ranks for sample, values in rank["before"].items())
    assert all(rank["outbox"] == 0 for rank in ranks)


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_each_owner_saves_its_own_part(results, placements):
    assert sum(rank["num_saved"] > 0 for rank in results[placements]) == NUM_OWNERS[placements]
