"""Weight syncs that engines join before their place in the order: between two decode steps, or while they wait."""

import time
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from rltrain.runtime.job_store import Waiter, poll, poll_s


class NoInFlightSync:
    """Where new weights come at their place in the order alone."""

    def is_due(self) -> bool:
        return False

    def join(self) -> None:
        raise AssertionError("no sync is ever due here")

    def enter_together(self, waiter: Waiter, what: str) -> None:
        """Nobody has anything to say."""


class InFlightSync:
    """For one rank of the actor or of a role with engines, which share no ranks.

    A sync is due once the actor has arrived at it: `announce`, by one rank of the actor. The first rank of an engine,
    its leader, then decides when to join, and the engine's other ranks follow it: in a generate task by what the leader
    tells them, elsewhere by the count of syncs that it has joined.
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
        """`syncs` are (position in the order, first position from which it may be joined), looked at one by one; `run`
        executes the entry at a position. `leader` is that of this rank's engine, `followers` are its other ranks; or
        `leader` is the rank that speaks for the actor. `name` is what the syncs are called in the order. Before their
        place there an engine joins them only where it `has_room`, which its leader asks. Of `num_engines` the leaders
        look into the store while they decode, and all ranks where they wait. `may_join` tells of this rank's position
        and that of a sync whether all that has to be done before that sync is done."""
        self.store = dist.PrefixStore(f"in_flight/{name}", store)
        self._syncs = iter(syncs)
        self._next = next(self._syncs, None)
        self._joined_last = -1
        """The position of the sync that was joined last."""
        self.run, self.has_room, self.may_join = run, has_room, may_join
        self.leader, self.followers = leader, followers
        self.joined_key, self.entered_key, self.come_key = f"joined/{leader}", f"entered/{leader}", f"come/{leader}"
        self.is_leader = rank == leader
        self._waits_every_s = poll_s(num_engines * (1 + len(followers)))
        self._looks_every_s = poll_s(num_engines) if self.is_leader else self._waits_every_s
        self.num_joined = self.num_entered = 0
        self.position = 0
        """Of the entry that this rank executes."""
        self._last_poll = 0.0

    def announce(self) -> None:
        """The actor has arrived at its next sync. By its leader alone."""
        self.store.add("announced", 1)

    def is_due(self) -> bool:
        """Whether this rank is to join the next sync now. Looks into the store as often as `poll_s` has it."""
        now = time.monotonic()
        if now - self._last_poll < self._looks_every_s or self._next is None:
            return False
        self._last_poll = now
        if self.position < self._next[1] or (self.is_leader and not self.has_room()):
            return False
        is_announced = self.store.add("announced" if self.is_leader else self.joined_key, 0) > self.num_joined
        return bool(is_announced and self.may_join(self.position, self._next[0]))

    def join_if_due(self) -> None:
        """To be called while this rank waits for others outside of a generate task."""
        if self.is_due():
            self.join()

    def come(self) -> None:
        """This rank comes to its next generate task. It enters once its engine's leader has."""
        self.num_entered += 1
        if not self.is_leader:
            self.store.add(self.come_key, 1)

    def enter_first(self) -> bool:
        """The leader enters the generate task to which it has come, if all others have come: whether they have.

        From then on it tells them inside when to join. A rank that has not come may wait for one that is in a sync
        already, and has to join that where it waits.
        """
        if self.store.add(self.come_key, 0) < self.num_entered * len(self.followers):
            return False
        self.store.add(self.entered_key, 1)
        return True

    def leader_has_entered(self) -> bool:
        """Whether the leader has entered the generate task to which this rank has come."""
        return self.store.add(self.entered_key, 0) >= self.num_entered

    def join_before_leader_enters(self) -> None:
        """To be called while this rank waits for that.

        The leader may enter and join a sync between two looks of this rank, which it will then tell this one of. What
        it joined before, it cannot get past without this rank: so its having entered is looked at last.
        """
        if self.is_due() and not self.leader_has_entered():
            self.join()

    def enter_together(self, waiter: Waiter, what: str) -> None:
        """Come to generate task `what` and wait for the engine's other ranks, joining what is due before. Collective
        over: the engine's ranks."""
        self.come()
        look, others, serve = self.leader_has_entered, [self.leader], self.join_before_leader_enters
        if self.is_leader:
            look, others, serve = self.enter_first, list(self.followers), self.join_if_due
        poll(waiter, lambda: look() or None, f"{what} of its engine", others, serve, self._waits_every_s)

    def join(self) -> None:
        """Join the next sync. Collective over: the ranks of the actor and of the role that it is for."""
        if self.is_leader:
            self.store.add(self.joined_key, 1)
        self.num_joined += 1
        assert self._next is not None, "the actor announces as many syncs as the order has"
        self._joined_last = self._next[0]
        self._next = next(self._syncs, None)
        self.run(self._joined_last)

    def reach(self, position: int) -> None:
        """This rank has come to the place of a sync in the order; join unless that has been done."""
        if self._joined_last < position:
            self.join()
