"""How the reward's leader comes by the rewards of the role's other ranks: without holding anybody up. And how it judges
them."""

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rltrain.config import schema
from rltrain.errors import RewardError
from rltrain.rewards.functions import load_rewards
from rltrain.rewards.scorer import Scores
from rltrain.roles.reward import RewardRole
from rltrain.roles.reward_statistics import RewardStatistics
from rltrain.roles.scoring import FailureLimit, RankRecords
from rltrain.runtime.grid import Grid
from tests.unit.shared_store import LIMIT_S, ShortPatience
from tests.unit.test_reporter import FakeBulletin
from tests.unit.test_reward_statistics import scored


def reward_role(rank: int, shared: dict[str, str], max_failures: float = 0.5, **reward: Any) -> RewardRole:
    """On ranks 4 and 6, with what gathering needs of it."""
    role = RewardRole.__new__(RewardRole)
    settings = schema.Reward(max_failures=max_failures, **reward)
    role.limit = FailureLimit(load_rewards(settings), settings)
    role.grid = Grid((4, 6))
    bulletin: Any = FakeBulletin(shared, rank)
    role.records = RankRecords(bulletin, ShortPatience(), "reward", role.grid.ranks)
    role.outcomes = SimpleNamespace(record=lambda: [], tell=lambda step, of_ranks: None)  # type: ignore[assignment]
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


def of_failures(errors: int, timeouts: int, num_samples: int = 4, failure: str | None = None) -> RewardStatistics:
    statistics = RewardStatistics()
    statistics.add(*scored([(1.0, 2, False)] * num_samples, errors, timeouts, failure))
    return statistics


def failures_of_a_step(leader: RewardRole, *failures: tuple[int, int], step: int = 0) -> None:
    """Two ranks with 4 samples each of which some fail by (errors, timeouts)."""
    shared = leader.records.job_store.shared  # type: ignore[attr-defined]
    assert reward_role(6, shared)._gather("score", step, of_failures(*failures[1], failure="rank 6's")) == {}
    leader._gather("score", step, of_failures(*failures[0], failure="rank 4's" if any(failures[0]) else None))


@pytest.mark.parametrize(
    ("max_failures", "failures", "num_failed"),
    [
        (0.5, [(4, 0), (4, 0)], 8),
        (0.5, [(0, 0), (4, 1)], 5),
        (0.5, [(3, 0), (1, 0)], None),
        (0.0, [(0, 0), (0, 1)], 1),
        (1.0, [(4, 0), (0, 4)], 8),
        (1.0, [(4, 0), (3, 0)], None),
    ],
)
def test_too_many_failures_of_the_first_step_end_the_job(max_failures, failures, num_failed):
    """Counted over all ranks. Where any may fail, all of the first may not."""
    leader = reward_role(4, {}, max_failures)
    if num_failed is None:
        failures_of_a_step(leader, *failures)
        return
    with pytest.raises(RewardError, match=rf"failed on {num_failed} of 8 samples of score\[0\]: \d by an error"):
        failures_of_a_step(leader, *failures)


def test_later_steps_are_held_to_the_share_alone():
    leader = reward_role(4, {}, max_failures=1.0)
    failures_of_a_step(leader, (0, 0), (0, 0))
    failures_of_a_step(leader, (4, 0), (4, 0), step=1)
    leader = reward_role(4, {})
    failures_of_a_step(leader, (0, 0), (0, 0))
    failures_of_a_step(leader, (2, 0), (2, 0), step=1)
    with pytest.raises(RewardError, match=r"failed on 5 of 8 samples of score\[2\]: 4 by an error, 1 by taking longer"):
        failures_of_a_step(leader, (2, 0), (2, 1), step=2)


def test_evaluations_are_judged_as_steps_are():
    shared: dict[str, str] = {}
    reward_role(6, shared)._gather("evaluation", 0, of_failures(4, 0))
    with pytest.raises(RewardError, match=r"failed on 8 of 8 samples of evaluation\[0\]"):
        reward_role(4, shared)._gather("evaluation", 0, of_failures(4, 0))


@pytest.mark.parametrize(("of_leader", "told"), [((4, 0), "rank 4's"), ((0, 0), "rank 6's")])
def test_the_message_has_the_first_failure_of_any_rank_and_the_function_s_place(of_leader, told):
    with pytest.raises(RewardError) as refusal:
        failures_of_a_step(reward_role(4, {}, max_failures=0.1), of_leader, (4, 0))
    message = str(refusal.value)
    assert message.endswith(f"The first failure was {told}")
    assert re.search(r"reward.function: 'exact_match' \(/.*/exact_match.py, line \d+\) failed", message)
    assert "reward.max_failures = 0.1" in message


def test_the_first_failure_of_a_step_is_that_of_its_first_chunk_with_one():
    statistics = of_failures(0, 0)
    for failure in ("first", "second"):
        statistics.add(*scored([(1.0, 2, False)], 1, failure=failure))
    assert statistics.first_failures == {"": "first"}


TWO = ({"function": "exact_match", "name": "form"}, {"function": "math"})


def of_two_functions(form: int, math: int, unscored: int = 0) -> RewardStatistics:
    """Of 4 samples, so many of which each function failed on, and which none is for."""
    experience, _ = scored([(0.0, 2, False)] * 4)
    failed = {
        title: Scores([0.0] * 4, number, 0, f"that of {title}") for title, number in (("form", form), ("math", math))
    }
    statistics = RewardStatistics()
    statistics.add(experience, Scores([0.0] * 4, skipped=frozenset(range(unscored)), by_function=failed))
    return statistics


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ((2, 2), None),
        ((0, 3), "reward.functions.1.function: 'math' .* failed on 3 of 4 samples .* first failure was that of math"),
        ((3, 0), "reward.functions.0.function: 'exact_match' .* failed on 3 of 4 .* first failure was that of form"),
        ((0, 0, 3), r"reward: every function returned None for 3 of 4 samples of score\[0\]"),
    ],
)
def test_each_of_several_functions_is_judged_by_itself(failures, message):
    functions = tuple(schema.RewardPart(**part) for part in TWO)
    leader = reward_role(4, {}, functions=functions)
    leader.records.ranks = (4,)
    if message is None:
        assert leader._gather("score", 0, of_two_functions(*failures))["reward_errors"] == 4
        return
    with pytest.raises(RewardError, match=message):
        leader._gather("score", 0, of_two_functions(*failures))
