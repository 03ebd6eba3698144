"""The roles of a run, and the tasks of each."""

from typing import Literal

from rltrain.tasks import metrics
from rltrain.tasks.declaration import Key, Needs, RoleTasks, Task, parts_of

STATE_PARTS = ("weights", "master_weights", "optimizer")
TRAINED_PARTS = (*STATE_PARTS, "gradients")

OF_ONE_STEP = frozenset({"gradients"})
"""Parts that start at zero with their first use in a step, and that nobody reads after their last."""

OTHER = "other"
"""The kind of tasks that take next to no time."""

SAMPLES = (
    "sample_ids",
    "group_ids",
    "prompt_ids",
    "lengths",
    "truncated",
    "tokens",
    "response_mask",
    "policy_version",
    "rollout_logprobs",
    "turns",
    "turn_rewards",
)

TRANSFERS: dict[str, tuple[str, ...]] = {
    "samples": SAMPLES,
    "evaluation_samples": SAMPLES,
    "scored": (*SAMPLES, "rewards", "reward_parts"),
    "reference_logprobs": ("group_ids", "lengths", "reference_logprobs", "reference_top_ids", "reference_top_logprobs"),
    "teacher_logprobs": ("group_ids", "lengths", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
    "inference_logprobs": ("group_ids", "lengths", "actor_logprobs"),
    "values": ("group_ids", "lengths", "values"),
    "returns": ("group_ids", "lengths", "response_mask", "returns"),
}
"""The fields of Experience that each carries."""


def _weights(role: str) -> frozenset[Key]:
    return parts_of(role, "weights")


def _accumulates(role: str) -> Needs:
    return Needs(reads=_weights(role), updates=parts_of(role, "gradients"))


def _updates(role: str) -> Needs:
    return Needs(updates=parts_of(role, *TRAINED_PARTS))


_GENERATES = Needs(
    reads=_weights("rollout"), updates=parts_of("env", "simulators"), rewrites=parts_of("rollout", "kv_cache")
)

ACTOR = RoleTasks(
    "actor",
    (
        Task("load_sft_batch", kind=OTHER),
        Task("actor_logprobs", Needs(reads=_weights("actor")), forward=True, kind="actor log-probs"),
        Task("advantages", takes=("scored",), leaves=("returns",)),
        Task("accumulate", _accumulates("actor"), kind="actor update"),
        Task("update", _updates("actor"), reports=metrics.UPDATE, kind="actor update"),
        Task("save_hf", Needs(reads=_weights("actor")), kind=OTHER),
    ),
    model="trained",
)
CRITIC = RoleTasks(
    "critic",
    (
        Task("values", Needs(reads=_weights("critic")), takes=("scored",), leaves=("values",), informs="actor"),
        Task("accumulate_critic", _accumulates("critic"), takes=("returns",), kind="critic update"),
        Task(
            "update_critic",
            _updates("critic"),
            takes=("returns",),
            reports=metrics.UPDATE_CRITIC,
            kind="critic update",
        ),
    ),
    model="trained",
)
REFERENCE = RoleTasks(
    "reference",
    (
        Task(
            "reference_logprobs",
            Needs(reads=_weights("reference")),
            takes=("scored",),
            leaves=("reference_logprobs",),
            informs="actor",
            kind="reference",
        ),
    ),
    model="evaluated",
    needed_by_algorithm=False,
)
TEACHER = RoleTasks(
    "teacher",
    (
        Task(
            "teacher_logprobs",
            Needs(reads=_weights("teacher")),
            takes=("scored",),
            leaves=("teacher_logprobs",),
            informs="actor",
            kind="teacher",
        ),
    ),
    model="evaluated",
    needed_by_algorithm=False,
)
INFERENCE = RoleTasks(
    "inference",
    (
        Task(
            "inference_logprobs",
            Needs(reads=_weights("inference")),
            takes=("scored",),
            leaves=("inference_logprobs",),
            informs="actor",
            kind="actor log-probs",
        ),
    ),
    model="evaluated",
    needed_by_algorithm=False,
)
ROLLOUT = RoleTasks(
    "rollout",
    (
        Task("generate", _GENERATES, leaves=("samples",), reports=metrics.GENERATE),
        Task("generate_evaluation", _GENERATES, leaves=("evaluation_samples",), kind="generate"),
    ),
    model="served",
)
ENV = RoleTasks("env", needed_by_algorithm=False)
"""Answers what the rollout draws, in the rollout's tasks."""
REWARD = RoleTasks(
    "reward",
    (
        Task("score", takes=("samples",), leaves=("scored",), reports=metrics.SCORE),
        Task("score_evaluation", takes=("evaluation_samples",), reports=metrics.SCORE_EVALUATION, kind="score"),
    ),
)

DECLARED: dict[str, RoleTasks] = {
    role.name: role for role in (ACTOR, CRITIC, REFERENCE, TEACHER, INFERENCE, ENV, ROLLOUT, REWARD)
}
"""In the order in which roles are listed and built."""


SYNCED = {"weight_sync": "rollout", "sync_inference": "inference", "refresh_reference": "reference"}
"""Tasks that give the actor's weights to another role, and to which."""


def _gives_weights(task: str, reports: tuple[metrics.Metric, ...] = ()) -> Task:
    return Task(task, Needs(reads=_weights("actor"), rewrites=_weights(SYNCED[task])), reports=reports)


JOINT = {
    task.name: task
    for task in (
        _gives_weights("weight_sync", reports=metrics.WEIGHT_SYNC),
        _gives_weights("sync_inference"),
        _gives_weights("refresh_reference"),
        Task("decide_to_stop", kind=OTHER),
    )
}
"""Tasks of several roles."""


def all_tasks() -> list[Task]:
    """Of every role, then those of several."""
    return [*(task for role in DECLARED.values() for task in role.tasks), *JOINT.values()]


def kinds_of_tasks() -> dict[str, str]:
    """task -> its kind, in the order of their declaration."""
    return {task.name: task.kind or task.name.replace("_", " ") for task in all_tasks()}


def trained_roles() -> tuple[str, ...]:
    """Roles that learn."""
    return tuple(role.name for role in DECLARED.values() if role.model == "trained")


def model_roles() -> tuple[str, ...]:
    """Roles whose model is the training backend's."""
    return tuple(role.name for role in DECLARED.values() if role.model in ("trained", "evaluated"))


def device_roles() -> frozenset[str]:
    """Roles with something on the device."""
    return frozenset(role.name for role in DECLARED.values() if role.model is not None)


def optional_roles() -> tuple[str, ...]:
    """Roles that say something of the samples which no algorithm asks for, and which may be placed all the same."""
    return tuple(role.name for role in DECLARED.values() if not role.needed_by_algorithm)


def takers(transfer: str) -> tuple[str, ...]:
    """Roles with a task that takes what a transfer brings."""
    return tuple(role.name for role in DECLARED.values() if any(transfer in task.takes for task in role.tasks))


def informing(informed: Literal["actor", "reward"], transfer: str) -> list[tuple[str, Task]]:
    """(role, task) of all that take `transfer` and tell a role something of it, those that never learn first."""
    roles = sorted(DECLARED.values(), key=lambda role: role.model == "trained")
    tasks = [(role.name, task) for role in roles for task in role.tasks]
    return [(role, task) for role, task in tasks if task.informs == informed and transfer in task.takes]


def model_tasks() -> dict[str, tuple[str, bool]]:
    """Task -> the role whose model, the training backend's, computes in it, and whether it makes gradients."""
    found = {}
    for name in model_roles():
        for task in DECLARED[name].tasks:
            trains = (name, "gradients") in task.needs.updates
            if trains or task.informs or task.forward:
                found[task.name] = name, trains
    return found


def needs_of(task: str) -> Needs:
    """ValueError for a task that nobody has declared: memory that it needs might be away."""
    if task == "checkpoint":
        return Needs(keeps=frozenset().union(*(parts_of(role, *STATE_PARTS) for role in trained_roles())))
    for declared in all_tasks():
        if declared.name == task:
            return declared.needs
    raise ValueError(f"what the task {task} needs on the device is unknown: declare it in rltrain/tasks/roles.py")
