"""PPO on the quickstart's task: the critic on the actor's ranks, and on its own ranks."""

import math

import pytest

from tests.support.jobs import REPOSITORY, column, train
from tests.support.tolerances import EPS_OF_ACTOR, EPS_OF_CRITIC

pytestmark = pytest.mark.slow

PPO, NO_EVAL = REPOSITORY / "configs/quickstart_ppo.yaml", ("data.eval=null",)
OWN_RANKS = "placement={actor: 0, critic: 1, 'rollout, reward': 2-3}"
PLACEMENTS = {
    "own_ranks": (OWN_RANKS, 4),
    "beside": ("placement={'actor, critic': 0-1, 'rollout, reward': 2-3}", 4),
    "colocated": ("placement={'actor, critic, rollout, reward': 0}", 1),
}


@pytest.fixture(scope="module")
def records(warm_start, tmp_path_factory):
    return train(PPO, *warm_start[:2], f"output_dir={tmp_path_factory.mktemp('ppo')}", "steps=10", OWN_RANKS, *NO_EVAL)


def test_wherever_the_critic_lives_the_run_is_the_same(warm_start, tmp_path):
    """The critic trains alone for two steps, then with the actor for two. In other layouts sums have another order."""

    def run(name: str) -> list[dict]:
        placement, num_ranks = PLACEMENTS[name]
        paths = [*warm_start[:2], f"output_dir={tmp_path / name}", *NO_EVAL, EPS_OF_ACTOR, EPS_OF_CRITIC]
        short = ("steps=4", "critic.critic_warmup_steps=2", "batch.prompts_per_step=32", "rollout.parallel.tp=1")
        return train(PPO, *paths, placement, *short, num_ranks=num_ranks)

    expected, *others = (run(name) for name in PLACEMENTS)
    assert len(column(expected, "critic/loss")) == 4 and len(column(expected, "train/loss")) == 2
    for records in others:
        for name in ("rollout/reward_mean", "critic/loss", "critic/grad_norm", "critic/return_mean", "train/grad_norm"):
            assert column(records, name) == pytest.approx(column(expected, name), rel=2e-3, abs=1e-5), name


def test_the_critic_learns_first(records):
    """The critic's loss is reported from the first step on, the actor's from the sixth. The critic comes to explain the
    returns.

    Until then the version of the actor's weights grows, but their values stay. So on-policy log-probs agree.
    """
    learning = [("critic/loss" in record, "train/loss" in record) for record in records[:6]]
    assert learning == [(True, False)] * 5 + [(True, True)]
    explained = [value for value in column(records, "critic/explained_variance") if not math.isnan(value)]
    assert explained[0] < 0.02 and max(explained) > 0.1
    assert max(column(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
