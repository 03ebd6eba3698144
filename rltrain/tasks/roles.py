"""All roles of a run and their tasks."""

from collections.abc import Collection

from rltrain.tasks import metrics
from rltrain.tasks.declaration import Key, Needs, RoleTasks, Task, parts_of

STATE_PARTS = ("weights", "master_weights", "optimizer")
TRAINED_PARTS = (*STATE_PARTS, "gradients")

OF_ONE_STEP = frozenset({"gradients"})
"""Parts that are zero at their first use in a step. Nothing reads them after the last use in the step."""

OTHER = "other"
"""The kind of tasks that take almost no time."""

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
    "evaluation_logprobs": ("group_ids", "lengths", "reference_logprobs"),
    "teacher_logprobs": ("group_ids", "lengths", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
    "inference_logprobs": ("group_ids", "lengths", "actor_logprobs"),
    "model_scores": ("group_ids", "lengths", "model_scores"),
    "evaluation_model_scores": ("group_ids", "lengths", "model_scores"),
    "verdicts": ("group_ids", "lengths", "model_scores"),
    "evaluation_verdicts": ("group_ids", "lengths", "model_scores"),
    "values": ("group_ids", "lengths", "values"),
    "returns": ("group_ids", "lengths", "response_mask", "returns"),
}
"""The fields of an Experience carried by each transfer."""


OPINIONS = "opinions"
"""Placeholder in `takes` of a task. It means all transfers from roles informing the role of the task."""


def _weights(role: str) -> frozenset[Key]:
    return parts_of(role, "weights")


def _accumulates(role: str) -> Needs:
    return Needs(reads=_weights(role), updates=parts_of(role, "gradients"))


def _updates(role: str) -> Needs:
    return Needs(updates=parts_of(role, *TRAINED_PARTS))


BASE = parts_of("rollout", "base")
"""Base weights of engines with separate adapters. A weight sync leaves them unchanged. Other engines lack this part."""
_GENERATES = Needs(
    reads=_weights("rollout") | BASE, updates=parts_of("env", "simulators"), rewrites=parts_of("rollout", "kv_cache")
)

