"""Tests of the orders of long runs, of evaluation in them, and of the declarations of tasks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.data.experience import FIELDS
from rltrain.errors import ConfigError
from rltrain.schedule.iterations import build_order
from rltrain.schedule.memory_plan import MemoryPlan
from rltrain.schedule.order import Entry, Order, count_of_each_kind, first_of_each_kind
from rltrain.schedule.replay import check, timetable
from rltrain.tasks.declaration import Needs, RoleTasks, Task, parts_of
from rltrain.tasks.roles import (
    DECLARED,
    JOINT,
    OPINIONS,
    STATE_PARTS,
    TRANSFERS,
    all_tasks,
    model_tasks,
    needs_of,
    taken_by,
)
from rltrain.trainer import ROLES
from tests.support.schedule_configs import EVALUATED_APART, GRPO, PPO, evaluations, make_config, order_of, place

LONG = 10**6


@st.composite
def runs(draw: st.DrawFn) -> Config:
    """Draws a run of any mode, with all periodic tasks."""
    placement = draw(st.sampled_from([GRPO, PPO, EVALUATED_APART]))
    mode = draw(st.sampled_from(["sequential", "pipelined", "asynchronous"]))
    sync_every = draw(st.integers(1, 2)) if mode == "asynchronous" else 1
    schedule = {
        "mode": mode,
        "chunks": 1 if mode == "sequential" else draw(st.integers(1, 2)),
        "sync_every": sync_every,
    }
    if mode == "asynchronous":
        schedule["max_staleness"] = draw(st.integers(0, 3)) + sync_every - 1
    return make_config(
        algorithm="ppo" if placement is PPO else "grpo",
        placement=placement,
        steps=draw(st.integers(1, 40)),
        schedule=schedule,
        critic={"critic_warmup_steps": draw(st.integers(0, 3))},
        checkpoint={"save_interval": sync_every * draw(st.integers(0, 2)), "save_hf_interval": draw(st.integers(0, 7))},
        reference={"refresh_every": draw(st.integers(0, 5))} if placement is GRPO else {},
        evaluation=draw(evaluations()),
    )


def build(config: Config) -> Order:
    return build_order(config, place(config.placement))


def kind(order: Order, number: int) -> tuple[int, ...]:
    """Returns the kind of an iteration: the turning points passed, and the intervals due."""
    made = order.iterations
    return (sum(turn <= number for turn in made.turns), *(int(number % every == 0) for every in sorted(made.intervals)))


@given(st.integers(-30, 30), st.integers(0, 150), st.frozensets(st.integers(1, 200), max_size=5))
def test_numbers_are_told_apart_by_what_is_due(begin: int, length: int, intervals: frozenset[int]) -> None:
    numbers = range(begin, begin + length)
    kinds = [tuple(number % every == 0 for every in intervals) for number in numbers]
    assert [*first_of_each_kind(numbers, intervals)] == [numbers[kinds.index(one)] for one in dict.fromkeys(kinds)]
    assert count_of_each_kind(numbers, intervals) == {numbers[kinds.index(one)]: n for one, n in Counter(kinds).items()}


@settings(max_examples=25, deadline=None)
@given(runs(), st.data())
def test_iterations_of_a_kind_have_the_same_entries(config: Config, data: st.DataObject) -> None:
    order = build(config)
    made = order.iterations
    first = {kind(order, number): number for number in reversed(made.numbers)}
    assert [*made.from_on(order.first)] == sorted(first.values())
    for number in made.numbers:
        like = first[kind(order, number)]
        moved = [replace(entry, step=entry.step + number - like) for entry in made.entries(like)]
        assert [*made.entries(number)] == moved
    assert order.num_entries() == len([*order])
    begin = data.draw(st.sampled_from(made.numbers))
    rest = [*order.items(order.boundary(begin))]
    for name in {entry.name for _, entry in rest}:
        ahead = order.ahead(order.boundary(begin) - 1)
        assert next(item for item in ahead if item[1].name == name) == next(one for one in rest if one[1].name == name)


def spoil(order: Order, spoilt: tuple[int, ...], index: int, *, drops: bool) -> Order:
    """Returns `order` with two neighbours swapped or an entry dropped in every iteration of one kind."""

    def entries(number: int) -> list[Entry]:
        found = [*order.iterations.entries(number)]
        if kind(order, number) == spoilt and len(found) > 1:
            place = index % (len(found) - 1)
            found[place : place + 2] = (
                found[place + 1 : place + 2 - drops] if drops else reversed(found[place : place + 2])
            )
        return found

    return Order(replace(order.iterations, entries=entries))


def finishes(entries: Iterable[Entry], config: Config) -> bool:
    try:
        check(entries, place(config.placement))
    except ConfigError:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(runs(), st.data())
def test_an_order_cannot_finish_exactly_where_its_excerpt_cannot(config: Config, data: st.DataObject) -> None:
    order = build(config)
    spoilt = kind(order, data.draw(st.sampled_from(order.iterations.numbers)))
    spoiled = spoil(order, spoilt, data.draw(st.integers(0, 40)), drops=data.draw(st.booleans()))
    assert finishes(spoiled, config) == finishes(spoiled.excerpt(), config)
    assert finishes(order.excerpt(), config)
    assert {entry.name for entry in order.excerpt()} == {entry.name for entry in order}
    assert Order.of([*order]).excerpt() == [*order]


@settings(max_examples=15, deadline=None)
@given(runs(), st.data())
def test_memory_follows_the_same_rules_as_along_a_list_of_all_entries(config: Config, data: st.DataObject) -> None:
    order = build(config)
    entries = [*order.items()]
    listed = Order.of([entry for _, entry in entries])
    roles = place(config.placement).roles
    here, there = MemoryPlan(order, roles), MemoryPlan(listed, roles)
    index = data.draw(st.integers(0, len(entries) - 1))
    keys = [(role, part) for role in ("actor", "critic") for part in (*STATE_PARTS, "gradients")]
    for key in [*keys, ("rollout", "weights"), ("rollout", "kv_cache"), ("reference", "weights")]:
        assert here.may_drop(key, entries[index][0]) == there.may_drop(key, index)
        assert here.is_rewritten(key, entries[index][0]) == there.is_rewritten(key, index)
    following, expected = here.next_device_task(entries[index][0]), there.next_device_task(index)
    assert following == (None if expected is None else entries[expected][0])


@settings(max_examples=15, deadline=None)
@given(runs())
def test_both_ends_of_every_transfer_find_each_other(config: Config) -> None:
    order = build(config)
    for position, entry in order.items():
        assert order[position] == entry
        if entry.kind == "post":
            assert order[order.wait_of(position)].transfer == entry.transfer
            assert order.post_of(order.wait_of(position)) == position


def entries_made(config: Config) -> int:
    """Returns the number of entries made to check and count the order, to begin a rank, to run its first steps, and to
    resume from the middle."""
    made, order = 0, build(config)

    def entries(number: int) -> list[Entry]:
        nonlocal made
        found = order.iterations.entries(number)
        made += len(found)
        return [*found]

    counted = Order(replace(order.iterations, entries=entries))
    counted.digest()
    counted.num_entries()
    check(counted.excerpt(), place(config.placement))
    plan = MemoryPlan(counted, ["actor", "rollout"])
    for position, _ in counted.items(end=counted.boundary(4)):
        for key in (("actor", "weights"), ("rollout", "weights"), ("actor", "gradients")):
            plan.may_drop(key, position)
        counted.crossing(position)
    assert len([*islice(counted.from_step(config.steps // 2), 50)]) == 50
    return made


NEVER = 10**18


@pytest.mark.parametrize(
    "intervals",
    [(1, 1, 1, 1), (50, 50, 50, 50), (NEVER, NEVER, NEVER, NEVER), (LONG - 1, 10**5, 70, NEVER), (997, 991, 983, 977)],
)
@pytest.mark.parametrize("lead", [0, 2])
def test_the_work_does_not_grow_with_steps_or_intervals(intervals: tuple[int, int, int, int], lead: int) -> None:
    """Four intervals have at most sixteen combinations."""
    evaluated, saved, exported, refreshed = intervals
    sections = {
        "schedule": {"mode": "asynchronous", "max_staleness": lead} if lead else {},
        "evaluation": {"interval": evaluated},
        "checkpoint": {"save_interval": saved, "save_hf_interval": exported, "memory": {"interval": saved}},
        "reference": {"refresh_every": refreshed},
    }
    few = entries_made(make_config(steps=200, evaluation={"interval": 1}, schedule=sections["schedule"]))
    assert entries_made(make_config(steps=10**12, **sections)) < 5 * few


def test_long_ways_to_the_first_steps_of_the_actor_cost_nothing() -> None:
    ppo = {"algorithm": "ppo", "placement": PPO, "steps": LONG + 10}
    assert entries_made(make_config(**ppo, critic={"critic_warmup_steps": LONG})) < 5000


def test_generating_further_ahead_than_the_run_is_long_changes_nothing() -> None:
    schedules = [{"mode": "asynchronous", "max_staleness": most} for most in (3, NEVER)]
    within, beyond = (order_of(steps=3, schedule=schedule) for schedule in schedules)
    assert [*within] == [*beyond]


def test_runs_of_other_lengths_and_other_intervals_have_other_digests() -> None:
    orders = [order_of(steps=LONG), order_of(steps=LONG + 1), order_of(steps=LONG, evaluation={"interval": 7})]
    assert len({order.digest() for order in orders}) == 3


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
    """However long it takes, the evaluation before step 2 delays no training before step 3's."""

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
    """The next due evaluation does not delay others either. It takes its weights early and starts after the current
    one."""
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


