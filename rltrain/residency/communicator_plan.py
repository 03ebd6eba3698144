"""When the communicators of roles that share a rank are released and made again, the same on all of their members."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, RankList, lists_of_task, role_group_lists
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.schedule.order import Entry, Order
from rltrain.tasks.roles import needs_of


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