ACTOR = RoleTasks(
    "actor",
    (
        Task("load_batch", takes=("reference_logprobs",), kind=OTHER),
        Task("actor_logprobs", Needs(reads=_weights("actor")), takes=("scored",), forward=True, kind="actor log-probs"),
        Task("advantages", takes=("scored", OPINIONS), leaves=("returns",)),
        Task("accumulate", _accumulates("actor"), kind="actor update"),
        Task("update", _updates("actor"), reports=metrics.UPDATE, kind="actor update"),
        Task("save_hf", Needs(reads=_weights("actor")), kind=OTHER),
        Task(
            "score_held_out",
            Needs(reads=_weights("actor")),
            takes=("evaluation_logprobs",),
            forward=True,
            reports=metrics.SCORE_HELD_OUT,
            kind="score",
        ),
        Task("save_best", Needs(reads=_weights("actor")), kind=OTHER),
        Task("save_candidate", Needs(reads=_weights("actor")), kind=OTHER),
        Task("keep_candidate", kind=OTHER),
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
    head="value",
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
        Task(
            "evaluation_logprobs",
            Needs(reads=_weights("reference")),
            leaves=("evaluation_logprobs",),
            forward=True,
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
REWARD_MODEL = RoleTasks(
    "reward_model",
    tuple(
        Task(
            f"{of}model_scores",
            Needs(reads=_weights("reward_model")),
            takes=(f"{of}samples",),
            leaves=(f"{of}model_scores",),
            informs="reward",
            reports=reports,
            kind="reward model",
        )
        for of, reports in (("", metrics.MODEL_SCORES), ("evaluation_", ()))
    ),
    model="evaluated",
    head="value",
    reads_text=True,
    needed_by_algorithm=False,
)
JUDGE = RoleTasks(
    "judge",
    tuple(
        Task(
            f"{of}verdicts",
            Needs(reads=_weights("judge"), rewrites=parts_of("judge", "kv_cache")),
            takes=(f"{of}samples",),
            leaves=(f"{of}verdicts",),
            informs="reward",
            reports=reports,
            kind="reward model",
        )
        for of, reports in (("", metrics.VERDICTS), ("evaluation_", ()))
    ),
    model="served",
    reads_text=True,
    needed_by_algorithm=False,
)
ROLLOUT = RoleTasks(
    "rollout",
    (
        Task("load_weights", Needs(rewrites=_weights("rollout") | BASE), kind=OTHER),
        Task("generate", _GENERATES, leaves=("samples",), reports=metrics.GENERATE, joined_by=("env",)),
        Task("generate_evaluation", _GENERATES, leaves=("evaluation_samples",), kind="generate", joined_by=("env",)),
    ),
    model="served",
)
EVALUATION = RoleTasks(
    "evaluation",
    (
        Task(
            "run_evaluation",
            Needs(updates=_weights("evaluation"), rewrites=parts_of("evaluation", "kv_cache")),
            kind="generate",
        ),
        Task("keep_evaluated", kind=OTHER),
    ),
    model="served",
    needed_by_algorithm=False,
    beside_steps=True,
)
ENV = RoleTasks("env", needed_by_algorithm=False, on_device_if_offloaded=True)
"""Runs the environments of the rollout. It works within the rollout's tasks."""
REWARD = RoleTasks(
    "reward",
    (
        Task("score", takes=(OPINIONS, "samples"), leaves=("scored",), reports=metrics.SCORE),
        Task(
            "score_evaluation",
            takes=(OPINIONS, "evaluation_samples"),
            reports=metrics.SCORE_EVALUATION,
            kind="score",
        ),
    ),
)

DECLARED: dict[str, RoleTasks] = {
    role.name: role
    for role in (ACTOR, CRITIC, REFERENCE, TEACHER, INFERENCE, REWARD_MODEL, JUDGE, EVALUATION, ENV, ROLLOUT, REWARD)
}
"""All roles, in the order of listing and building."""


SYNCED = {
    "weight_sync": "rollout",
    "sync_inference": "inference",
    "refresh_reference": "reference",
    "sync_evaluation": "evaluation",
}
"""Tasks for sending the actor's weights to another role, each with its receiving role."""


def _gives_weights(task: str, reports: tuple[metrics.Metric, ...] = ()) -> Task:
    base = BASE if SYNCED[task] == "rollout" else frozenset()
    needs = Needs(reads=_weights("actor") | base, rewrites=_weights(SYNCED[task]))
    return Task(task, needs, reports=reports, kind="weight sync")


def _states_of_trained_roles() -> frozenset[Key]:
    return frozenset().union(
        *(parts_of(role.name, *STATE_PARTS) for role in DECLARED.values() if role.model == "trained")
    )


JOINT = {
    task.name: task
    for task in (
        _gives_weights("weight_sync", reports=metrics.WEIGHT_SYNC),
        _gives_weights("sync_inference"),
        _gives_weights("refresh_reference"),
        Task("sync_evaluation", Needs(reads=_weights("actor")), kind="weight sync"),
        Task("decide_to_stop", kind=OTHER),
        Task("stop_if_reached", kind=OTHER),
        Task("checkpoint", Needs(keeps=_states_of_trained_roles()), kind=OTHER),
    )
}
"""Tasks of several roles."""


def all_tasks() -> list[Task]:
    """Returns all tasks: those of single roles, then the joint ones."""
    return [*(task for role in DECLARED.values() for task in role.tasks), *JOINT.values()]


def task_of(name: str) -> Task:
    """Returns the declaration of a task. Raises ValueError if it is not declared."""
    for declared in all_tasks():
        if declared.name == name:
            return declared
    raise ValueError(f"the task {name} is not declared: add it to rltrain/tasks/roles.py")


def roles_of_task(name: str, placed: Collection[str]) -> tuple[str, ...]:
    """Returns the roles that execute a task together. Optional roles are included if they are placed.

    Raises ValueError if the task is a joint one without fixed roles.
    """
    if name in SYNCED:
        return ("actor", SYNCED[name])
    for role in DECLARED.values():
        for task in role.tasks:
            if task.name == name:
                return (role.name, *(other for other in task.joined_by if other in placed))
    raise ValueError(f"the task {name} belongs to no role: name its roles")


def kinds_of_tasks() -> dict[str, str]:
    """Returns the kind of every task, in the order of declaration."""
    return {task.name: task.kind or task.name.replace("_", " ") for task in all_tasks()}


def trained_roles() -> tuple[str, ...]:
    """Returns the roles with a trained model."""
    return tuple(role.name for role in DECLARED.values() if role.model == "trained")


def model_roles() -> tuple[str, ...]:
    """Returns the roles with a model in the training backend."""
    return tuple(role.name for role in DECLARED.values() if role.model in ("trained", "evaluated"))


def served_roles() -> tuple[str, ...]:
    """Returns the roles with a model in an engine."""
    return tuple(role.name for role in DECLARED.values() if role.model == "served")


def drawing_roles() -> tuple[str, ...]:
    """Returns the served roles with the policy's weights in their engines."""
    return tuple(role for role in served_roles() if not DECLARED[role].reads_text)


def device_roles() -> frozenset[str]:
    """Returns the roles with a model on the device."""
    return frozenset(role.name for role in DECLARED.values() if role.model is not None)


def device_roles_if_offloaded() -> frozenset[str]:
    """Returns the roles using the device without a model if their `offload` is set."""
    return frozenset(role.name for role in DECLARED.values() if role.on_device_if_offloaded)


def roles_beside_steps() -> tuple[str, ...]:
    """Returns the roles working independently of the samples of a step."""
    return tuple(role.name for role in DECLARED.values() if role.beside_steps)


def roles_of_samples() -> tuple[str, ...]:
    """Returns the device roles for work on the generated samples of a step."""
    return tuple(role for role in DECLARED if role in device_roles() - {*roles_beside_steps(), "rollout"})


def optional_roles() -> tuple[str, ...]:
    """Returns the roles that users may add to any algorithm."""
    return tuple(role.name for role in DECLARED.values() if not role.needed_by_algorithm)


def rewarding_roles() -> tuple[str, ...]:
    """Returns the roles that inform the reward, by scores of responses."""
    return tuple(role.name for role in DECLARED.values() if any(task.informs == "reward" for task in role.tasks))


def taken_by(role: str, task: Task, placed: Collection[str]) -> list[str]:
    """Returns the transfers taken by a role's task for the given placed roles, in the order of its declaration."""
    opinions = [opinion for transfer in task.takes for _, opinion in informing(role, transfer, placed)]
    left = [transfer for opinion in opinions for transfer in opinion.leaves]
    return [one for transfer in task.takes for one in (left if transfer == OPINIONS else [transfer])]


def takers(transfer: str, placed: Collection[str]) -> tuple[str, ...]:
    """Returns the placed roles with a task that takes a transfer. Roles that use it to inform others come last."""
    tasks = [(role, task) for role in DECLARED if role in placed for task in DECLARED[role].tasks]
    found = [(task.informs is not None, role) for role, task in tasks if transfer in taken_by(role, task, placed)]
    return tuple(dict.fromkeys(role for _, role in sorted(found, key=lambda one: one[0])))


def informing(informed: str, transfer: str, placed: Collection[str]) -> list[tuple[str, Task]]:
    """Returns (role, task) for the placed roles that take `transfer` and inform the role `informed` about it.

    Roles that never learn come first.
    """
    roles = sorted((one for one in DECLARED.values() if one.name in placed), key=lambda one: one.model == "trained")
    tasks = [(role.name, task) for role in roles for task in role.tasks]
    return [(role, task) for role, task in tasks if task.informs == informed and transfer in task.takes]


def model_tasks() -> dict[str, tuple[str, bool]]:
    """Returns for each task with a model of the training backend: (role of the model, whether it computes
    gradients)."""
    found = {}
    for name in model_roles():
        for task in DECLARED[name].tasks:
            trains = (name, "gradients") in task.needs.updates
            if trains or task.informs or task.forward:
                found[task.name] = name, trains
    return found


def needs_of(task: str) -> Needs:
    """Returns the memory parts needed by a task. Raises ValueError if the task is not declared."""
    return task_of(task).needs
