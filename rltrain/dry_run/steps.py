"""What happens in which order, and what at the same time."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from textwrap import wrap

from rltrain.cluster.placement import Placement
from rltrain.config.schema import Config
from rltrain.schedule.order import Order
from rltrain.schedule.overlaps import overlapping_tasks
from rltrain.schedule.shape import RunShape
from rltrain.schedule.steps import build_order

WIDTH = 110


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


def steady_order(config: Config, placement: Placement) -> Order:
    """The order of a run like `config`'s of a few steps, without what is special about its first ones."""
    steps = RunShape.of(config).lead + 2 * config.schedule.sync_every + 2
    evaluation = config.evaluation.model_copy(update={"interval": 2 if config.evaluation.interval else 0})
    critic = config.critic.model_copy(update={"critic_warmup_steps": 0})
    return build_order(
        config.model_copy(update={"steps": steps, "evaluation": evaluation, "critic": critic}), placement
    )


def fullest_step(order: Order) -> int:
    """The first of the steps with most entries, among those without an evaluation and after step 0 if there are any."""
    distinct = [*order.distinct()]
    evaluated = {entry.step for entry in distinct if "evaluation" in entry.name}
    counts = Counter(entry.step for entry in distinct if entry.step and entry.step not in evaluated)
    return max(sorted(counts), key=lambda step: counts[step], default=0)


def describe_order(order: Order, config: Config) -> list[str]:
    """The entries of the first step, of one in the middle without an evaluation, and those after the last step."""
    lines = []
    for step in sorted({0, fullest_step(order), config.steps}):
        lines += [f"{number:3d}  {entry}" for number, entry in enumerate(e for _, e in order.of_step(step))] + [""]
    return lines[:-1]


def describe_overlaps(order: Order, config: Config, placement: Placement) -> list[str]:
    """Tasks with those that they may run beside."""
    pairs = overlapping_tasks(order, placement, syncs_in_flight=RunShape.of(config).syncs_in_flight)
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
