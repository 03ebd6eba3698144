"""What happens in which order, and what at the same time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from textwrap import wrap

from rltrain.config.schema import Config
from rltrain.dry_run.sizes import WIDTH
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import CHECKPOINT, Entry, Order
from rltrain.schedule.replay import overlapping_tasks
from rltrain.schedule.shape import RunShape
from rltrain.schedule.steps import fullest_step


def describe_mode(config: Config) -> str:
    """The mode, and what of the schedule section bears on it."""
    schedule, shape = config.schedule, RunShape.of(config)
    words = [schedule.mode, f"chunks {shape.num_chunks}", f"max_staleness {schedule.max_staleness}"]
    if shape.lead:
        ahead = f"generation {shape.lead} step{'s' * (shape.lead > 1)} ahead"
        words += [ahead, "weight syncs in flight" if shape.syncs_in_flight else "weight syncs between generate tasks"]
    if schedule.sync_every > 1:
        words.append(f"sync_every {schedule.sync_every}")
    if schedule.partial_rollouts:
        words.append(f"partial rollouts, {schedule.oversampling:.0%} oversampled")
    return ", ".join(words)


def describe_order(order: Order, config: Config) -> list[str]:
    """The entries of a step in the middle without an evaluation, of its chunks the first and the last; then those of
    the first step, and those after the last, that have no like among them."""
    middle, last_chunk = fullest_step(order), RunShape.of(config).num_chunks - 1
    lines: list[str] = []
    shown: set[tuple[str, str, tuple[str, ...]]] = set()
    for step in sorted({0, middle, config.steps}, key=lambda step: step != middle):
        entries = [*enumerate(entry for _, entry in order.of_step(step))]
        told = [f"{i:3d}  {e}" for i, e in entries if e.chunk in (0, last_chunk) and _alike(e) not in shown]
        lines += [*([""] if lines and told else []), *told]
        shown |= {_alike(entry) for _, entry in entries}
    return lines


def _alike(entry: Entry) -> tuple[str, str, tuple[str, ...]]:
    """What an entry has in common with those of other steps and chunks."""
    return entry.kind, entry.name, entry.roles


def describe_overlaps(order: Order, config: Config, placement: Placement) -> list[str]:
    """Tasks with those that they may run beside, without checkpoints, whose files are written beside all tasks."""
    found = overlapping_tasks(order, placement, syncs_in_flight=RunShape.of(config).syncs_in_flight)
    pairs = [pair for pair in found if not any(task.startswith(f"{CHECKPOINT} ") for task in pair)]
    if not pairs:
        return ["none: every task needs what the one before it made, or its ranks"]
    lines = (f"{task} beside {', '.join(sorted(others))}" for task, others in by_task(pairs))
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)]


def by_task(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, set[str]]]:
    """Every pair once, at the one of its two that has most partners left."""
    partners: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        partners[one].add(other)
        partners[other].add(one)
    while any(partners.values()):
        task = max(sorted(partners), key=lambda task: len(partners[task]))
        others = partners.pop(task)
        for other in others:
            partners[other].discard(task)
        yield task, others
