"""Decides which roles' parts and communicators this rank holds now, and moves them."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart, PausedRegion
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, RankList, lists_of_task, role_group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.schedule.memory_plan import MemoryPlan, leaving_roles
from rltrain.schedule.order import Entry, Order
from rltrain.tasks.declaration import Key
from rltrain.tasks.roles import needs_of

# When the communicators of roles that share a rank are released and made again, the same on all of their members.


@dataclass
class _Use:
    """A task that may use a list, and the generation that the list has there."""

    position: int
    generation: int


class CommunicatorPlan:
    """The generation that each of a rank's communicators has at each of its uses. Derived from the order.

    Between two uses a communicator is released if meanwhile every member has its device for roles that do not use it:
    then all of them leave the old generation, each when it comes to that, and make the new one at the next use, which
    is a task that all of them join. A generation is named by the position of its first use. Communicators of roles in
    `kept`, which stay on the device or never were there, are always open.

    To be asked for ascending positions.
    """

    def __init__(
        self,
        order: Order,
        placement: Placement,
        grids: Mapping[str, Grid],
        rank: int,
        *,
        lists: Iterable[RankList],
        kept: Collection[str] = (),
    ) -> None:
        never_released = lists_of_task(kept, grids)
        self.lists = tuple(ranks for ranks in lists if rank in ranks and ranks not in never_released)
        self._order, self._placement, self._grids, self._rank = order, placement, grids, rank
        self._users = {ranks: _users(ranks, grids) for ranks in self.lists}
        self._used_by: dict[tuple[str, ...], frozenset[RankList]] = {}
        self._needs_device: dict[tuple[str, tuple[str, ...]], bool] = {}
        self._last = dict.fromkeys(self.lists, _Use(-1, 0))
        self._next = {ranks: self._use_after(ranks, last) for ranks, last in self._last.items()}

    def to_open(self, position: int) -> dict[RankList, int]:
        """List -> generation, of those that the task at `position` may use."""
        self._come_to(position + 1)
        return {ranks: use.generation for ranks, use in self._last.items() if use.position == position}

    def to_close(self, position: int) -> list[RankList]:
        """Those whose generation is over, and whose users have no part in the task at `position`."""
        self._come_to(position)
        return [ranks for ranks in self.lists if self._is_over(ranks, position)]

    def _come_to(self, position: int) -> None:
        """Uses before `position` are past."""
        for ranks in self.lists:
            while (use := self._next[ranks]) is not None and use.position < position:
                self._last[ranks], self._next[ranks] = use, self._use_after(ranks, use)

    def _use_after(self, ranks: RankList, last: _Use) -> _Use | None:
        """The next use, with the generation of `last` unless the list is released in between."""
        for position, entry in self._order.ahead(last.position):
            if entry.kind == "task" and ranks in self._lists_of(entry.roles):
                is_released = all(self._leaves_between(last.position, position, member, ranks) for member in ranks)
                return _Use(position, position if is_released else last.generation)
        return None

    def _leaves_between(self, first: int, last: int, member: int, ranks: RankList) -> bool:
        """Whether there is a task of `member`, and of no user of `ranks`, that needs a device, strictly in between."""
        between = takewhile(lambda item: item[0] < last, self._order.ahead(first))
        return any(self._is_without(ranks, entry, member) for _, entry in between)

    def _is_over(self, ranks: RankList, position: int) -> bool:
        if not self._is_without(ranks, self._order[position], self._rank):
            return False
        following = self._next[ranks]
        return following is None or following.generation != self._last[ranks].generation

    def _is_without(self, ranks: RankList, entry: Entry, member: int) -> bool:
        """Whether `entry` needs the device of `member` for roles that do not use `ranks`."""
        return self._users[ranks].isdisjoint(entry.roles) and self._takes_device(entry, self._placement.hosts(member))

    def _takes_device(self, entry: Entry, hosted: tuple[str, ...]) -> bool:
        key = entry.name, hosted
        if entry.kind == "task" and key not in self._needs_device:
            self._needs_device[key] = bool(needs_of(entry.name).of(hosted).parts)
        return entry.kind == "task" and self._needs_device[key]

    def _lists_of(self, roles: tuple[str, ...]) -> frozenset[RankList]:
        if roles not in self._used_by:
            self._used_by[roles] = frozenset(lists_of_task(roles, self._grids))
        return self._used_by[roles]


class Communicators:
    """Has the process groups of one rank follow the plan."""

    def __init__(self, plan: CommunicatorPlan, groups: ProcessGroups) -> None:
        self._plan, self._groups = plan, groups

    def release(self, position: int) -> None:
        """Before the task at `position` takes the device, once nothing that is recorded holds what is released."""
        self._groups.close(self._plan.to_close(position))

    def restore(self, position: int) -> None:
        """Right before the task at `position`. Collective over: the members of every list that comes back."""
        self._groups.open(self._plan.to_open(position))


def _users(ranks: RankList, grids: Mapping[str, Grid]) -> frozenset[str]:
    """Every role that uses a list, alone or with another."""
    return frozenset(role for roles, lists in role_group_lists(grids).items() if ranks in lists for role in roles)


# Which parts of this rank's roles lie on its device now. Roles that share a rank take turns, as the order says.

Span = Callable[[str, str], AbstractContextManager[object]]
"""(name, category "offload", "onload" or "prefetch") -> a context around the move, for a trace."""


def _no_span(name: str, category: str) -> AbstractContextManager[object]:
    return nullcontext()


class Offloader:
    """Brings to the device what a task needs, and takes away what others of this rank left there.

    `offload` has the roles of this rank that use its device, and decides with `guests`, whose parts are overlays or
    who are `sharing` the actor's, who leaves it between its tasks: see `leaving_roles`. Nothing moves for a task that
    needs nothing. Nothing is collective but making `communicators` again, which come and go with the roles.
    """

    def __init__(
        self,
        order: Order,
        offload: Mapping[str, bool | str],
        memory: DeviceMemory,
        *,
        guests: Collection[str] = (),
        sharing: Collection[str] = (),
        prefetch: bool = True,
        communicators: Communicators | None = None,
        memory_saver: Any = None,
        span: Span = _no_span,
    ) -> None:
        self.plan = MemoryPlan(order, offload, guests, sharing)
        self.leaving = leaving_roles(offload, guests)
        self.parts: dict[Key, MemoryPart] = {}
        self._memory = memory
        self._prefetch_wanted = prefetch
        self._communicators = communicators
        self._memory_saver = memory_saver
        self._span = span
        self._on_the_way: list[Key] = []
        """Parts on the device whose copies may not have arrived."""
        self._metrics = _no_moves()

    def admit(self, role: str, parts: Mapping[str, MemoryPart]) -> None:
        """Take over the parts of a role that has just been built; if it is one that leaves, it leaves at once, so that
        the next role finds room."""
        mine = {(role, name): part for name, part in parts.items()}
        self.parts |= mine
        for key, part in mine.items():
            if part.beneath is not None:
                part.memory = part.beneath.memory
            elif self._memory_saver is not None:
                part.memory = PausedRegion(self._memory_saver, ".".join(key))
        if role in self.leaving:
            self._offload([key for key, part in mine.items() if part.place == "device"], position=-1)

    def enter(self, position: int) -> None:
        """Make resident what the task at `position` of the order needs, and begin to bring what the next one does.

        To be called before every task of this rank, in order.
        """
        needs = self.plan.needs(position)
        parts = {key: self.parts[key] for key in needs.parts}
        self._note_residents()
        if parts:
            self._offload([key for key, part in self._on_device() if self._must_leave(key, part, parts)], position)
            if self._communicators:  # after the parts: recorded steps hold communicators, and go with them
                self._communicators.release(position)
            self._onload([key for key, part in parts.items() if part.place != "device"], position)
            self._note_residents()
        for key in needs.writes:
            self.parts[key].changed()
        self._prefetch(position)
        self._memory.begin_task(self.plan.task_name(position))
        if self._communicators:
            self._communicators.restore(position)

    def changed(self, role: str, part: str) -> None:
        """A part was written to outside of a task that is declared to do so, such as weights that arrive in flight."""
        self.parts[role, part].changed()

    def metrics(self) -> dict[str, float]:
        """memory/* since the last call; see observability.names."""
        self._note_residents()
        host_bytes = sum(part.host_bytes for part in self.parts.values())
        metrics = {
            **self._metrics,
            "memory/host_bytes": host_bytes,
            "memory/peak_bytes": self._memory.take_peak_bytes(),
            "memory/reserved_bytes": self._memory.reserved_bytes(),
        }
        self._metrics = _no_moves()
        return metrics

    def _on_device(self) -> list[tuple[Key, MemoryPart]]:
        return [(key, part) for key, part in self.parts.items() if part.place == "device"]

    def _must_leave(self, key: Key, part: MemoryPart, needed: Mapping[Key, MemoryPart]) -> bool:
        if key in needed:
            return False
        return key[0] in self.leaving or any(_share_memory(part, other) for other in needed.values())

    def _offload(self, keys: Sequence[Key], position: int) -> None:
        """What nobody reads again is dropped, the rest copied; then all of it is freed."""
        if not keys:
            return
        start = time.perf_counter()
        with self._span(_names(keys), "offload"):
            dropped = {key for key in keys if self.plan.may_drop(key, position)}
            with self._memory.copies():
                for key in keys:
                    if key not in dropped:
                        self.parts[key].save()
            self._memory.finish_copies()
            for key in keys:
                self.parts[key].leave(drop=key in dropped)
            self._memory.release_residue()
        self._metrics["memory/offload_s"] += time.perf_counter() - start
        self._note_residue({role for role, _ in keys})

    def _onload(self, keys: Sequence[Key], position: int) -> None:
        if not keys and not self._on_the_way:
            return
        start = time.perf_counter()
        with self._span(_names([*self._on_the_way, *keys]), "onload"):
            for key in keys:
                self._bring(key, position)
            self._memory.finish_copies()
            self._on_the_way.clear()
        self._metrics["memory/onload_s"] += time.perf_counter() - start

    def _bring(self, key: Key, position: int) -> None:
        part = self.parts[key]
        part.allocate()  # from the pool of the stream that will use and free it; the copies alone are on another one
        with self._memory.copies():
            part.fill(rewritten=self.plan.is_rewritten(key, position))

    def _prefetch(self, position: int) -> None:
        """Begin to bring what the next task needs, where it lies on the host and there is room for it."""
        following = self.plan.next_device_task(position)
        if not self._prefetch_wanted or following is None:
            return
        spare = self._memory.spare_bytes(self.plan.task_name(position))
        for key in sorted(self.plan.needs(following).parts):
            part = self.parts[key]
            fits = part.place == "host" and part.size_bytes <= spare
            if fits and not any(_share_memory(part, other) for _, other in self._on_device()):
                spare -= part.size_bytes
                self._bring(key, following)
                self._on_the_way.append(key)

    def _note_residents(self) -> None:
        resident: dict[str, float] = defaultdict(float)
        for (role, _), part in self.parts.items():
            resident[role] += part.device_bytes
        for role, num_bytes in resident.items():
            name = f"memory/{role}_resident_bytes"
            self._metrics[name] = max(self._metrics.get(name, 0.0), num_bytes)

    def _note_residue(self, roles: Iterable[str]) -> None:
        owners = {key: part for key, part in self.parts.items() if part.beneath is None}
        left = {key: part.allocated_bytes for key, part in owners.items() if part.place != "device"}
        resident = sum(part.allocated_bytes for part in owners.values())
        for role in roles:
            rest = sum(num_bytes for (owner, _), num_bytes in left.items() if owner == role)
            self._metrics[f"memory/{role}_residue_bytes"] = rest + self._memory.residue_bytes(resident)


def _share_memory(one: MemoryPart, other: MemoryPart) -> bool:
    return one.beneath is other or other.beneath is one


def _names(keys: Sequence[Key]) -> str:
    return ", ".join(".".join(key) for key in keys)


def _no_moves() -> dict[str, float]:
    return {"memory/offload_s": 0.0, "memory/onload_s": 0.0}
