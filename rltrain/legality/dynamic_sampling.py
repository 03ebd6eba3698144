"""Where prompt groups can be selected by their rewards: these have to be known on the ranks that draw the groups."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.rewards.group_filter import REWARDS_DIFFER
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import informing


def dynamic_sampling_problems(config: Config, placement: Placement, grids: Mapping[str, Grid]) -> Iterator[str]:
    settings = config.batch.dynamic_sampling
    if settings is None:
        return
    if not algorithm_of(config).generates:
        yield (
            f"batch.dynamic_sampling: got it with algorithm {config.algorithm}, which draws nothing to select from; "
            "expected null"
        )
        return
    if settings.filter == REWARDS_DIFFER and _group_size(config) == 1:
        yield (
            f"batch.dynamic_sampling.filter: got {REWARDS_DIFFER} with batch.samples_per_prompt 1, where no group has "
            "rewards that differ; expected at least 2 samples per prompt, or a function"
        )
    for role, _ in informing("reward", "samples"):
        if role in placement.roles:
            yield (
                f"placement.{role}: placed with batch.dynamic_sampling, which selects groups before that has said "
                f"anything of them; expected rewards by functions or environments alone, without {role}, or "
                "batch.dynamic_sampling: null"
            )
    if "rollout" in grids and "reward" in placement.roles:
        yield from _placement_problems(placement, grids["rollout"])


def _group_size(config: Config) -> int:
    """Samples of a prompt, greedy ones included."""
    return config.batch.samples_per_prompt + RunShape.of(config).greedy_per_group


def _placement_problems(placement: Placement, rollout: Grid) -> Iterator[str]:
    reward, drawing = set(placement.ranks("reward")), set(rollout.ranks)
    lacking = [rank for rank in rollout.owners() if rank not in reward]
    if not lacking and reward <= drawing:
        return
    why = f"engines whose first ranks are {format_ranks(lacking)} could not score what they draw" if lacking else ""
    why = why or f"ranks {format_ranks(reward - drawing)} draw nothing, and would get no rewards to give"
    yield (
        f"placement.reward: got ranks {format_ranks(reward)} with batch.dynamic_sampling: {why}. The nearest that "
        f"works is the rollout's ranks, {format_ranks(drawing)}; or batch.dynamic_sampling: null"
    )
