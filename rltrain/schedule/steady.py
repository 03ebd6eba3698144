"""A few steps of a run, without what is special about its first ones: what stands for all of them."""

from collections import Counter

from rltrain.config.schema import Config
from rltrain.runtime.placement import Placement
from rltrain.schedule.order import SYNC_EVALUATION, Order
from rltrain.schedule.shape import RunShape
from rltrain.schedule.steps import build_order


def steady_order(config: Config, placement: Placement, more_steps: int = 0) -> Order:
    """The order of a run like `config`'s of a few steps, without what is special about its first ones."""
    steps = RunShape.of(config).lead + 2 * config.schedule.sync_every + 2 + more_steps
    sets = [one.model_copy(update={"interval": 2 if one.interval else one.interval}) for one in config.evaluation.sets]
    interval = 2 if config.evaluation.interval else 0
    evaluation = config.evaluation.model_copy(update={"interval": interval, "sets": tuple(sets)})
    critic = config.critic.model_copy(update={"critic_warmup_steps": 0})
    return build_order(
        config.model_copy(update={"steps": steps, "evaluation": evaluation, "critic": critic}), placement
    )


def evaluated_step(order: Order) -> int:
    """The first step in which engines of their own evaluate; 0 without any."""
    return min((entry.step for entry in order.distinct() if entry.name == SYNC_EVALUATION), default=0)


def fullest_step(order: Order) -> int:
    """The first of the steps with most entries, among those without an evaluation and after step 0 if there are any."""
    distinct = [*order.distinct()]
    evaluated = {entry.step for entry in distinct if "evaluation" in entry.name}
    counts = Counter(entry.step for entry in distinct if entry.step and entry.step not in evaluated)
    return max(sorted(counts), key=lambda step: counts[step], default=0)
