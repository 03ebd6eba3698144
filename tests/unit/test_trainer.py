"""How a rank comes to the end of its part."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from rltrain.schedule.order import Entry, Order
from rltrain.trainer import Trainer


@pytest.mark.parametrize("hosted, expected", [(set(), [call.await_end(), call.close()]), ({"reward"}, [call.close()])])
def test_a_rank_without_a_role_stays_until_the_run_ends(hosted: set[str], expected: list[Any]) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.order, trainer.end, trainer.hosted, trainer.roles = Order.of([]), 0, hosted, {}  # type: ignore[assignment]
    trainer.reporter = reporter = MagicMock()
    trainer.checkpointing = SimpleNamespace(finish=lambda: None, close=lambda: None, stopped_by=None)  # type: ignore[assignment]
    trainer.transfers = trainer.trace = trainer.job = MagicMock()
    trainer.ending = set()
    assert trainer.run()
    assert reporter.mock_calls == expected


def test_ranks_that_end_training_early_leave_together() -> None:
    """One that is behind them may have experience to send to those that are done."""
    trainer = Trainer.__new__(Trainer)
    trainer.order, trainer.end, trainer.hosted, trainer.roles = Order.of([]), 0, {"actor"}, {}  # type: ignore[assignment]
    trainer.checkpointing = SimpleNamespace(finish=lambda: None, close=lambda: None, stopped_by=None)  # type: ignore[assignment]
    trainer.transfers = trainer.trace = trainer.reporter = MagicMock()
    trainer.job, trainer.ending = MagicMock(), {0, 2, 3}
    assert trainer.run()
    assert trainer.job.job_store.meet.mock_calls == [call("end", 3, waiting_for="the end of the other ranks")]


@pytest.mark.parametrize("together", [True, False], ids=["decide_to_stop", "stop_if_reached"])
def test_all_that_learn_that_training_ends_meet_there(together: bool) -> None:
    """Whether they have the task together or each role has one of its own."""
    roles, name = ("actor", "rollout"), "decide_to_stop" if together else "stop_if_reached"
    entries = [
        Entry("task", "update", ("actor",), 1),
        *([Entry("task", name, roles, 1)] if together else [Entry("task", name, (role,), 1) for role in roles]),
        Entry("task", "generate", ("rollout",), 2),
    ]
    trainer = Trainer.__new__(Trainer)
    trainer.order, trainer.end, trainer.ending, trainer.job = Order.of(entries), len(entries), set(), MagicMock()
    trainer.job.placement.ranks = {"actor": (0, 1), "rollout": (1, 4)}.__getitem__
    trainer.job.job_store.agreed.return_value = trainer.job.job_store.get.return_value = False
    trainer.position = 1
    getattr(trainer, name)(1, 0)
    assert (trainer.end, trainer.ending) == (len(entries), set())
    trainer.job.job_store.agreed.return_value = trainer.job.job_store.get.return_value = True
    getattr(trainer, name)(1, 0)
    assert (trainer.end, trainer.ending) == (1, {0, 1, 4})
