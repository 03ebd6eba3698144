"""What is declared of tasks is what the order does with them."""

import pytest

from rltrain.data.experience import FIELDS
from rltrain.tasks.declaration import Needs, RoleTasks, Task, parts_of
from rltrain.tasks.roles import DECLARED, JOINT, OPINIONS, TRANSFERS, all_tasks, model_tasks, needs_of, taken_by
from rltrain.trainer import ROLES
from tests.unit.schedule_configs import GRPO, PPO, order_of

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
            assert owners - {"env"} <= ({role.name} if role.model else set()), "that of env is its environments' own"


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
    assert model_tasks()["teach"] == ("teacher", False), "so what it needs on the device is foretold"


def test_a_metric_is_reported_by_one_task() -> None:
    reported = [metric.name for task in all_tasks() for metric in task.reports]
    assert len(reported) == len(set(reported)) > 0
