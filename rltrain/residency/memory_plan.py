"""What each task needs on the device, and what therefore becomes of a role's memory along the order of tasks."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Key = tuple[str, str]
"""(role, part)."""

Place = Literal["device", "host", "dropped"]
"""Where a part is: dropped means nowhere, since nobody will read it before it has been rewritten."""


class Task(Protocol):
    """An entry of the order; only those of kind "task" need memory."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def roles(self) -> tuple[str, ...]: ...
    @property
    def step(self) -> int: ...
    @property
    def final(self) -> bool: ...


@dataclass(frozen=True)
class Needs:
    """The parts that a task reads, those that it reads and writes, and those that it only writes, whole.

    `keeps` it reads where they lie, on the device or on the host.
    """

    reads: frozenset[Key] = frozenset()
    updates: frozenset[Key] = frozenset()
    rewrites: frozenset[Key] = frozenset()
    keeps: frozenset[Key] = frozenset()

    @property
    def parts(self) -> frozenset[Key]:
        """Those that it needs on the device."""
        return self.reads | self.updates | self.rewrites

    @property
    def writes(self) -> frozenset[Key]:
        return self.updates | self.rewrites

    def of(self, roles: Collection[str]) -> "Needs":
        """Those of `roles` alone."""
        return Needs(*(frozenset(key for key in keys if key[0] in roles) for keys in self._fields))

    @property
    def _fields(self) -> tuple[frozenset[Key], ...]:
        return self.reads, self.updates, self.rewrites, self.keeps


def _parts(role: str, *names: str) -> frozenset[Key]:
    return frozenset((role, name) for name in names)


STATE_PARTS = ("weights", "master_weights", "optimizer")
TRAINED_PARTS = (*STATE_PARTS, "gradients")


def _accumulates(role: str) -> Needs:
    return Needs(reads=_parts(role, "weights"), updates=_parts(role, "gradients"))


_GENERATES = Needs(reads=_parts("rollout", "weights"), rewrites=_parts("rollout", "kv_cache"))

NEEDS: dict[str, Needs] = {
    "weight_sync": Needs(reads=_parts("actor", "weights"), rewrites=_parts("rollout", "weights")),
    "generate": _GENERATES,
    "generate_evaluation": _GENERATES,
    "reference_logprobs": Needs(reads=_parts("reference", "weights")),
    "values": Needs(reads=_parts("critic", "weights")),
    "accumulate_critic": _accumulates("critic"),
    "update_critic": Needs(updates=_parts("critic", *TRAINED_PARTS)),
    "actor_logprobs": Needs(reads=_parts("actor", "weights")),
    "accumulate": _accumulates("actor"),
    "update": Needs(updates=_parts("actor", *TRAINED_PARTS)),
    "save_hf": Needs(reads=_parts("actor", "weights")),
    "checkpoint": Needs(keeps=_parts("actor", *STATE_PARTS) | _parts("critic", *STATE_PARTS)),
}

DEVICE_ROLES = frozenset(role for needs in NEEDS.values() for role, _ in needs.parts)
"""Roles with something on the device."""

HOST_TASKS = frozenset({"load_sft_batch", "score", "score_evaluation", "advantages", "decide_to_stop"})
"""Tasks that need nothing on the device."""

OF_ONE_STEP = frozenset({"gradients"})
"""Parts that start at zero with their first use in a step, and that nobody reads after their last."""


def needs_of(task: str) -> Needs:
    """ValueError for a task that is in neither table: memory that it needs might be away."""
    if task in HOST_TASKS:
        return Needs()
    if task not in NEEDS:
        raise ValueError(f"what the task {task} needs on the device is unknown: add it to NEEDS or HOST_TASKS")
    return NEEDS[task]


def leaving_roles(offload: Mapping[str, bool | str], guests: Collection[str] = ()) -> frozenset[str]:
    """The roles of one rank that leave its device between their tasks; `offload` has what all that use it chose.

    "auto" leaves where there are others, of which `guests` do not count: their parts lie on the host and take the place
    of another role's for a while.
    """
    is_shared = len(offload.keys() - set(guests)) > 1
    return frozenset(role for role, choice in offload.items() if (is_shared if choice == "auto" else choice))


@dataclass
class _Uses:
    """Where in the order a part is used, ascending."""

    positions: list[int] = field(default_factory=list)
    final_positions: list[int] = field(default_factory=list)


class MemoryPlan:
    """The order as one rank's device sees it, which hosts `roles`. Pure: the same everywhere, made at the start."""

    def __init__(self, order: Sequence[Task], roles: Collection[str]) -> None:
        self._order, self._roles = order, frozenset(roles)
        self._uses: dict[Key, _Uses] = defaultdict(_Uses)
        self._device_tasks: list[int] = []
        for position in range(len(order)):
            needs = self.needs(position)
            if needs.parts:
                self._device_tasks.append(position)
            for key in needs.parts | needs.keeps:
                self._uses[key].positions.append(position)
                if order[position].final:
                    self._uses[key].final_positions.append(position)

    def needs(self, position: int) -> Needs:
        """What this rank's roles need for the entry at `position`."""
        entry = self._order[position]
        if entry.kind != "task" or self._roles.isdisjoint(entry.roles):
            return Needs()
        return needs_of(entry.name).of(self._roles)

    def task_name(self, position: int) -> str:
        return self._order[position].name

    def next_device_task(self, position: int) -> int | None:
        """The next entry after `position` that needs anything of this rank's device."""
        index = bisect_right(self._device_tasks, position)
        return self._device_tasks[index] if index < len(self._device_tasks) else None

    def is_rewritten(self, key: Key, position: int) -> bool:
        """Whether the entry at `position` writes all of a part without having read it."""
        if key in self.needs(position).rewrites:
            return True
        uses = self._uses[key].positions
        index = bisect_right(uses, position - 1)
        return key[1] in OF_ONE_STEP and (index == 0 or self._order[uses[index - 1]].step != self._order[position].step)

    def may_drop(self, key: Key, position: int) -> bool:
        """Whether nobody after `position` reads what the part holds now.

        Not even when training ends early, from where on only the final entries are executed.
        """
        uses = self._uses[key]
        following = (_first_after(uses.positions, position), _first_after(uses.final_positions, position))
        return all(use is None or self.is_rewritten(key, use) for use in following)

    def places(
        self, leaving: Collection[str], overlays: Mapping[Key, Key] | None = None
    ) -> Iterator[tuple[int, dict[Key, Place]]]:
        """(position, where each part is during it) for every entry that needs this rank's device.

        `overlays` maps a guest's part to the one whose place it takes. Parts fetched ahead are not counted.
        """
        overlays = overlays or {}
        places: dict[Key, Place] = {}
        for key in self._uses:
            stays = key[0] not in leaving and key not in overlays
            places[key] = "device" if stays else self._left(key, -1)
        for position in self._device_tasks:
            needed = self.needs(position).parts
            covered = {overlays[key] for key in needed & overlays.keys()}
            covered |= {key for key, beneath in overlays.items() if beneath in needed}
            for key, place in places.items():
                if key in needed:
                    places[key] = "device"
                elif place == "device" and (key[0] in leaving or key in covered):
                    places[key] = self._left(key, position)
            yield position, dict(places)

    def _left(self, key: Key, position: int) -> Place:
        return "dropped" if self.may_drop(key, position) else "host"


def _first_after(positions: list[int], position: int) -> int | None:
    index = bisect_right(positions, position)
    return positions[index] if index < len(positions) else None
