"""The tasks of one training step, in the order in which they run.

`iterations.py` lays out the steps of a run according to the schedule's mode, and adds evaluations and checkpoints.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

from rltrain.schedule.order import Entries, Transfer
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, informing, roles_of_task, taken_by, takers, task_of


@dataclass(frozen=True)
class Part:
    """The tasks of a step inside one iteration. Without a lead one iteration has all of them."""

    generates: bool
    scores: bool
    informants: Sequence[str]
    """Names of tasks of models. They compute log-probs or values of scored samples for the actor."""
    trains: bool


class Step:
    """Appends the tasks of a step to an order."""

    def __init__(self, order: "TaskOrder", shape: RunShape) -> None:
        self.order, self.shape = order, shape
        self.chunks = range(shape.num_chunks)
        self.has_critic, self.has_inference = "critic" in order.roles, "inference" in order.roles

    def sync(self, step: int) -> None:
        """Appends the weight syncs from the actor to the rollout and, if placed, to role inference."""
        self.order.do("weight_sync", step)
        if self.has_inference:
            self.order.do("sync_inference", step)

    def run(self, step: int, part: Part) -> None:
        """Appends the tasks of `part`: generation, scores and advantages chunk by chunk, then the updates."""
        for chunk in self.chunks:
            if part.generates:
                self.order.do("generate", step, chunk)
            if part.scores:
                self.score("samples", "score", step, chunk)
            for log_probs_or_values in part.informants:
                self.order.do(log_probs_or_values, step, chunk)
            if part.trains:
                self._estimate_advantages(step, chunk)
        if part.trains:
            self._update(step)

    def score(self, samples: str, task: str, step: int, chunk: int) -> None:
        """Appends the scoring `task` of a chunk, after the reward models and judges of the same samples."""
        for _, opinion in informing("reward", samples, self.order.roles):
            self.order.do(opinion.name, step, chunk)
        self.order.do(task, step, chunk)

    def _estimate_advantages(self, step: int, chunk: int) -> None:
        if self.shape.needs_actor_logprobs and not self.has_inference:
            self.order.do("actor_logprobs", step, chunk)
        self.order.do("advantages", step, chunk)
        if self.shape.accumulates_actor and self._trains_actor(step):
            self.order.do("accumulate", step, chunk)
        if self.has_critic and self.shape.accumulates_critic:
            self.order.do("accumulate_critic", step, chunk)

    def _update(self, step: int) -> None:
        if self.has_critic:
            self.order.do("update_critic", step, takes_of=self.chunks)
        if self._trains_actor(step):
            self.order.do("update", step)

    def run_on_data(self, step: int) -> None:
        """Appends a step of training on rows of data. The reference, if placed, computes its log-probs first."""
        if "reference" in self.order.roles:
            self.order.do("reference_logprobs", step)
        self.order.do("load_batch", step)
        self.order.do("update", step)

    def _trains_actor(self, step: int) -> bool:
        return step >= self.shape.first_actor_step


class Flow:
    """The roles and transfers of every task in a run with certain `roles`."""

    def __init__(self, roles: Sequence[str], *, draws: bool, late: Collection[str] = ()) -> None:
        """Without `draws` the run has no samples and scores. Transfers of the `late` tasks are awaited after all
        others."""
        self.roles = roles
        left = {
            transfer: (role, task.name) for role in roles for task in DECLARED[role].tasks for transfer in task.leaves
        }
        self._sources = {name: role for name, (role, _) in left.items() if draws or name not in ("samples", "scored")}
        self._late = {name for name, (_, task) in left.items() if task in late}
        self.owners = cache(partial(roles_of_task, placed=roles))
        """Returns the roles of a task, in the order of its declaration. They execute it together."""
        self.taken = cache(self._taken)
        self.left = cache(self._left)

    def _taken(self, task: str, role: str) -> list[tuple[str, str]]:
        """Returns the transfers taken by `role` for a task, each with its source role."""
        taken = sorted(taken_by(role, task_of(task), self.roles), key=self._late.__contains__)
        return [(name, self._sources[name]) for name in taken if name in self._sources]

    def _left(self, task: str) -> list[tuple[str, str]]:
        """Returns the transfers left by a task, once for each role that takes them."""
        return [(name, taker) for name in task_of(task).leaves for taker in takers(name, self.roles)]


class TaskOrder(Entries):
    """An order of tasks with their waits and posts. These follow from the declared transfers of each task.

    A wait is placed right before the first task of a role that needs the transfer. A post is placed right after the
    producing task, one for each destination role.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow, self.roles = flow, flow.roles
        self._waits: set[Transfer] = set()

    def do(
        self,
        task: str,
        step: int,
        chunk: int = 0,
        *,
        roles: Sequence[str] | None = None,
        takes_of: Sequence[int] | None = None,
        final: bool = False,
    ) -> None:
        """Appends a task, with its waits before it and its posts after it.

        `roles` defaults to the roles that declare the task. `takes_of` are the chunks whose transfers the task waits
        for. The default is its own chunk.
        """
        first, *others = self.flow.owners(task) if roles is None else roles
        for transfer, source in self.flow.taken(task, first):
            for part in (chunk,) if takes_of is None else takes_of:
                wait = (transfer, source, first, step, part)
                if wait not in self._waits:
                    self._waits.add(wait)
                    self.wait(*wait)
        self.task(task, first, *others, step=step, chunk=chunk, final=final)
        for transfer, destination in self.flow.left(task):
            self.post(transfer, first, destination, step, chunk)
