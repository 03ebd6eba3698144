"""An engine that takes weights in flight must have its memory where they arrive."""

import pytest

from rltrain.cluster.placement import resolve_placement, role_grids
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.schedule.legality import check_schedule

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
