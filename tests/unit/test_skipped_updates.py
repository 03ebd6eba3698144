"""What a role says of optimizer steps that changed nothing."""

import logging
from types import SimpleNamespace

import pytest

from rltrain.roles.trained import TrainedRole
from rltrain.training.trainable import SKIPPED
from tests.unit.schedule_configs import make_config


def role_on(rank: int) -> TrainedRole:
    role = TrainedRole.__new__(TrainedRole)
    role.name = "critic"  # type: ignore[misc]
    role.config = make_config(on_divergence={"max_skipped": 7})
    role.job = SimpleNamespace(world=SimpleNamespace(rank=rank), leader_of=lambda name: 2)  # type: ignore[assignment]
    return role


def warnings_of(rank: int, skipped: list[float], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        role_on(rank).warn_of_skipped(4, [{SKIPPED: number} for number in skipped])
    return caplog.messages


def test_the_leader_warns_of_them_with_step_role_and_limit(caplog):
    (message,) = warnings_of(2, [0.0, 1.0, 1.0], caplog)
    assert message.startswith("step 4: 2 of the critic's 3 optimizer steps had a loss or a gradient norm that was not")
    assert "on_divergence.max_skipped 7" in message


def test_nobody_else_does_nor_anybody_of_usual_steps(caplog):
    assert warnings_of(0, [1.0], caplog) == []
    assert warnings_of(2, [0.0, 0.0], caplog) == []
