"""An engine that takes weights in flight must have its memory where they arrive."""

import pytest

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import resolve_placement, role_grids

ASYNCHRONOUS = {"mode": "asynchronous", "max_staleness": 1}


def check(schedule, offload):
    config = Config.model_validate(
        {
            "steps": 3,
            "placement": {"actor": 0, "rollout, reward": 1},
            "model": {"path": "m"},
            "data": {"train": {"path": "t"}},
            "rollout": {"offload": offload},
            "schedule": schedule,
        }
    )
    placement = resolve_placement(config.placement, 2, 2)
    check_schedule(config, placement, role_grids(config, placement))


def test_offload_is_refused_where_weights_arrive_in_flight():
    with pytest.raises(ConfigError, match=r"(?s)rollout\.offload: got true.*rollout\.offload: auto.*in_flight_sync: f"):
        check(ASYNCHRONOUS, True)


@pytest.mark.parametrize("offload", ["auto", False])
def test_an_engine_that_stays_may_take_them(offload):
    check(ASYNCHRONOUS, offload)


@pytest.mark.parametrize(
    "schedule", [{}, ASYNCHRONOUS | {"in_flight_sync": False}, ASYNCHRONOUS | {"max_staleness": 0}]
)
def test_offload_is_allowed_where_weights_wait_for_the_engine(schedule):
    check(schedule, True)


def check_server(placement, *, role="rollout", num_ranks=4, offload="auto", keep_weights=True, **schedule):
    config = Config.model_validate(
        {
            "steps": 3,
            "placement": placement,
            "model": {"path": "m"},
            "data": {"train": {"path": "t"}},
            role: {
                "engine": "sglang",
                "offload": offload,
                "parallel": {"tp": 2},
                "sglang": {"keep_weights": keep_weights},
            },
            "schedule": schedule,
        }
    )
    placement = resolve_placement(config.placement, num_ranks, num_ranks)
    check_schedule(config, placement, role_grids(config, placement))


def test_ranks_of_a_server_host_the_same_roles():
    with pytest.raises(ConfigError, match=r"placement\.rollout: the engine on ranks 2-3 shares.*some of its ranks"):
        check_server({"actor": "0-2", "rollout": "2-3", "reward": 0})
    check_server({"actor, rollout": "0-3", "reward": 0})
    check_server({"actor": "0-1", "rollout, reward": "2-3"})


def test_a_server_that_leaves_its_device_needs_the_copy_of_its_weights():
    colocated, apart = {"actor, rollout": "0-3", "reward": 0}, {"actor": "0-1", "rollout, reward": "2-3"}
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.keep_weights: got false.*rollout\.offload: false"):
        check_server(colocated, keep_weights=False)
    check_server(colocated, keep_weights=False, offload=False)
    check_server(apart, keep_weights=False)


def test_a_judge_s_server_is_bound_by_the_same():
    around = {"actor": "0-1", "rollout, reward": 0}
    with pytest.raises(ConfigError, match=r"placement\.judge: the engine on ranks 1-2 shares.*judge\.engine: embedded"):
        check_server(around | {"judge": "1-2"}, role="judge")
    with pytest.raises(ConfigError, match=r"judge\.sglang\.keep_weights: got false.*judge\.offload: false"):
        check_server(around | {"judge": "0-1", "rollout, reward": "0-1"}, role="judge", keep_weights=False)
    check_server(around | {"judge": "2-3"}, role="judge", keep_weights=False)
