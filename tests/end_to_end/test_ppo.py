"""PPO on the quickstart's task: the critic beside the actor, and on ranks of its own."""

import math

import pytest

from tests.end_to_end.jobs import REPOSITORY, column, train

pytestmark = pytest.mark.slow

PLACEMENTS = {
    "colocated": "placement={'actor, critic': 0-1, 'rollout, reward': 2-3}",
    "own_ranks": "placement={actor: 0, critic: 1, 'rollout, reward': 2-3}",
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def records(request, warmed_up, data_overrides, tmp_path_factory):
    return train(
        REPOSITORY / "configs/quickstart_ppo.yaml",
        f"model.path={warmed_up}",
        f"output_dir={tmp_path_factory.mktemp(request.param)}",
        "evaluation={interval: 10, stop_at: 0.8}",
        *data_overrides,
        PLACEMENTS[request.param],
    )


def test_the_model_learns(records):
    assert column(records, "eval/score")[-1] >= 0.8


def test_the_critic_learns_first(records):
    """Its loss is there from the first step on, the actor's from the sixth; it comes to explain the returns."""
    assert [("critic/loss" in record, "train/loss" in record) for record in records[:6]] == [(True, False)] * 5 + [
        (True, True)
    ]
    explained = [value for value in column(records, "critic/explained_variance") if not math.isnan(value)]
    assert explained[0] < 0.02
    assert max(explained) > 0.1


def test_the_actor_stays_as_it_is_while_only_the_critic_learns(records):
    """The version of the weights grows with the steps; their values do not, so on-policy log-probs agree."""
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
