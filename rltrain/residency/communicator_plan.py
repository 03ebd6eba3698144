"""When the communicators of roles that share a rank are released and made again, the same on all of their members."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from rltrain.cluster.grid import Grid
from rltrain.cluster.placement import Placement
from rltrain.cluster.process_groups import ProcessGroups
from rltrain.cluster.rank_lists import RankList, lists_of_task, role_group_lists
from rltrain.residency.memory_plan import Task, needs_of


class CommunicatorPlan:
    """The generation that each of a rank's communicators has at each of its uses. Pure, derived from the order.

    Between two uses a communicator is released if meanwhile every member has its device for roles that do not use it:
    then all of them leave the old generation, each when it comes to that, and make the new one at the next use, which
    is a task that all of them join. Communicators of roles in `kept`, which stay on the device or never were there,
    are always open.
    """

    def __init__(
        self,
        order: Sequence[Task],
        placement: Placement,
        grids: Mapping[str, Grid],
        rank: int,
        *,
        lists: Iterable[RankList],
        kept: Collection[str] = (),
    ) -> None:
        never_released = lists_of_task(kept, grids)
        self.lists = tuple(ranks for ranks in lists if rank in ranks and ranks not in never_released)
        self._users = {ranks: _users(ranks, grids) for ranks in self.lists}
        self._device_tasks = _DeviceTasks(order, placement)
        self._rank = rank
        self._uses: dict[RankList, list[int]] = {ranks: [] for ranks in self.lists}
        used_by = {roles: lists_of_task(roles, grids) for roles in {entry.roles for entry in order}}
        for position, entry in enumerate(order):
            if entry.kind == "task":
                for ranks in used_by[entry.roles] & self._uses.keys():
                    self._uses[ranks].append(position)
        self._generations = {ranks: self._count(ranks, uses) for ranks, uses in self._uses.items()}

    def to_open(self, position: int) -> dict[RankList, int]:
        """List -> generation, of those that the task at `position` may use."""
        return {
            ranks: self._generations[ranks][index - 1]
            for ranks, uses in self._uses.items()
            if (index := bisect_right(uses, position)) and uses[index - 1] == position
        }

    def to_close(self, position: int) -> list[RankList]:
        """Those whose generation is over, and whose users have no part in the task at `position`."""
        return [ranks for ranks in self.lists if self._is_over(ranks, position)]

    def _is_over(self, ranks: RankList, position: int) -> bool:
        if not self._device_tasks.is_one(position, self._rank, self._users[ranks]):
            return False
        uses, generations = self._uses[ranks], self._generations[ranks]
        index = bisect_right(uses, position)
        return index == len(uses) or generations[index] != (generations[index - 1] if index else 0)

    def _count(self, ranks: RankList, uses: list[int]) -> list[int]:
        generations, generation = [], 0
        for last, use in zip([-1, *uses], uses, strict=False):
            users = self._users[ranks]
            generation += all(self._device_tasks.are_between(last, use, member, users) for member in ranks)
            generations.append(generation)
        return generations


class Communicators:
    """Has the process groups of one rank follow the plan."""

    def __init__(self, plan: CommunicatorPlan, groups: ProcessGroups) -> None:
        self._plan, self._groups = plan, groups

    def release(self, position: int) -> None:
        """Before the task at `position` takes the device. Waits for nobody."""
        self._groups.close(self._plan.to_close(position))

    def restore(self, position: int) -> None:
        """Right before the task at `position`. Collective over: the members of every list that comes back."""
        self._groups.open(self._plan.to_open(position))


class _DeviceTasks:
    """Where in the order the device of a rank is needed by none of some roles."""

    def __init__(self, order: Sequence[Task], placement: Placement) -> None:
        self._order, self._placement = order, placement
        self._positions: dict[tuple[tuple[str, ...], frozenset[str]], list[int]] = {}

    def are_between(self, first: int, last: int, rank: int, absent: frozenset[str]) -> bool:
        """Whether there is a task of `rank` and of no role in `absent` strictly between two positions."""
        positions = self._of(self._placement.hosts(rank), absent)
        index = bisect_right(positions, first)
        return index < len(positions) and positions[index] < last

    def is_one(self, position: int, rank: int, absent: frozenset[str]) -> bool:
        return self.are_between(position - 1, position + 1, rank, absent)

    def _of(self, hosted: tuple[str, ...], absent: frozenset[str]) -> list[int]:
        """Ranks that host the same roles share the answer."""
        if (hosted, absent) not in self._positions:
            names = {entry.name for entry in self._order if entry.kind == "task"}
            on_device = {name for name in names if needs_of(name).of(hosted).parts}
            self._positions[hosted, absent] = [
                i
                for i, entry in enumerate(self._order)
                if entry.kind == "task" and entry.name in on_device and absent.isdisjoint(entry.roles)
            ]
        return self._positions[hosted, absent]


def _users(ranks: RankList, grids: Mapping[str, Grid]) -> frozenset[str]:
    """Every role that uses a list, alone or with another."""
    return frozenset(role for roles, lists in role_group_lists(grids).items() if ranks in lists for role in roles)
