"""Which runs repeat: a table of engines and schedules."""

from typing import Any

import pytest

from rltrain.planning.description import describe_repeating
from rltrain.planning.doubts import obstacle_to_repeating
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import role_grids
from tests.unit.schedule_configs import make_config, place

ONE_ENGINE = {"actor": 0, "rollout": 1, "reward": 2}
TWO_ENGINES = {"actor": 0, "rollout": "1-2", "reward": 3}
PARTIAL = {"partial_rollouts": True, "on_stale": "mask"}
AHEAD = {"mode": "asynchronous", "max_staleness": 1, "in_flight_sync": False}
SGLANG = {"engine": "sglang"}
SEEDED = SGLANG | {"sglang": {"args": {"enable_deterministic_inference": True}}}


def obstacle(
    placement: dict[str, Any], schedule: dict[str, Any], rollout: dict[str, Any] | None = None, **sections: Any
) -> str | None:
    sections = {"batch": {"mini_batches": 1}, **sections}
    config = make_config(placement=placement, schedule=schedule, rollout=rollout or {}, **sections)
    grids = role_grids(config, place(placement))
    check_schedule(config, place(placement), grids)
    return obstacle_to_repeating(config, grids)


@pytest.mark.parametrize(
    "schedule", [{}, PARTIAL, {"mode": "pipelined"}, AHEAD, AHEAD | PARTIAL, AHEAD | {"chunks": 2}]
)
def test_a_run_with_one_engine_of_our_own_repeats_unless_weights_come_in_flight(schedule):
    assert obstacle(ONE_ENGINE, schedule) is None


@pytest.mark.parametrize("schedule", [{}, AHEAD, {"mode": "asynchronous"}])
def test_so_does_one_with_several_engines_that_settle_nothing_between_them(schedule):
    assert obstacle(TWO_ENGINES, schedule) is None
    assert obstacle(TWO_ENGINES, schedule, SEEDED) is None


@pytest.mark.parametrize(
    ("placement", "schedule", "rollout", "reason"),
    [
        (TWO_ENGINES, PARTIAL, {}, "schedule.partial_rollouts) depends on how fast each of the 2 engines"),
        (TWO_ENGINES, AHEAD | PARTIAL, {}, "schedule.partial_rollouts"),
        (TWO_ENGINES, AHEAD | {"chunks": 2}, {}, "schedule.chunks) depends on how fast each of the 2 engines"),
        (TWO_ENGINES, {"mode": "pipelined"}, {}, "schedule.chunks"),
        (TWO_ENGINES, {"mode": "pipelined", "chunks": 1}, {}, "schedule.mode"),
        (ONE_ENGINE, {"mode": "asynchronous", "max_staleness": 1}, {}, "schedule.in_flight_sync"),
        (ONE_ENGINE, {}, SGLANG, "enable_deterministic_inference"),
        (ONE_ENGINE, PARTIAL, SEEDED, "schedule.partial_rollouts) depends on how fast the SGLang server is"),
    ],
)
def test_what_keeps_a_run_from_repeating_is_named_with_its_key(placement, schedule, rollout, reason):
    assert reason in (obstacle(placement, schedule, rollout) or "")


SELECTING = {"batch": {"dynamic_sampling": {}}, "data": {"train": {"path": "t", "label_key": "answer"}}}


@pytest.mark.parametrize("schedule", [{}, PARTIAL, AHEAD])
def test_selecting_groups_repeats_where_rewards_are_known_at_once(schedule):
    placement = {"actor": 0, "rollout,reward": 1}
    assert obstacle(placement, schedule, **SELECTING, reward={"function": "exact_match"}) is None
    of_a_process = obstacle(placement, schedule, **SELECTING, reward={"function": "math"})
    assert of_a_process is not None and of_a_process.startswith("when a reward function answers")
    several = obstacle({"actor": 0, "rollout,reward": "1-2"}, {}, **SELECTING, reward={"function": "exact_match"})
    assert several is not None and "batch.dynamic_sampling) depends on how fast each of the 2 engines" in several


def test_the_dry_run_says_it():
    config = make_config(placement=TWO_ENGINES, schedule=PARTIAL)
    grids = role_grids(config, place(TWO_ENGINES))
    assert describe_repeating(config, grids).startswith("no: which responses a generate task leaves to the next")
    alike = config.model_copy(update={"schedule": config.schedule.model_copy(update={"partial_rollouts": False})})
    assert describe_repeating(alike, grids).startswith("yes, on CPUs bit for bit")


def test_a_run_without_a_rollout_repeats():
    assert obstacle_to_repeating(make_config(), {}) is None


@pytest.mark.parametrize(("judge", "reason"), [({}, None), (SGLANG, "(judge.sglang.args"), (SEEDED, None)])
def test_a_judge_s_server_answers_as_it_likes(judge, reason):
    judged = obstacle({**ONE_ENGINE, "judge": 3}, {}, judge={"path": "j", "prompt": "{response}?", **judge})
    assert (judged is None) if reason is None else reason in str(judged)
