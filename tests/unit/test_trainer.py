"""How a rank comes to the end of its part."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from rltrain.roles.joint_tasks import EndOfTraining
from rltrain.schedule.order import Entry, Order
from rltrain.trainer import Trainer


def trainer_of(hosted: set[str], ending: set[int]) -> Any:
    """A trainer whose order is empty."""
    trainer: Any = Trainer.__new__(Trainer)
    trainer.order, trainer.hosted, trainer.roles = Order.of([]), hosted, {}
    trainer.checkpointing = SimpleNamespace(finish=lambda: None, close=lambda: None, stopped_by=None)
    trainer.transfers = trainer.trace = trainer.job = trainer.reporter = MagicMock()
    trainer.end = EndOfTraining(trainer.job, trainer.order, hosted)
    trainer.end.ranks = ending
    return trainer


@pytest.mark.parametrize("hosted, expected", [(set(), [call.await_end(), call.close()]), ({"reward"}, [call.close()])])
def test_a_rank_without_a_role_stays_until_the_run_ends(hosted: set[str], expected: list[Any]) -> None:
    trainer = trainer_of(hosted, ending=set())
    trainer.reporter = MagicMock()
    assert trainer.run()
    assert trainer.reporter.mock_calls == expected


def test_ranks_that_end_training_early_leave_together() -> None:
    """One that is behind them may have experience to send to those that are done."""
    trainer = trainer_of({"actor"}, ending={0, 2, 3})
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
        Entry("task", "save_hf", ("actor",), 2, final=True),
    ]
    job = MagicMock()
    job.placement.ranks = {"actor": (0, 1), "rollout": (1, 4)}.__getitem__
    end = EndOfTraining(job, Order.of(entries), {"actor"})
    job.job_store.agreed.return_value = job.job_store.get.return_value = False
    end.tasks[name](1, 0)
    assert (end.position, end.ranks) == (len(entries), set())
    job.job_store.agreed.return_value = job.job_store.get.return_value = True
    end.tasks[name](1, 0)
    assert (end.position, end.ranks) == (1, {0, 1, 4})
    skipped = [entry.name for position, entry in enumerate(entries) if end.skips(position, entry)]
    assert skipped == (["generate"] if together else [name, "generate"])
