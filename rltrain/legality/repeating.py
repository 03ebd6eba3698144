"""Whether a run repeats: what is drawn, and by which weights, then follows from the config alone."""

from collections.abc import Mapping

from rltrain.config.schema import Config
from rltrain.rewards.functions import TRUSTED
from rltrain.runtime.grid import Grid
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import served_roles


def obstacle_to_repeating(config: Config, grids: Mapping[str, Grid]) -> str | None:
    """What lets two runs of `config` differ; None where nothing does.

    An engine draws the same as long as it begins and ends the same at the same decode steps. One that is alone counts
    those itself; of several, as of a server that decodes whether or not it is asked, the fastest is first.
    """
    for role in (role for role in served_roles() if role in grids):
        served, key = config.served(role), config.engine_key(role, "sglang.args.enable_deterministic_inference")
        if served.engine == "sglang" and not served.sglang.heeds_seeds:
            return f"SGLang draws with random numbers of its own ({key})"
        if served.engine == "http":
            return f"servers that somebody else runs draw as they were started to ({role}.engine http)"
    if config.evaluates_apart and config.stop_metric is not None:
        return "when an evaluation beside training is over decides at which step it ends training (evaluation.stop_at)"
    if "rollout" not in grids:
        return None
    rollout, num_engines, shape = config.rollout, grids["rollout"].dp, RunShape.of(config)
    if shape.syncs_in_flight:
        return "responses go on with new weights as soon as there are any (schedule.in_flight_sync)"
    if shape.selects_groups and not TRUSTED.issuperset(config.reward.names):
        return (
            "when a reward function answers decides at which decode step other prompts take the place of those that "
            "are dropped (batch.dynamic_sampling)"
        )
    left_open = _left_to_the_fastest(config, shape)
    if left_open and num_engines > 1:
        return f"{left_open} depends on how fast each of the {num_engines} engines is"
    if left_open and rollout.engine == "sglang":
        return f"{left_open} depends on how fast the SGLang server is"
    return None


def _left_to_the_fastest(config: Config, shape: RunShape) -> str | None:
    """What engines that get done at different times settle between them."""
    if config.schedule.partial_rollouts:
        return "which responses a generate task leaves to the next (schedule.partial_rollouts)"
    if shape.selects_groups:
        return "when prompts take the place of those that are dropped (batch.dynamic_sampling)"
    if shape.num_chunks > 1:
        return "which prompts make up a chunk (schedule.chunks)"
    if shape.shares_prompts:
        return "which prompts an engine takes (schedule.mode)"
    return None
