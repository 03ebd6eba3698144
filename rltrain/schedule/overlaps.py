"""Which tasks can run at the same time: those on different ranks of which neither has to wait for the other."""

from collections import defaultdict

from rltrain.runtime.placement import Placement
from rltrain.schedule.order import SYNC_EVALUATION, WEIGHT_SYNC, Entry, Order


def overlapping_tasks(order: Order, placement: Placement, *, syncs_in_flight: bool) -> set[tuple[str, str]]:
    """Pairs of task names such as ("generate (rollout)", "update (actor)"), each pair in alphabetical order.

    Quadratic in the length of the order: meant for a few steps.
    """
    before = _predecessors(order, placement, syncs_in_flight)
    tasks = [(i, entry, _ranks(entry, placement)) for i, entry in enumerate(order) if entry.kind == "task"]
    pairs = set()
    for i, first, first_ranks in tasks:
        for j, second, second_ranks in tasks:
            if i < j and not before[j] >> i & 1 and first_ranks.isdisjoint(second_ranks):
                one, other = sorted((_words(first), _words(second)))
                pairs.add((one, other))
    return pairs


def _predecessors(order: Order, placement: Placement, syncs_in_flight: bool) -> list[int]:
    """Per entry the set of those that end before it can begin, as bits. All ranks of a role begin together.

    An entry follows the ones before it on its ranks, and a wait its post. The actor does not wait for what an engine
    does when weights change in flight; the engine's next task follows the sync all the same.
    """
    before: list[int] = []
    posts: dict[tuple[object, ...], int] = {}
    last: dict[int, int] = defaultdict(int)
    for i, entry in enumerate(order):
        ranks = _ranks(entry, placement)
        in_flight = entry.name == SYNC_EVALUATION or (entry.name == WEIGHT_SYNC and syncs_in_flight)
        leading = placement.ranks("actor") if in_flight else ranks
        own = posts[entry.transfer] if entry.kind == "wait" else 0
        for rank in leading:
            own |= last[rank]
        before.append(own)
        for rank in ranks:
            last[rank] |= own | 1 << i
        if entry.kind == "post":
            posts[entry.transfer] = own | 1 << i
    return before


def _ranks(entry: Entry, placement: Placement) -> set[int]:
    return {rank for role in entry.actors for rank in placement.ranks(role)}


def _words(task: Entry) -> str:
    return f"{task.name} ({'+'.join(task.roles)})"
