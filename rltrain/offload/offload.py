"""Moves the memory parts and communicators of a rank's roles on and off its device."""

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

# The plan for releasing communicators of roles that share a rank. It is the same on all their members.


@dataclass
class _Use:
    """A task that may use a rank list, and the generation of the list's communicator there."""

    position: int
    generation: int


class CommunicatorPlan:
    """The generation of each of a rank's communicators at each use, derived from the order.

    A communicator is released between two uses if every member's device meanwhile serves roles that do not use it. Each
    member then leaves the old generation by itself. All of them make the new one together at the next use, a task of
    all members. The position of a generation's first use is its name. Communicators of the roles in `kept` are always
    open, because these roles stay on the device or never use it.

    Positions must be requested in ascending order.
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
        """Returns the generation of each list that the task at `position` may use."""
        self._advance_to(position + 1)
        return {ranks: use.generation for ranks, use in self._last.items() if use.position == position}

    def to_close(self, position: int) -> list[RankList]:
        """Returns the lists with a finished generation and without users in the task at `position`."""
        self._advance_to(position)
        return [ranks for ranks in self.lists if self._is_over(ranks, position)]

    def _advance_to(self, position: int) -> None:
        """Advances past all uses before `position`."""
        for ranks in self.lists:
            while (use := self._next[ranks]) is not None and use.position < position:
                self._last[ranks], self._next[ranks] = use, self._use_after(ranks, use)

    def _use_after(self, ranks: RankList, last: _Use) -> _Use | None:
        """Returns the next use. It has the generation of `last` unless the list is released in between."""
        for position, entry in self._order.ahead(last.position):
            if entry.kind == "task" and ranks in self._lists_of(entry.roles):
                is_released = all(self._leaves_between(last.position, position, member, ranks) for member in ranks)
                return _Use(position, position if is_released else last.generation)
        return None

    def _leaves_between(self, first: int, last: int, member: int, ranks: RankList) -> bool:
        """Returns whether `member` has a device task between `first` and `last` (exclusive) without users of
        `ranks`."""
        between = takewhile(lambda item: item[0] < last, self._order.ahead(first))
        return any(self._is_without(ranks, entry, member) for _, entry in between)

    def _is_over(self, ranks: RankList, position: int) -> bool:
        if not self._is_without(ranks, self._order[position], self._rank):
            return False
        following = self._next[ranks]
        return following is None or following.generation != self._last[ranks].generation

    def _is_without(self, ranks: RankList, entry: Entry, member: int) -> bool:
        """Returns whether `entry` needs the device of `member` for roles that do not use `ranks`."""
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
    """Opens and closes the process groups of one rank according to the plan."""

    def __init__(self, plan: CommunicatorPlan, groups: ProcessGroups) -> None:
        self._plan, self._groups = plan, groups

    def release(self, position: int) -> None:
        """Closes the groups not needed by the task at `position`. Call it once no recorded step holds any of them."""
        self._groups.close(self._plan.to_close(position))

    def restore(self, position: int) -> None:
        """Opens the groups needed by the task at `position`, right before it. Collective over: the members of every
        reopened list."""
        self._groups.open(self._plan.to_open(position))


def _users(ranks: RankList, grids: Mapping[str, Grid]) -> frozenset[str]:
    """Returns all roles that use a list, alone or together with another role."""
    return frozenset(role for roles, lists in role_group_lists(grids).items() if ranks in lists for role in roles)


# The memory parts on this rank's device. Roles that share a rank take turns in the order of the tasks.

Span = Callable[[str, str], AbstractContextManager[object]]
"""A function (name, category "offload", "onload" or "prefetch") -> context manager around a move, for tracing."""


def _no_span(name: str, category: str) -> AbstractContextManager[object]:
    return nullcontext()


class Offloader:
    """Brings the parts needed by a task to the device and removes parts of this rank's other roles.

    `offload` has the roles of this rank with memory on its device. `guests` have overlay parts, and roles in `sharing`
    use the actor's parts. These three determine the roles that leave the device between their tasks (see
    `leaving_roles`). Nothing moves for a task without needs. Only reopening `communicators` is collective.
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
        self._in_transit: list[Key] = []
        """Parts on the device with copies that may still be running."""
        self._metrics = _no_moves()

    def admit(self, role: str, parts: Mapping[str, MemoryPart]) -> None:
        """Takes over the parts of a newly built role. A role that leaves is offloaded at once to make room for the next
        role."""
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
        """Makes the parts needed by the task at `position` resident, then starts to prefetch those of the next task.

        Call it before every task of this rank, in order.
        """
        needs = self.plan.needs(position)
        parts = {key: self.parts[key] for key in needs.parts}
        self._note_residents()
        if parts:
            self._offload([key for key, part in self._on_device() if self._must_leave(key, part, parts)], position)
            if self._communicators:  # after the parts: their recorded steps hold communicators
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
        """Notes a write to a part outside the tasks that declare it, such as weights arriving in flight."""
        self.parts[role, part].changed()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics memory/* since the last call (see observability.names)."""
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
        """Removes parts from the device. Parts without a further reader are dropped, the others are copied to the
        host."""
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
        if not keys and not self._in_transit:
            return
        start = time.perf_counter()
        with self._span(_names([*self._in_transit, *keys]), "onload"):
            for key in keys:
                self._bring(key, position)
            self._memory.finish_copies()
            self._in_transit.clear()
        self._metrics["memory/onload_s"] += time.perf_counter() - start

    def _bring(self, key: Key, position: int) -> None:
        part = self.parts[key]
        part.allocate()  # on the stream that uses and frees it; only copies use another one
        with self._memory.copies():
            part.fill(rewritten=self.plan.is_rewritten(key, position))

    def _prefetch(self, position: int) -> None:
        """Starts to bring the next task's parts from the host as far as there is room."""
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
                self._in_transit.append(key)

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
