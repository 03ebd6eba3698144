"""Probable mistakes in a config, and whether a run repeats."""

from collections.abc import Iterable, Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.errors import one_of
from rltrain.models import Architecture
from rltrain.rewards.functions import TRUSTED
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks
from rltrain.schedule.memory_plan import ranks_left_by_engines
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import served_roles

# Probable mistakes. They cause warnings in the dry run and at the start of a job.

OF_SEQUENCES = ("gspo", "geometric_mean")
"""Policy losses with a mean over sequences."""


OF_TESTS = "RLTRAIN_TEST_"
VARIABLES = (
    "RLTRAIN_BROWSER",
    "RLTRAIN_CUDA_ARCHITECTURES",
    "RLTRAIN_GPU_START",
    "RLTRAIN_NATIVE",
    "RLTRAIN_PYTHON",
    "RLTRAIN_ROW",
    "RLTRAIN_RUN",
    "RLTRAIN_SESSION_URL",
    "RLTRAIN_SGLANG_PYTHON",
    "RLTRAIN_SGLANG_TOKEN",
    "RLTRAIN_VLLM_PYTHON",
)
"""Environment variables that rltrain reads or sets."""


def doubts_about_variables(environment: Iterable[str]) -> Iterator[str]:
    """Yields a warning for each RLTRAIN_ variable that rltrain does not read."""
    for name in sorted(environment):
        if name.startswith("RLTRAIN_") and not name.startswith(OF_TESTS) and name not in VARIABLES:
            yield f"the environment variable {name} has no effect; expected {one_of(name, VARIABLES)}"


def doubts_about_models(config: Config, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    """Yields warnings about the models. `architectures` are by role, without roles whose config.json is missing."""
    algorithm, actor = algorithm_of(config), architectures.get("actor")
    if actor is None or actor.moe is None or not (algorithm.trains and algorithm.generates):
        return
    model, rounded = config.model, config.rollout.dtype == "fp8"
    if model.router_replay != "off" or config.backend_of("actor") != "megatron":
        return
    if model.dtype != "float32" or rounded:
        weights = "rollout.dtype fp8" if rounded else f"model.dtype {model.dtype}"
        yield (
            f"model.router_replay: got off with experts and {weights}, so engine and actor choose different experts "
            "for some tokens, and training can fail; expected rollout: the actor then uses the engine's choices, for "
            f"{actor.routing_bytes} bytes per token"
        )


def doubts(config: Config, placement: Placement, *, on_gpus: bool = True) -> Iterator[str]:
    """Yields warnings. Each is a sentence with the config key and the cure."""
    if idle := placement.idle:
        who = f"ranks {format_ranks(idle)} host" if len(idle) > 1 else f"rank {idle[0]} hosts"
        yield (
            f"placement: {who} no role and will do nothing; expected a role on every rank. Give a role more ranks, or "
            f"start {len(placement.hosting)} ranks"
        )
    if config.evaluation.interval and not config.evaluations:
        yield (
            f"evaluation.interval: got {config.evaluation.interval} without data.eval, so nothing will be evaluated; "
            "expected held-out prompts in data.eval or evaluation.sets, or 0"
        )
    if config.loss.policy in OF_SEQUENCES and config.loss.normalization == "token_mean":
        yield (
            f"loss.normalization: got token_mean with loss.policy {config.loss.policy}, so longer sequences count "
            "more; expected sequence_mean, as in its paper"
        )
    if on_gpus and config.synced_delta and (ranks := ranks_left_by_engines(config, placement)):
        yield (
            f"weight_sync.delta: got a section with rollout.offload auto on ranks {format_ranks(ranks)}, where engines "
            "share GPUs with other roles and drop their weights before every sync, so each sync sends everything; "
            "expected rollout.offload: false, or engines on separate ranks, or weight_sync.delta: null"
        )
    limits = {key: getattr(config.checks, key) for key in ("max_logprob_diff", "max_kl")}
    if any(limits.values()) and config.schedule.mode == "asynchronous" and not config.schedule.in_flight_sync:
        key = next(key for key, limit in limits.items() if limit)
        yield (
            f"checks.{key}: got {limits[key]} with schedule.mode asynchronous and schedule.in_flight_sync false, so "
            "every token comes from older weights than the actor's, and none can be checked; expected in_flight_sync: "
            "true, or null here"
        )
    if "rollout" not in config.placed_roles:
        return
    if config.model.residual != config.model.dtype and config.rollout.engine == "sglang":
        yield (
            f"model.residual_dtype: got {config.model.residual_dtype} with rollout.engine sglang, which rounds its "
            f"residuals to model.dtype {config.model.dtype}, so only the trainer uses the key; expected null, or "
            "rollout.engine: embedded"
        )
    if config.rollout.dtype == "fp8" and config.loss.old_logprobs == "actor" and config.loss.correction.high is None:
        yield (
            "rollout.dtype: got fp8 with loss.correction.high null, so samples of the rounded weights count like the "
            "actor's own; expected a bound such as 2.0: tokens are then weighted by their likelihood under the actor"
        )


# Repeatability: all samples, and the weights that generate them, follow from the config alone.


def obstacle_to_repeating(config: Config, grids: Mapping[str, Grid]) -> str | None:
    """Returns the reason why two runs of `config` can differ, or None.

    An engine generates the same samples if they begin and end at the same decode steps. A single engine counts its own
    steps. With several engines, or a server that decodes continuously, the fastest one comes first.
    """
    for role in (role for role in served_roles() if role in grids):
        served, key = config.served(role), config.engine_key(role, "sglang.args.enable_deterministic_inference")
        if served.engine == "sglang" and not served.sglang.heeds_seeds:
            return f"SGLang samples with its own random numbers ({key})"
        if served.engine == "http":
            return f"servers at URLs decide how they sample ({role}.engine http)"
    if config.evaluates_apart and config.stop_metric is not None:
        return "the step at which training ends depends on the time of an evaluation beside it (evaluation.stop_at)"
    if "rollout" not in grids:
        return None
    rollout, num_engines, shape = config.rollout, grids["rollout"].dp, RunShape.of(config)
    if shape.syncs_in_flight:
        return "responses continue with new weights as soon as these arrive (schedule.in_flight_sync)"
    if shape.selects_groups and not TRUSTED.issuperset(config.reward.names):
        return (
            "the decode step at which other prompts replace dropped ones depends on the time of reward functions "
            "(batch.dynamic_sampling)"
        )
    left_open = _left_to_the_fastest(config, shape)
    if left_open and num_engines > 1:
        return f"{left_open} depends on the speed of each of the {num_engines} engines"
    if left_open and rollout.engine == "sglang":
        return f"{left_open} depends on the speed of the SGLang server"
    return None


def _left_to_the_fastest(config: Config, shape: RunShape) -> str | None:
    """Returns the first decision that depends on the speed of engines, or None."""
    if config.schedule.partial_rollouts:
        return "the choice of responses that a generate task leaves to the next (schedule.partial_rollouts)"
    if shape.selects_groups:
        return "the time at which prompts replace dropped ones (batch.dynamic_sampling)"
    if shape.num_chunks > 1:
        return "the choice of prompts in a chunk (schedule.chunks)"
    if shape.shares_prompts:
        return "the choice of prompts of each engine (schedule.mode)"
    return None
