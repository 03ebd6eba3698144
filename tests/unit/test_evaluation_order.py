"""Where evaluations stand in the order of tasks, and whom they hold up."""

from itertools import pairwise
from typing import Any

import pytest

from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Entry, Order
from rltrain.schedule.replay import check, timetable
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


OWN_ENGINES = {"actor": 0, "rollout,reward": 1, "evaluation": 2}
GOALS = {"stop_at": 0.5, "keep_best": {"metric": "eval/score"}}


@pytest.mark.parametrize("schedule", [{}, {"mode": "pipelined"}, AHEAD, {**AHEAD, "in_flight_sync": False}])
def test_evaluations_by_engines_of_their_own_delay_nobody_else(schedule: dict[str, Any]):
    """Not the next one that is due either, whose weights are taken meanwhile: it comes when the one before is over."""
    placement = {**OWN_ENGINES, "reward": 3, "rollout": 1}
    del placement["rollout,reward"]

    def periods_of(evaluation_s: float) -> tuple[dict[Entry, Any], dict[Entry, Any]]:
        order = order_of(steps=8, schedule=schedule, placement=placement, evaluation={"interval": 2, **GOALS})
        periods = timetable(order, place(placement), lambda entry, _: evaluation_s if "run" in entry.name else 1.0)
        own = {entry: period for entry, period in periods.items() if "evaluation" in entry.roles[-1]}
        return own, {entry: period for entry, period in periods.items() if entry not in own}

    (_, of_others), (slow, beside_slow) = periods_of(1.0), periods_of(100.0)
    assert of_others == beside_slow
    runs = sorted((entry.step, *period) for entry, period in slow.items() if entry.name == "run_evaluation")
    assert [step for step, *_ in runs] == [0, 2, 4, 6, 8]
    assert all(start >= end for (_, _, end), (_, start, _) in pairwise(runs))


def test_whoever_evaluates_for_itself_follows_from_what_is_due():
    order = order_of(steps=3, schedule=AHEAD, placement=OWN_ENGINES, evaluation={"interval": 2, **GOALS})
    own = [str(entry) for entry in order if "evaluation" in entry.roles]
    of_evaluation = ["sync_evaluation[{}] (actor+evaluation)", "run_evaluation[{}] (evaluation)"]
    assert own == [
        *(
            text.format(0)
            for text in (*of_evaluation, "keep_evaluated[{}] (evaluation)", "stop_if_reached[{}] (evaluation)")
        ),
        "stop_if_reached[1] (evaluation)",
        *(
            text.format(2)
            for text in (*of_evaluation, "keep_evaluated[{}] (evaluation)", "stop_if_reached[{}] (evaluation)")
        ),
        *(text.format(3) for text in (*of_evaluation, "keep_evaluated[{}] (evaluation)")),
    ]
    assert not {"generate_evaluation", "score_evaluation", "save_candidate", "decide_to_stop"} & {e.name for e in order}
    assert [position for position, _ in order.syncs()] and {first for _, first in order.syncs("sync_evaluation")} == {0}


def test_the_rollout_gets_no_weights_that_only_an_evaluation_would_use():
    def syncs(placement: dict[str, Any]) -> list[int]:
        schedule = {"mode": "asynchronous", "max_staleness": 1, "sync_every": 2}
        order = order_of(steps=6, schedule=schedule, placement=placement, evaluation={"interval": 3})
        return [entry.step for entry in order if entry.name == "weight_sync"]

    assert syncs({"actor": 0, "rollout,reward": 1}) == [0, 2, 3, 4, 6]
    assert syncs(OWN_ENGINES) == [0, 2, 4]


def test_demonstrations_need_no_rollout_where_engines_of_their_own_evaluate():
    order = order_of(algorithm="sft", placement={"actor": "0-2", "evaluation": 3}, evaluation={"interval": 2})
    assert [str(entry).split("[")[0] for entry in order if entry.step == 2 and entry.kind == "task"] == [
        "sync_evaluation", "run_evaluation", "load_batch", "update",
    ]  # fmt: skip


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
