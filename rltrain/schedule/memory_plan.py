"""Decides for every position of the order where each memory part is: on the device, on the host, or dropped."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from rltrain.config.schema import Config
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import Order
from rltrain.tasks.declaration import Key, Needs
from rltrain.tasks.roles import OF_ONE_STEP, device_roles, needs_of

Place = Literal["device", "host", "dropped"]
"""The place of a part. A dropped part exists nowhere. It is rewritten before its next use."""


def leaving_roles(offload: Mapping[str, bool | str], guests: Collection[str] = ()) -> frozenset[str]:
    """Returns the roles of one rank that leave its device between their tasks. `offload` has the choice of every role
    there.

    A role with "auto" leaves if the rank has other roles. `guests` do not count as others: their parts are on the host
    and take the place of another role's parts for a while.
    """
    is_shared = len(offload.keys() - set(guests)) > 1
    return frozenset(role for role, choice in offload.items() if (is_shared if choice == "auto" else choice))


def ranks_left_by_engines(config: Config, placement: Placement) -> tuple[int, ...]:
    """Returns the ranks whose rollout engines leave the GPU between tasks. A weight sync finds none of their old
    weights."""
    if "rollout" not in placement.roles:
        return ()
    hosted = {rank: device_roles() & set(placement.hosts(rank)) for rank in placement.ranks("rollout")}
    offload = {role: getattr(config, role).offload for roles in hosted.values() for role in roles}
    leaving = (rank for rank, roles in hosted.items() if "rollout" in leaving_roles({r: offload[r] for r in roles}))
    return tuple(leaving)


class MemoryPlan:
    """The order as seen by the device of one rank with `roles`. A pure function of its arguments."""

    def __init__(
        self, order: Order, roles: Collection[str], guests: Collection[str] = (), sharing: Collection[str] = ()
    ) -> None:
        """The guests in `sharing` have no weights. Their tasks need the actor's."""
        self._order, self._roles = order, frozenset(roles)
        self._shared = {(role, "weights"): ("actor", "weights") for role in sharing}
        names = {entry.name for entry in order.distinct() if entry.kind == "task"}
        self._needs_of_task = {
            name: self._needs_with_guests(needs_of(name).with_keys(self._shared), guests) for name in names
        }
        self._final = [(position, self.needs(position)) for position, _ in order.final()]

    def _needs_with_guests(self, needs: Needs, guests: Collection[str]) -> Needs:
        """Returns the needs of this rank's roles. A task that needs the actor's weights uses guests' parts from the
        host."""
        here = self._roles - set(guests) if ("actor", "weights") in needs.parts else self._roles
        return needs.of(here)

    def needs(self, position: int) -> Needs:
        """Returns the parts needed by this rank's roles for the entry at `position`."""
        entry = self._order[position]
        if entry.kind != "task" or self._roles.isdisjoint(entry.roles):
            return Needs()
        return self._needs_of_task[entry.name]

    def task_name(self, position: int) -> str:
        return self._order[position].name

    def next_device_task(self, position: int) -> int | None:
        """Returns the position of the next entry after `position` that needs a part on this rank's device, or None."""
        return next((later for later, _ in self._order.ahead(position) if self.needs(later).parts), None)

    def is_rewritten(self, key: Key, position: int) -> bool:
        """Returns whether the entry at `position` overwrites the whole part without reading it."""
        return key in self.needs(position).rewrites or (
            key[1] in OF_ONE_STEP and not self._is_used_earlier_in_step(key, position)
        )

    def may_drop(self, key: Key, position: int) -> bool:
        """Returns whether the part's content after `position` is never read again.

        This also holds if training ends early and only the final entries are executed.
        """
        following = next((later for later, _ in self._order.ahead(position) if key in self._used(later)), None)
        final = next((later for later, needs in self._final if later > position and key in _used(needs)), None)
        return all(use is None or self.is_rewritten(key, use) for use in (following, final))

    def places(
        self, leaving: Collection[str], overlays: Mapping[Key, Key] | None = None
    ) -> Iterator[tuple[int, dict[Key, Place]]]:
        """Yields (position, the place of each part) for every entry that needs this rank's device.

        `overlays` maps a guest's part to the part that it replaces for a while. Prefetched parts are not counted.
        """
        overlays = overlays or {}
        places: dict[Key, Place] = {}
        used: frozenset[Key] = frozenset().union(*(self._used(position) for position, _ in self._order.items()))
        for key in used:
            stays = key[0] not in leaving and key not in overlays
            places[key] = "device" if stays else self._left(key, -1)
        for position, _ in self._order.items():
            needed = self.needs(position).parts
            if not needed:
                continue
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

    def _used(self, position: int) -> frozenset[Key]:
        return _used(self.needs(position))

    def _is_used_earlier_in_step(self, key: Key, position: int) -> bool:
        of_step = self._order.of_step(self._order[position].step)
        return any(earlier < position and key in self._used(earlier) for earlier, _ in of_step)


def _used(needs: Needs) -> frozenset[Key]:
    return needs.parts | needs.keeps
