"""An order is made as it is looked at, and what holds for an iteration of every kind holds for all of it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.schedule.iterations import build_order
from rltrain.schedule.memory_plan import MemoryPlan
from rltrain.schedule.order import Entry, Order, count_of_each_kind, first_of_each_kind
from rltrain.schedule.replay import check
from rltrain.tasks.roles import STATE_PARTS
from tests.unit.schedule_configs import EVALUATED_APART, GRPO, PPO, evaluations, make_config, order_of, place

LONG = 10**6


@st.composite
def runs(draw: st.DrawFn) -> Config:
    """Of any mode, with all that comes every so many steps."""
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
    """What iterations of a kind have in common."""
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
    """As `order`, with two neighbours swapped, or an entry left out, in every iteration of a kind."""

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
    """Until the order is checked and counted, a rank has begun, gone through its first steps, and gone on from a
    checkpoint in the middle."""
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
