"""Tasks of several roles: weight syncs joined by engines in flight, and the end of training."""

from collections.abc import Callable, Collection, Mapping

from rltrain.observability.evaluations import REACHED, end_verdict_of, stop_verdict_of
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import DrawingRole
from rltrain.rollout.in_flight_sync import InFlightSync
from rltrain.schedule.order import SYNC_EVALUATION, WEIGHT_SYNC, Entry, Order
from rltrain.tasks.roles import SYNCED

JointTask = Callable[[int, int], Metrics | None]
"""Executes a task for a step and chunk."""


class InFlightSyncs:
    """The weight syncs that engines can join early, once the actor has reached them.

    The actor announces such a sync. An engine joins it between two decode steps, or while it waits.
    """

    def __init__(
        self,
        job: Job,
        order: Order,
        roles: Mapping[str, Role],
        run: Callable[[int], None],
        may_join: Callable[[int, int], bool],
    ) -> None:
        """`run` executes the entry at a position. `may_join(position, sync)` returns whether an engine at `position`
        may join the weight sync at position `sync`."""
        self._job, self._roles, self._run, self._order = job, roles, run, order
        self._by_task: dict[str, InFlightSync] = {}
        if job.shape.syncs_in_flight:
            self._by_task[WEIGHT_SYNC] = self._sync(WEIGHT_SYNC, may_join)
        if job.config.evaluates_apart:
            self._by_task[SYNC_EVALUATION] = self._sync(SYNC_EVALUATION, lambda position, sync: True)
        joined = (sync for task, sync in self._by_task.items() if SYNCED[task] in roles)
        self._joined = next(joined, None)
        """The syncs for an engine of this rank, or None."""

    def _sync(self, task: str, may_join: Callable[[int, int], bool]) -> InFlightSync:
        job, drawing = self._job, self._roles.get(SYNCED[task])
        engine_ranks = drawing.engine_ranks if isinstance(drawing, DrawingRole) else (job.leader_of("actor"),)
        sync = InFlightSync(
            self._order.syncs(task),
            job.world.store,
            leader=engine_ranks[0],
            followers=engine_ranks[1:],
            rank=job.world.rank,
            run=self._run,
            name=task,
            has_room=drawing.has_room if isinstance(drawing, DrawingRole) else lambda: True,
            num_engines=job.grids[SYNCED[task]].dp,
            may_join=may_join,
        )
        if isinstance(drawing, DrawingRole):
            drawing.take_in_flight(sync)
        return sync

    @property
    def serve(self) -> Callable[[], None] | None:
        """Joins a due sync while this rank waits for others. None if no engine of this rank joins syncs."""
        return self._joined.join_if_due if self._joined else None

    def has(self, entry: Entry) -> bool:
        """Returns whether engines may execute the entry earlier than its place in the order."""
        return entry.name in self._by_task

    def is_joined(self, entry: Entry) -> bool:
        """Returns whether an engine of this rank joins the entry."""
        return self._joined is not None and self.has(entry)

    def come_to(self, position: int, entry: Entry) -> bool:
        """Records this rank's position in the order. Joins the entry if it is a sync for this rank's engine and not
        joined yet.

        Returns whether the entry is such a sync, so nothing is left to execute.
        """
        if self._joined is None:
            return False
        self._joined.position = position
        if self.has(entry):
            self._joined.reach(position)
        return self.has(entry)

    def announce(self, entry: Entry) -> None:
        """Announces to engines that the actor has reached a sync. Only the actor's leader does, when it executes the
        entry."""
        if self.has(entry) and self._job.world.rank == self._job.leader_of("actor"):
            self._by_task[entry.name].announce()


class EndOfTraining:
    """The tasks that end training before its last step, once an evaluation has reached its goal."""

    def __init__(self, job: Job, order: Order, hosted: Collection[str]) -> None:
        self._job, self._order, self._hosted = job, order, {*hosted}
        self.position = order.end
        """The position at which training ends. Later entries are executed only if they are final."""
        self.ranks: set[int] = set()
        """The ranks that end training early at this position, including this one."""
        self.tasks: dict[str, JointTask] = {
            "decide_to_stop": self._decide_to_stop,
            "stop_if_reached": self._stop_if_reached,
        }

    def skips(self, position: int, entry: Entry) -> bool:
        return position > self.position and not entry.final

    def meet(self) -> None:
        """Waits until all of `ranks` have called this.

        A rank may not leave before. A late rank may still have experience to send. Collective over: `ranks`.
        """
        self._job.job_store.meet("end", len(self.ranks), waiting_for="the end of the other ranks")

    def _decide_to_stop(self, step: int, chunk: int) -> None:
        """Ends training if the evaluation of the step reached its goal. Waits for the verdict of the rank that scored
        it."""
        leader = self._job.leader_of("actor" if self._job.config.scores_held_out else "reward")
        if self._job.job_store.get(end_verdict_of(step), waiting_for=f"the verdict of rank {leader} at step {step}"):
            self._end("decide_to_stop", step)

    def _stop_if_reached(self, step: int, chunk: int) -> None:
        """Ends training if the goal was reached before the first rank finished the step. All ranks agree on this."""
        if self._job.job_store.agreed(stop_verdict_of(step), self._job.job_store.has(REACHED)):
            self._end("stop_if_reached", step)

    def _end(self, name: str, step: int) -> None:
        """Ends training at this rank's first entry of the task in the step, together with all ranks of such entries."""
        of_step = [*self._order.of_step(step)]
        same = [(position, entry) for position, entry in of_step if (entry.kind, entry.name) == ("task", name)]
        self.position = next(position for position, entry in same if not self._hosted.isdisjoint(entry.roles))
        self.ranks = {rank for _, entry in same for role in entry.roles for rank in self._job.placement.ranks(role)}
