"""Cutting a run between two steps: what is left of its order, and what crosses the cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import CHECKPOINT
from rltrain.schedule.replay import check
from rltrain.schedule.shape import RunShape
from tests.unit.schedule_configs import EVALUATED_APART, GRPO, PPO, evaluations, make_config, order_of, place

SCHEDULES = st.one_of(
    st.just({}),
    st.builds(lambda chunks: {"mode": "pipelined", "chunks": chunks}, st.integers(1, 4)),
    st.builds(
        lambda staleness, sync_every, chunks: {
            "mode": "asynchronous",
            "max_staleness": staleness + sync_every - 1,
            "sync_every": sync_every,
            "chunks": chunks,
        },
        st.integers(0, 3),
        st.integers(1, 2),
        st.integers(1, 2),
    ),
)
STEPS = 7


def saves_of(order, steps):
    return [step for step in range(1, steps + 1) if order.saves(step)]


@st.composite
def runs(draw):
    """(config, a step at whose boundary it saves)."""
    placement = draw(st.sampled_from([GRPO, PPO, EVALUATED_APART]))
    schedule = draw(SCHEDULES)
    config = make_config(
        algorithm="ppo" if placement is PPO else "grpo",
        placement=placement,
        steps=STEPS,
        schedule=schedule,
        checkpoint={"save_interval": schedule.get("sync_every", 1)},
        evaluation=draw(evaluations()),
    )
    return config, draw(st.sampled_from(saves_of(build_order(config, place(placement)), STEPS)))


@given(runs())
def test_what_is_left_can_finish_and_is_all_that_was_not_done(run):
    config, step = run
    placement = place(config.placement)
    whole = build_order(config, placement)
    rest = whole.from_step(step)
    check(rest, placement)
    cut = whole.boundary(step)
    crossing = [*whole.crossing(cut).values()]
    assert [*rest] == [*crossing, *(entry for _, entry in whole.items(cut))]
    assert all(entry.step >= step for entry in rest if entry.kind == "task")
    assert {entry.name for entry in crossing} <= {"samples", "scored"}
    assert len({entry.step for entry in crossing}) <= RunShape.of(config).lead


@given(runs())
def test_without_what_crossed_the_steps_ahead_are_drawn_anew(run):
    config, step = run
    placement = place(config.placement)
    rest = build_order(config, placement, first_step=step)
    check(rest, placement)
    for name in ("generate", "update"):
        steps = {entry.step for entry in rest if entry.name == name}
        assert steps == {*range(step, STEPS)}
    syncs = [i for i, entry in enumerate(rest) if entry.name == "weight_sync"]
    draws = [i for i, entry in enumerate(rest) if entry.name == "generate"]
    assert not draws or min(syncs) < min(draws), "engines start without weights"


@given(runs())
def test_the_rest_of_the_rest_is_the_rest(run):
    config, step = run
    whole = build_order(config, place(config.placement))
    for later in (save for save in saves_of(whole, STEPS) if save > step):
        assert [*whole.from_step(step).from_step(later)] == [*whole.from_step(later)]


@pytest.mark.parametrize(
    "checkpoint, saves",
    [
        ({"save_interval": 2}, [2, 4, 5]),
        ({"memory": {"interval": 2}}, [2, 4]),
        ({"save_interval": 4, "memory": {"interval": 3}}, [3, 4, 5]),
    ],
)
def test_every_role_comes_to_every_boundary(checkpoint, saves):
    order = order_of(checkpoint=checkpoint, steps=5)
    assert saves_of(order, 5) == saves
    for step in range(1, 6):
        roles = [entry.roles for entry in order if entry.name == CHECKPOINT and entry.step == step]
        assert roles == [("actor",), ("reference",), ("rollout",), ("reward",)]
        assert all(entry.step < step for _, entry in order.items(end=order.boundary(step)) if entry.name == "update")


def test_no_sync_is_joined_before_a_save_that_stands_before_it():
    schedule = {"mode": "asynchronous", "max_staleness": 1}
    saving = order_of(schedule=schedule, steps=5, checkpoint={"save_interval": 3}, data={"train": {"path": "t"}})
    earliest = {saving[position].step: first for position, first in saving.syncs()}
    boundary = saving.boundary(3)
    assert earliest[3] == boundary
    assert earliest[2] < saving.boundary(2), "one is joined early where nothing is saved"
