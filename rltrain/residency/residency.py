"""Which parts of this rank's roles lie on its device now. Roles that share a rank take turns, as the order says."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rltrain.residency.communicator_plan import Communicators
from rltrain.residency.device_memory import DeviceMemory
from rltrain.residency.memory_parts import MemoryPart
from rltrain.residency.storage_memory import PausedRegion
from rltrain.schedule.memory_plan import MemoryPlan, leaving_roles
from rltrain.schedule.order import Order
from rltrain.tasks.declaration import Key

Span = Callable[[str, str], AbstractContextManager[object]]
"""(name, category "offload", "onload" or "prefetch") -> a context around the move, for a trace."""


def _no_span(name: str, category: str) -> AbstractContextManager[object]:
    return nullcontext()


class Residency:
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
