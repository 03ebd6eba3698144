"""An order is made as it is looked at, and what holds for its first period and its ends holds for all of it."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.residency.memory_plan import MemoryPlan
from rltrain.schedule.check import check
from rltrain.schedule.order import Entry, Order
from rltrain.schedule.steps import build_order, num_entries, shortened
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
        checkpoint={"save_interval": sync_every * draw(st.integers(0, 2)), "save_hf_interval": draw(st.integers(0, 3))},
        evaluation=draw(evaluations()),
    )


def build(config: Config) -> Order:
    return build_order(config, place(config.placement))


def windows(config: Config, order: Order) -> set[tuple[tuple[Entry, ...], ...]]:
    """All that lies together in the order: as many iterations as a transfer can cross, with steps counted from there.

    Iterations before the first step and the last one are told apart from others by a step that is no step's.
    """
    numbers, width = order.iterations.numbers, order.iterations.lead + 2

    def from_here(entry: Entry, number: int) -> Entry:
        return replace(entry, step=entry.step - number)

    def iteration(number: int, first: int) -> tuple[Entry, ...]:
        ends = (Entry("task", "begins", (), 0),) if number == numbers[0] else ()
        ends += (Entry("task", "ends", (), 0),) if number == numbers[-1] else ()
        return (*ends, *(from_here(entry, first) for entry in order.iterations.entries(number)))

    return {
        tuple(iteration(number, first) for number in numbers[index : index + width])
        for index, first in enumerate(numbers)
    }


@settings(max_examples=25, deadline=None)
@given(runs())
def test_whatever_happens_in_a_run_happens_in_the_short_one(config: Config) -> None:
    short = shortened(config)
    assert windows(short, build(short)) == windows(config, build(config))
    assert num_entries(config, place(config.placement)) == len([*build(config)])


def spoil(order: Order, every: int, offset: int, swapped: int) -> Order:
    """As `order`, with two neighbours swapped in every so many of its regular iterations."""

    def entries(number: int) -> list[Entry]:
        found = [*order.iterations.entries(number)]
        if number in order.iterations.regular and number % every == offset % every and len(found) > 1:
            place = swapped % (len(found) - 1)
            found[place : place + 2] = found[place + 1], found[place]
        return found

    return Order(replace(order.iterations, entries=entries))


def finishes(order: Order, config: Config) -> bool:
    try:
        check(order, place(config.placement))
    except ConfigError:
        return False
    return True


@settings(max_examples=25, deadline=None)
@given(runs(), st.integers(0, 5), st.integers(0, 40))
def test_an_order_cannot_finish_exactly_where_the_short_one_cannot(config: Config, offset: int, swapped: int) -> None:
    whole, short = build(config), build(shortened(config))
    every = whole.iterations.period
    assert finishes(spoil(whole, every, offset, swapped), config) == finishes(
        spoil(short, every, offset, swapped), config
    )


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


def entries_made(order: Order) -> int:
    """Until a rank has begun, gone through its first steps, and gone on from a checkpoint in the middle."""
    made = 0

    def entries(number: int) -> list[Entry]:
        nonlocal made
        found = order.iterations.entries(number)
        made += len(found)
        return [*found]

    counted = Order(replace(order.iterations, entries=entries))
    counted.digest()
    plan = MemoryPlan(counted, ["actor", "rollout"])
    for position, _ in counted.items(end=counted.boundary(20)):
        for key in (("actor", "weights"), ("rollout", "weights"), ("actor", "gradients")):
            plan.may_drop(key, position)
        counted.crossing(position)
    middle = max(counted.iterations.regular) // 2
    middle -= middle % counted.iterations.period
    assert len([*islice(counted.from_step(middle), 50)]) == 50
    return made


@pytest.mark.parametrize("interval", [1, 50])
def test_nothing_takes_longer_in_a_longer_run(interval: int) -> None:
    sections = {
        "schedule": {"mode": "asynchronous", "max_staleness": 2},
        "evaluation": {"interval": interval},
        "checkpoint": {"save_interval": interval},
    }
    assert entries_made(order_of(steps=1000, **sections)) == entries_made(order_of(steps=LONG, **sections))
    config = make_config(steps=LONG, **sections)
    assert shortened(config).steps < 3 * interval + 20
    check(build(shortened(config)), place(config.placement))


def test_runs_of_other_lengths_and_other_intervals_have_other_digests() -> None:
    orders = [order_of(steps=LONG), order_of(steps=LONG + 1), order_of(steps=LONG, evaluation={"interval": 7})]
    assert len({order.digest() for order in orders}) == 3
