"""Where evaluations stand in the order of tasks, and whom they hold up."""

from typing import Any

import pytest

from rltrain.schedule.bound import timetable
from rltrain.schedule.check import check
from rltrain.schedule.order import Entry, Order
from rltrain.schedule.steps import build_order
from tests.unit.schedule_configs import GRPO, make_config, order_of, place

TWO_SETS = (
    {"name": "often", "data": {"path": "o"}, "samples_per_prompt": 4, "sampling": {"temperature": 1.0}, "interval": 1},
    {"name": "seldom", "data": {"path": "s"}, "interval": 2},
)
BEST = {"keep_best": {"metric": "eval/often/pass@4"}}
AHEAD = {"mode": "asynchronous", "max_staleness": 1}
REWARD_APART = {"actor": 0, "rollout": 1, "reward": 2}
REWARD_WITH_ACTOR = {"actor,reward": 0, "rollout": 1}


def evaluations_of(order: Order) -> list[str]:
    names = ("evaluation", "save_best", "save_candidate", "keep_candidate", "decide_to_stop", "update", "load_weights")
    return [
        f"{entry.name} {entry.step}.{entry.chunk}"
        for entry in order
        if entry.kind == "task" and any(name in entry.name for name in names)
    ]


def test_sets_are_drawn_one_after_the_other_where_each_is_due():
    order = order_of(evaluation={"sets": TWO_SETS}, steps=3)
    assert [text for text in evaluations_of(order) if "update" not in text] == [
        *["generate_evaluation 0.0", "generate_evaluation 0.1", "generate_evaluation 0.2"],
        *["score_evaluation 0.0", "score_evaluation 0.1", "score_evaluation 0.2"],
        *["generate_evaluation 1.1", "score_evaluation 1.1"],
        *["generate_evaluation 2.1", "generate_evaluation 2.2", "score_evaluation 2.1", "score_evaluation 2.2"],
        *["generate_evaluation 3.0", "generate_evaluation 3.1", "generate_evaluation 3.2"],
        *["score_evaluation 3.0", "score_evaluation 3.1", "score_evaluation 3.2"],
    ]


def test_step_by_step_the_best_policy_is_saved_before_it_is_trained_on():
    order = order_of(evaluation={"sets": TWO_SETS, **BEST}, steps=2, data={"train": {"path": "t"}})
    of_step_1 = [text for text in evaluations_of(order) if " 1." in text]
    assert of_step_1 == ["generate_evaluation 1.0", "score_evaluation 1.0", "save_best 1.0", "update 1.0"]


def test_beside_training_a_candidate_is_saved_and_judged_when_the_score_is_there():
    order = order_of(
        evaluation={"sets": TWO_SETS[:1], **BEST, "stop_at": 0.5, "stop_metric": "eval/often/score"},
        data={"train": {"path": "t"}},
        schedule=AHEAD,
        placement=REWARD_WITH_ACTOR,
    )
    assert [text for text in evaluations_of(order) if " 1." in text] == [
        *["generate_evaluation 1.0", "save_candidate 1.0", "update 1.0"],
        *["score_evaluation 1.0", "keep_candidate 1.0", "decide_to_stop 1.0"],
    ]


@pytest.mark.parametrize("placement", [REWARD_APART, REWARD_WITH_ACTOR], ids=["reward apart", "reward with the actor"])
@pytest.mark.parametrize("judged", [{}, {"stop_at": 0.5, **BEST}], ids=["", "judged"])
def test_training_on_the_next_step_does_not_wait_for_an_evaluation(placement: dict[str, int], judged: dict[str, Any]):
    """However long it takes, drawing and scoring the evaluation before step 2 delays no training before step 3's."""

    def start_of_update(evaluation_s: float) -> float:
        def seconds(entry: Entry, rank: int) -> float:
            return evaluation_s if "_evaluation" in entry.name and entry.step == 2 else 1.0

        sets = [{**TWO_SETS[0], "interval": 2}]
        order = order_of(
            steps=6,
            schedule=AHEAD,
            placement=placement,
            data={"train": {"path": "t"}},
            evaluation={"sets": sets, **judged},
        )
        periods = timetable(order, place(placement), seconds)
        return next(period.start for entry, period in periods.items() if (entry.name, entry.step) == ("update", 2))

    assert start_of_update(100.0) == start_of_update(1.0)


def test_where_nothing_is_trained_the_checkpoint_is_evaluated_once():
    config = make_config(algorithm="evaluate", evaluation={"sets": TWO_SETS}, placement={"rollout,reward": "0-3"})
    order = build_order(config, place(config.placement))
    check(order, place(config.placement))
    assert evaluations_of(order) == [
        "load_weights 0.0",
        *[f"generate_evaluation 0.{number}" for number in range(3)],
        *[f"score_evaluation 0.{number}" for number in range(3)],
    ]


def test_a_metric_is_judged_only_where_its_set_was_evaluated():
    order = order_of(
        evaluation={"sets": TWO_SETS, "interval": 3, "stop_at": 0.9, "stop_metric": "eval/seldom/score"}, steps=5
    )
    assert [entry.step for entry in order if entry.name == "decide_to_stop"] == [0, 2, 4, 5]
    default = order_of(evaluation={"sets": TWO_SETS, "interval": 3, "stop_at": 0.9}, steps=5, placement=GRPO)
    assert [entry.step for entry in default if entry.name == "decide_to_stop"] == [0, 3, 5]
