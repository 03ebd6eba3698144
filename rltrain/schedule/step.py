"""The plain step: the tasks of one step of training, in the order in which they happen.

`iterations.py` lays the steps of a run out as the schedule's mode asks, and adds evaluations and checkpoints.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

from rltrain.schedule.order import Entries, Transfer
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, informing, roles_of_task, taken_by, takers, task_of


@dataclass(frozen=True)
class Part:
    """Says which tasks of a step stand in one iteration. Without a lead of generation all of them do."""

    generates: bool
    scores: bool
    informants: Sequence[str]
    """Tasks of models that tell the actor something of scored samples."""
    trains: bool


class Step:
    """Appends the tasks of steps to an order."""

    def __init__(self, order: "TaskOrder", shape: RunShape) -> None:
        self.order, self.shape = order, shape
        self.chunks = range(shape.num_chunks)
        self.has_critic, self.has_inference = "critic" in order.roles, "inference" in order.roles

    def sync(self, step: int) -> None:
        """The rollout gets the actor's weights, and so does the copy of the actor that computes its log-probs."""
        self.order.do("weight_sync", step)
        if self.has_inference:
            self.order.do("sync_inference", step)

    def run(self, step: int, part: Part) -> None:
        """Samples are drawn, scored and given advantages chunk by chunk; then the critic and the actor are updated."""
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
        """Reward models and judges read the samples before the reward takes up what they say."""
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
        """The actor trains on rows of data. The reference computes its log-probs of them first, where it is placed."""
        if "reference" in self.order.roles:
            self.order.do("reference_logprobs", step)
        self.order.do("load_batch", step)
        self.order.do("update", step)

    def _trains_actor(self, step: int) -> bool:
        return step >= self.shape.first_actor_step


class Flow:
    """The roles and transfers of every task in a run that has certain `roles`."""

    def __init__(self, roles: Sequence[str], *, draws: bool, late: Collection[str] = ()) -> None:
        """`draws` tells whether samples are drawn and scored. Tasks take what the `late` tasks leave after all else."""
        self.roles = roles
        left = {
            transfer: (role, task.name) for role in roles for task in DECLARED[role].tasks for transfer in task.leaves
        }
        self._sources = {name: role for name, (role, _) in left.items() if draws or name not in ("samples", "scored")}
        self._late = {name for name, (_, task) in left.items() if task in late}
        self.owners = cache(partial(roles_of_task, placed=roles))
        """Returns the roles that execute a task of theirs together."""
        self.taken = cache(self._taken)
        self.left = cache(self._left)

    def _taken(self, task: str, role: str) -> list[tuple[str, str]]:
        """Returns the transfers that a role takes for a task, each with its source."""
        taken = sorted(taken_by(role, task_of(task), self.roles), key=self._late.__contains__)
        return [(name, self._sources[name]) for name in taken if name in self._sources]

    def _left(self, task: str) -> list[tuple[str, str]]:
        """Returns the transfers that a task leaves, with each role that takes them."""
        return [(name, taker) for name in task_of(task).leaves for taker in takers(name, self.roles)]


class TaskOrder(Entries):
    """An order to which tasks are appended with the waits and posts that follow from what they take and leave.

    A wait stands right before the first task of a role that takes what it brings. A post stands right after the task
    that leaves what it sends, one for each role that takes it.
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
        """Appends a task of `roles`, with its waits before it and its posts after it.

        The roles are by default those that declare the task. It waits for the transfers of the chunks `takes_of`, by
        default for those of its own chunk.
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
