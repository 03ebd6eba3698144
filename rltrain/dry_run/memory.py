"""Which part of whose memory is on the device during which task, for each kind of rank."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from rltrain.config.schema import Config
from rltrain.dry_run.sizes import numbered
from rltrain.dry_run.table import table
from rltrain.runtime.placement import Placement
from rltrain.schedule.memory_plan import MemoryPlan, Place, leaving_roles
from rltrain.schedule.order import Order
from rltrain.schedule.steps import fullest_step
from rltrain.tasks.declaration import Key
from rltrain.tasks.roles import TRAINED_PARTS, device_roles

PARTS = (*TRAINED_PARTS, "kv_cache")
"""In the order of their columns. With fp32 weights there are no master weights beside them."""

LEGEND = (
    "used: needed by the task; stays: on the device all the same",
    "host: copied away; dropped: gone, since it is rewritten before it is read again",
    "without a GPU there is nothing to leave: only roles with offload: true do",
)


def describe_memory(
    order: Order, config: Config, placement: Placement, guests: Collection[str], sharing: Collection[str] = ()
) -> list[str]:
    """The memory of a step of `order` in the middle of the run, per set of ranks that host the same roles.

    `guests` are roles whose weights take the place of the actor's, `sharing` are those that have the actor's base.
    """
    lines: list[str] = []
    parts = [part for part in PARTS if part != "master_weights" or config.model.dtype != "float32"]
    parts += ["base"] if config.keeps_adapters_apart("rollout") else []
    for hosted, ranks in _kinds_of_ranks(placement).items():
        mine = [role for role in guests if role in hosted]
        same = [role for role in sharing if role in hosted]
        offload = {role: getattr(config, role).offload for role in hosted}
        leaving = leaving_roles(offload, [*mine, *same])
        overlays = {(role, "weights"): ("actor", "weights") for role in mine}
        plan = MemoryPlan(order, hosted, sharing=same)
        steps = _places_by_task(order, plan, plan.places(leaving, overlays))
        said = {role: f"{role} (in the actor's modules)" for role in mine}
        said |= {role: f"{role} (the actor without adapters)" for role in same}
        inside = [said.get(role, role) for role in hosted]
        where = f"{numbered('rank', ranks)}: {', '.join(inside)}"
        if all(cell in ("used", "stays") for cells in steps.values() for cell in cells.values()):
            lines.append(f"{where}: everything stays on the device")
        else:
            lines += [where, *(f"  {line}" for line in _table(steps, hosted, parts))]
    if any("host" in line or "dropped" in line for line in lines):
        lines += [*LEGEND, f"communicators of roles that leave: {config.residency.communicators}"]
    return lines


def _kinds_of_ranks(placement: Placement) -> dict[tuple[str, ...], list[int]]:
    """Ranks by their roles with something on the device."""
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(placement.world_size):
        hosted = tuple(role for role in placement.hosts(rank) if role in device_roles())
        if hosted:
            kinds[hosted].append(rank)
    return kinds


Cells = dict[Key, str]


def _places_by_task(
    order: Order, plan: MemoryPlan, places: Iterable[tuple[int, Mapping[Key, Place]]]
) -> dict[str, Cells]:
    """What to say of every part during every task of the step; the task's chunks are told apart where they differ."""
    step = fullest_step(order)
    found: dict[str, list[tuple[int, Cells]]] = defaultdict(list)
    for position, place_of in places:
        entry = order[position]
        if entry.step == step:
            needed = plan.needs(position).parts
            cells = {key: _word(place, key in needed) for key, place in place_of.items()}
            found[entry.name].append((entry.chunk, cells))
    rows: dict[str, Cells] = {}
    for name, tasks in found.items():
        for _, cells in tasks:
            alike = [chunk for chunk, others in tasks if others == cells]
            rows[name if len(alike) == len(tasks) else f"{name}, {numbered('chunk', alike)}"] = cells
    return rows


def _word(place: Place, is_needed: bool) -> str:
    if place != "device":
        return place
    return "used" if is_needed else "stays"


def _table(rows: Mapping[str, Cells], hosted: Collection[str], parts: Collection[str]) -> list[str]:
    keys = [(role, part) for role in hosted for part in parts if all((role, part) in cells for cells in rows.values())]
    roles = [role if i == 0 or keys[i - 1][0] != role else "" for i, (role, _) in enumerate(keys)]
    header = [["", *roles], ["", *(part for _, part in keys)]]
    return table([*header, *([name, *(cells[key] for key in keys)] for name, cells in rows.items())])