RUNS = {
    "grpo": {"checkpoint": {"save_interval": 1, "save_hf_interval": 1}, "loss": {"old_logprobs": "actor"}},
    "ppo": {"algorithm": "ppo", "placement": PPO},
    "pipelined": {"placement": GRPO, "schedule": {"mode": "pipelined", "chunks": 2}, "evaluation": {"stop_at": 0.5}},
    "sft": {"algorithm": "sft"},
    "dpo": {"algorithm": "dpo", "placement": {"actor": 0, "reference": 1}},
}


@pytest.mark.parametrize("name", RUNS)
def test_whatever_the_order_does_with_a_role_is_declared_of_it(name: str) -> None:
    for entry in order_of(**RUNS[name]):
        tasks = DECLARED[entry.actors[0]].tasks
        if entry.kind == "task" and entry.name != "checkpoint" and entry.name not in JOINT:
            assert entry.name in {task.name for task in tasks}, entry
        elif entry.kind == "post":
            assert any(entry.name in task.leaves for task in tasks), entry
        elif entry.kind == "wait":
            role = entry.actors[0]
            taken = {transfer for task in tasks for transfer in taken_by(role, task, DECLARED)}
            assert entry.name in taken, entry


def test_a_role_has_a_method_for_every_task_declared_of_it() -> None:
    assert ROLES.keys() == DECLARED.keys()
    for role in DECLARED.values():
        assert [task.name for task in role.tasks if not callable(getattr(ROLES[role.name], task.name, None))] == []


