"""In-flight weight syncs. Engines join them before their place in the order, between decode steps or while they
wait."""

import time
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from rltrain.runtime.job_store import Waiter, poll, poll_s


class NoInFlightSync:
    """Replaces InFlightSync if new weights arrive only at their place in the order."""

    def is_due(self) -> bool:
        return False

    def join(self) -> None:
        raise AssertionError("no sync is ever due without in-flight syncs")

    def enter_together(self, waiter: Waiter, what: str) -> None:
        """Returns at once, because there is nothing to agree on."""


class InFlightSync:
    """In-flight syncs for one rank of the actor or of a role with engines. The actor and such a role share no ranks.

    A sync is due once one rank of the actor has called `announce`. The first rank of an engine, its leader, then
    decides when the engine joins. Its other ranks follow: within a generate task by the leader's decisions, elsewhere
    by the leader's count of joined syncs.
    """

    def __init__(
        self,
        syncs: Iterable[tuple[int, int]],
        store: dist.Store,
        *,
        leader: int,
        rank: int,
        run: Callable[[int], None],
        followers: Sequence[int] = (),
        name: str = "weight_sync",
        has_room: Callable[[], bool] = lambda: True,
        num_engines: int = 1,
        may_join: Callable[[int, int], bool] = lambda position, sync: True,
    ) -> None:
        """`syncs` yields (position in the order, first position from which it may be joined). It is read one by one.

        `run` executes the entry at a position. `leader` is the leader of this rank's engine and `followers` are its
        other ranks. On the actor, `leader` is its leading rank. `name` is the name of the syncs in the order. The
        leader of an engine joins early only if `has_room` returns True. `num_engines` leaders poll the store while they
        decode, and all their ranks do while they wait. `may_join(position of this rank, position of a sync)` returns
        whether all work needed before the sync is done.
        """
        self.store = dist.PrefixStore(f"in_flight/{name}", store)
        self._syncs = iter(syncs)
        self._next = next(self._syncs, None)
        self._joined_last = -1
        """Position of the last joined sync."""
        self.run, self.has_room, self.may_join = run, has_room, may_join
        self.leader, self.followers = leader, followers
        self.joined_key, self.entered_key, self.come_key = f"joined/{leader}", f"entered/{leader}", f"come/{leader}"
        self.is_leader = rank == leader
        self._waits_every_s = poll_s(num_engines * (1 + len(followers)))
        self._looks_every_s = poll_s(num_engines) if self.is_leader else self._waits_every_s
        self.num_joined = self.num_entered = 0
        self.position = 0
        """Position of the entry executed by this rank."""
        self._last_poll = 0.0

    def announce(self) -> None:
        """Reports that the actor has arrived at its next sync. Called only by its leader."""
        self.store.add("announced", 1)

    def is_due(self) -> bool:
        """Returns whether this rank should join the next sync now. Polls the store at the interval given by
        `poll_s`."""
        now = time.monotonic()
        if now - self._last_poll < self._looks_every_s or self._next is None:
            return False
        self._last_poll = now
        if self.position < self._next[1] or (self.is_leader and not self.has_room()):
            return False
        is_announced = self.store.add("announced" if self.is_leader else self.joined_key, 0) > self.num_joined
        return bool(is_announced and self.may_join(self.position, self._next[0]))

    def join_if_due(self) -> None:
        """Joins a due sync. Called while this rank waits for others outside a generate task."""
        if self.is_due():
            self.join()

    def come(self) -> None:
        """Reports that this rank has reached its next generate task. The rank enters it after its engine's leader."""
        self.num_entered += 1
        if not self.is_leader:
            self.store.add(self.come_key, 1)

    def enter_first(self) -> bool:
        """Enters the generate task on the leader if all other ranks have reached it. Returns whether they have.

        Inside the task the leader's decisions make the others join. A rank still on its way may be waiting for a rank
        in a sync, and must join that sync where it waits.
        """
        if self.store.add(self.come_key, 0) < self.num_entered * len(self.followers):
            return False
        self.store.add(self.entered_key, 1)
        return True

    def leader_has_entered(self) -> bool:
        """Returns whether the leader has entered the generate task reached by this rank."""
        return self.store.add(self.entered_key, 0) >= self.num_entered

    def join_before_leader_enters(self) -> None:
        """Joins a due sync while this rank waits for the leader to enter.

        The leader may enter and join a sync between two polls of this rank. Its decision then reaches this rank inside
        the task. A sync joined by the leader before entering cannot end without this rank. So the check for its entry
        comes last.
        """
        if self.is_due() and not self.leader_has_entered():
            self.join()

    def enter_together(self, waiter: Waiter, what: str) -> None:
        """Reaches generate task `what` and waits for the engine's other ranks, joining due syncs meanwhile.

        Collective over: the engine's ranks.
        """
        self.come()
        look, others, serve = self.leader_has_entered, [self.leader], self.join_before_leader_enters
        if self.is_leader:
            look, others, serve = self.enter_first, list(self.followers), self.join_if_due
        poll(waiter, lambda: look() or None, f"{what} of its engine", others, serve, self._waits_every_s)

    def join(self) -> None:
        """Joins the next sync. Collective over: the ranks of the actor and of the receiving role."""
        if self.is_leader:
            self.store.add(self.joined_key, 1)
        self.num_joined += 1
        assert self._next is not None, "the actor announced more syncs than the order has"
        self._joined_last = self._next[0]
        self._next = next(self._syncs, None)
        self.run(self._joined_last)

    def reach(self, position: int) -> None:
        """Joins the sync at `position` unless it was joined early. Called at its place in the order."""
        if self._joined_last < position:
            self.join()
