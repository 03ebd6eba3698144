"""How the reward's leader comes by the rewards of the role's other ranks: without holding anybody up."""

import threading
from types import SimpleNamespace

import pytest

from rltrain.cluster.grid import Grid
from rltrain.roles.reward import Reward
from rltrain.roles.reward_statistics import RewardStatistics
from tests.unit.shared_store import LIMIT_S, ShortPatience
from tests.unit.test_reporter import FakeBulletin
from tests.unit.test_reward_statistics import scored


def reward_role(rank: int, shared: dict[str, str]) -> Reward:
    """On ranks 4 and 6, with what gathering needs of it."""
    role = Reward.__new__(Reward)
    role.grid = Grid((4, 6))
    role.job = SimpleNamespace(  # type: ignore[assignment]
        bulletin=FakeBulletin(shared, rank),
        world=SimpleNamespace(rank=rank),
        patience=ShortPatience(),
        leader_of=lambda role: 4,
    )
    role.serve = None
    return role


def of_rewards(*rewards: float) -> RewardStatistics:
    statistics = RewardStatistics()
    statistics.add(*scored([(reward, 2, False) for reward in rewards]))
    return statistics


def test_the_leader_has_the_metrics_of_all_ranks_and_the_others_go_on():
    shared: dict[str, str] = {}
    assert reward_role(6, shared)._gather("score", 3, of_rewards(1.0, 0.0)) == {}
    metrics = reward_role(4, shared)._gather("score", 3, of_rewards(1.0, 1.0))
    assert metrics["reward_mean"] == pytest.approx(0.75)
    assert not shared, "nothing is left behind"


def test_steps_and_evaluations_are_told_apart():
    shared: dict[str, str] = {}
    other = reward_role(6, shared)
    other._gather("score", 4, of_rewards(9.0))
    other._gather("evaluation", 3, of_rewards(9.0))
    other._gather("score", 3, of_rewards(0.0))
    assert reward_role(4, shared)._gather("score", 3, of_rewards(1.0))["reward_mean"] == pytest.approx(0.5)


def test_the_leader_joins_weight_syncs_while_it_waits():
    """The other rank may be an engine that is in one already, and scores only after it."""
    shared: dict[str, str] = {}
    leader, other = reward_role(4, shared), reward_role(6, shared)
    joined = threading.Event()
    leader.serve = joined.set

    def score_after_the_sync() -> None:
        assert joined.wait(LIMIT_S / 2)
        other._gather("score", 0, of_rewards(0.0))

    thread = threading.Thread(target=score_after_the_sync)
    thread.start()
    assert leader._gather("score", 0, of_rewards(1.0))["reward_mean"] == pytest.approx(0.5)
    thread.join(LIMIT_S)