def test_transfers_carry_fields_of_experience_and_somebody_takes_them() -> None:
    assert {field for fields in TRANSFERS.values() for field in fields} <= FIELDS.keys()
    left = {transfer for role in DECLARED.values() for task in role.tasks for transfer in task.leaves}
    assert left == TRANSFERS.keys()


def test_a_task_that_informs_a_role_leaves_what_that_role_takes_with_the_samples() -> None:
    for task in (task for role in DECLARED.values() for task in role.tasks if task.informs):
        (samples,), informed = task.takes, task.informs
        told = [taken_by(informed, other, DECLARED) for other in DECLARED[informed].tasks if OPINIONS in other.takes]
        assert any({samples, *task.leaves} <= {*taken} for taken in told), task


def test_a_task_that_needs_memory_needs_that_of_a_role_which_has_some() -> None:
    for role in DECLARED.values():
        for task in role.tasks:
            owners = {owner for owner, _ in needs_of(task.name).parts}
            assert owners - {"env"} <= ({role.name} if role.model else set()), (
                "the memory of env belongs to its environments"
            )


def test_where_models_compute_follows_from_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_tasks() == {
        "actor_logprobs": ("actor", False),
        "accumulate": ("actor", True),
        "update": ("actor", True),
        "values": ("critic", False),
        "accumulate_critic": ("critic", True),
        "update_critic": ("critic", True),
        "reference_logprobs": ("reference", False),
        "evaluation_logprobs": ("reference", False),
        "score_held_out": ("actor", False),
        "teacher_logprobs": ("teacher", False),
        "inference_logprobs": ("inference", False),
        "model_scores": ("reward_model", False),
        "evaluation_model_scores": ("reward_model", False),
    }
    teaches = Task("teach", Needs(reads=parts_of("teacher", "weights")), informs="actor")
    monkeypatch.setitem(DECLARED, "teacher", RoleTasks("teacher", (teaches,), model="evaluated"))
    assert model_tasks()["teach"] == ("teacher", False), "its device memory is planned"


def test_a_metric_is_reported_by_one_task() -> None:
    reported = [metric.name for task in all_tasks() for metric in task.reports]
    assert len(reported) == len(set(reported)) > 0
