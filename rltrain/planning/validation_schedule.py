"""Refuses placements and schedules that cannot work, and invalid evaluations and selections of groups."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.evaluation import OF_SOURCES, SHORT_FORM, EvaluationPlan
from rltrain.config.schema import Config
from rltrain.errors import one_of
from rltrain.models import Architecture
from rltrain.models.of_roles import role_architectures
from rltrain.observability.evaluations import sizes_up_to
from rltrain.planning.problems import evaluated_text, longest_text, refuse
from rltrain.planning.validation_models import check_against_architecture
from rltrain.rewards.group_filter import REWARDS_DIFFER
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks, placement_of, role_grids
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import Order
from rltrain.schedule.replay import check
from rltrain.schedule.shape import RunShape
from rltrain.tasks.metrics import SCORE_HELD_OUT
from rltrain.tasks.roles import DECLARED, device_roles, informing, rewarding_roles, roles_of_samples, served_roles

# Evaluations.

OF_EVERY_SET = ("score", "response_length_mean", "truncated_ratio")
"""Metrics of every evaluation set that can rank policies."""


def evaluation_problems(config: Config) -> Iterator[str]:
    plans = config.evaluations
    yield from _name_problems(plans)
    yield from _length_problems(config, plans)
    for number, plan in enumerate(config.evaluation.sets):
        if plan.samples_per_prompt > 1 and plan.sampling.temperature == 0:
            yield (
                f"evaluation.sets.{number}.samples_per_prompt: got {plan.samples_per_prompt} with sampling.temperature "
                "0, so all samples of a prompt are equal; expected 1, or a temperature above 0"
            )
    yield from _metric_problems(config, plans)
    yield from _own_engine_problems(config) if config.evaluates_apart else _unused_key_problems(config)


def apart_problems(config: Config, placement: Placement) -> Iterator[str]:
    """Yields the problems of the ranks of role evaluation."""
    if not config.evaluates_apart:
        return
    ranks = placement.ranks("evaluation")
    others = sorted({role for rank in ranks for role in placement.hosts(rank)} - {"evaluation"})
    if others:
        shared = {rank for role in others for rank in placement.ranks(role)} & {*ranks}
        yield (
            f"placement.evaluation: shares ranks {format_ranks(shared)} with {', '.join(others)}, which would wait "
            "during an evaluation; expected separate ranks, or no role evaluation: the rollout's engines then evaluate"
        )


def _own_engine_problems(config: Config) -> Iterator[str]:
    engines = config.served("evaluation")
    if not config.evaluations:
        yield (
            "placement.evaluation: the role is placed, but nothing is evaluated; expected held-out prompts in "
            "data.eval or evaluation.sets, or no role evaluation"
        )
    if "env" in config.placed_roles:
        yield (
            "placement.evaluation: the role is placed with role env, whose environments serve only the rollout's "
            "engines; expected no role evaluation: the rollout's engines then evaluate"
        )
    models = [role for role in rewarding_roles() if role in config.placed_roles]
    for plan in config.evaluations if models else ():
        if plan.reward is None:
            yield (
                f"{plan.config_key}: the set uses the run's reward with {', '.join(models)}, which cannot score for "
                "role evaluation; expected every set in evaluation.sets with a reward section of functions, or no role "
                "evaluation: the rollout's engines then evaluate"
            )
    if engines.dtype == "fp8" and config.evaluation.keep_best is not None:
        yield (
            "evaluation.keep_best: got a section with engines of role evaluation in fp8, which hold only rounded "
            "weights; expected evaluation.dtype: auto"
        )


def _unused_key_problems(config: Config) -> Iterator[str]:
    for key, value in config.evaluation.engine_keys.items():
        yield (
            f"evaluation.{key}: got {value}, but role evaluation is not placed; expected evaluation: ranks in "
            f"placement, or rollout.{key} for the rollout's engines, which evaluate instead"
        )


def _name_problems(plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    for name, count in Counter(plan.name for plan in plans).items():
        if count > 1:
            and_short = f"; {SHORT_FORM} is the set of data.eval" if name == SHORT_FORM else ""
            yield f"evaluation.sets: {count} sets are called {name!r}; expected different names{and_short}"
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name == OF_SOURCES:
            yield (
                f"evaluation.sets: got the name {name!r}; expected letters, digits, underscores, dots and hyphens, "
                f"and not {OF_SOURCES}, because the metric is eval/<name>/score"
            )


def _length_problems(config: Config, plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    """Yields evaluation sets whose texts are too long for the engines."""
    role = "evaluation" if config.evaluates_apart else "rollout"
    context = config.served(role).max_context_tokens
    for plan in plans:
        longest, sizes = evaluated_text(config, plan)
        is_drawn = role == "rollout" and not algorithm_of(config).reads_responses
        is_checked = is_drawn and longest <= longest_text(config)[0]  # with the run's
        if not is_checked and longest > context:
            yield f"{role}.max_context_tokens: got {context}; expected at least {sizes}"


def _metric_problems(config: Config, plans: Sequence[EvaluationPlan]) -> Iterator[str]:
    settings = config.evaluation
    if settings.stop_at is not None and not plans:
        yield (
            f"evaluation.stop_at: got {settings.stop_at} without data.eval and without evaluation.sets; expected "
            "held-out prompts in one of them, or null"
        )
    if settings.stop_metric is not None and settings.stop_at is None:
        yield f"evaluation.stop_metric: got {settings.stop_metric!r} without evaluation.stop_at; expected both or none"
    if config.scores_held_out and settings.sets:
        yield (
            f"evaluation.sets: got {len(settings.sets)} with algorithm {config.algorithm}, which answers no prompts; "
            "expected none, and held-out rows in data.eval"
        )
    compared = {"evaluation.stop_metric": settings.stop_metric}
    if settings.keep_best is not None:
        compared["evaluation.keep_best.metric"] = settings.keep_best.metric
    for key, metric in compared.items():
        if metric is not None and not any(_has(config, plan, metric) for plan in plans):
            known = [f"{plan.prefix}/{name}" for plan in plans for name in _metrics(config, plan)]
            sets = one_of(metric, known, where="docs/evaluation.md") if known else "there is no set"
            yield f"{key}: got {metric!r}; expected a metric of an evaluation set: {sets}"


def _has(config: Config, plan: EvaluationPlan, metric: str) -> bool:
    name = plan.own_name(metric)
    is_reward = name is not None and name.startswith("reward_") and not config.scores_held_out
    return is_reward or name in _metrics(config, plan)


def _metrics(config: Config, plan: EvaluationPlan) -> list[str]:
    if config.scores_held_out:
        names = [metric.name.removeprefix("eval/") for metric in SCORE_HELD_OUT]
        return names[:1] if config.algorithm == "sft" else names
    n = plan.samples_per_prompt
    if n == 1:
        return [*OF_EVERY_SET]
    of_several = [f"{kind}@{k}" for k in sizes_up_to(n) for kind in ("pass", "best") if (kind, k) != ("best", 1)]
    return [*OF_EVERY_SET, f"mean@{n}", *of_several]


# Selection of prompt groups by their rewards. The rewards must be known on the ranks that generate the groups.


def dynamic_sampling_problems(config: Config, placement: Placement, grids: Mapping[str, Grid]) -> Iterator[str]:
    settings = config.batch.dynamic_sampling
    if settings is None:
        return
    if not algorithm_of(config).generates:
        yield (
            f"batch.dynamic_sampling: got a section with algorithm {config.algorithm}, which generates no samples; "
            "expected null"
        )
        return
    group_size = config.batch.samples_per_prompt + RunShape.of(config).greedy_per_group
    if settings.filter == REWARDS_DIFFER and group_size == 1:
        yield (
            f"batch.dynamic_sampling.filter: got {REWARDS_DIFFER} with batch.samples_per_prompt 1, so rewards of a "
            "group cannot differ; expected at least 2 samples per prompt, or a function"
        )
    for role, _ in informing("reward", "samples", placement.roles):
        yield (
            f"placement.{role}: placed with batch.dynamic_sampling, which selects groups before {role} has scored "
            "them; expected rewards by functions or environments only, or batch.dynamic_sampling: null"
        )
    if "rollout" in grids and "reward" in placement.roles:
        yield from _placement_problems(placement, grids["rollout"])


def _placement_problems(placement: Placement, rollout: Grid) -> Iterator[str]:
    reward, drawing = set(placement.ranks("reward")), set(rollout.ranks)
    lacking = [rank for rank in rollout.owners() if rank not in reward]
    if not lacking and reward <= drawing:
        return
    why = f"engines with first ranks {format_ranks(lacking)} could not score their samples" if lacking else ""
    why = why or f"ranks {format_ranks(reward - drawing)} generate no samples, and would have nothing to score"
    yield (
        f"placement.reward: got ranks {format_ranks(reward)} with batch.dynamic_sampling: {why}. The nearest that "
        f"works is the rollout's ranks, {format_ranks(drawing)}; or batch.dynamic_sampling: null"
    )


# Schedules for a placement and an algorithm. Every refusal names the reason and the nearest valid choice.

OVERLAP_OFF = "disable_overlap_schedule"
"""The name of an argument of SGLang."""


def check_schedule(config: Config, placement: Placement, grids: Mapping[str, Grid]) -> None:
    """Raises ConfigError with every schedule setting that cannot work in this run."""
    problems = [*_mode_problems(config, placement), *_staleness_problems(config), *_chunk_problems(config, grids)]
    problems += [*_engine_problems(config, placement, grids), *_offload_problems(config, placement)]
    problems += [
        *apart_problems(config, placement),
        *_overlap_problems(config),
        *dynamic_sampling_problems(config, placement, grids),
    ]
    refuse(problems, several="impossible settings of the schedule")


def _mode_problems(config: Config, placement: Placement) -> Iterator[str]:
    mode = config.schedule.mode
    if mode == "sequential":
        return
    if not algorithm_of(config).generates:
        named = f"algorithm {config.algorithm}"
        yield f"schedule.mode: got {mode} with {named}, which generates no samples; expected sequential"
        return
    consumers = [role for role in ("reward", *roles_of_samples()) if role in placement.roles]
    rollout = set(placement.ranks("rollout"))
    apart = [role for role in consumers if rollout.isdisjoint(placement.ranks(role))]
    if mode == "pipelined" and not apart:
        yield (
            f"schedule.mode: got pipelined, but rollout (ranks {format_ranks(rollout)}) shares ranks with every role "
            f"that follows it ({', '.join(consumers)}), and a rank can do nothing else while it decodes. The nearest "
            "that works here is schedule.mode: sequential; or give one of these roles separate ranks"
        )
    if mode == "asynchronous":
        yield from _asynchronous_problems(config, placement, apart)


def _asynchronous_problems(config: Config, placement: Placement, apart: list[str]) -> Iterator[str]:
    nearest = f"schedule.mode: {'pipelined' if apart else 'sequential'}{_without_staleness(config)}"
    for role in roles_of_samples():
        if role in placement.roles and role not in apart:
            shared = format_ranks(set(placement.ranks("rollout")) & set(placement.ranks(role)))
            yield (
                f"schedule.mode: got asynchronous, but rollout and {role} share ranks {shared}. These cannot decode "
                f"the next step while they work on this one. The nearest that works here is {nearest}; "
                f"or place rollout and {role} on different ranks"
            )


def _without_staleness(config: Config) -> str:
    """Returns the further changes for a mode without old weights, as the end of a message."""
    schedule = config.schedule
    changes = ["schedule.max_staleness: 0"] if schedule.max_staleness and not schedule.partial_rollouts else []
    changes += ["schedule.sync_every: 1"] if schedule.sync_every > 1 else []
    return f" with {' and '.join(changes)}" if changes else ""


def _staleness_problems(config: Config) -> Iterator[str]:
    schedule = config.schedule
    limit = 0 if schedule.mode == "pipelined" else schedule.max_staleness
    if schedule.sync_every > limit + 1:
        nearest = f"schedule.mode: asynchronous with schedule.max_staleness: {schedule.sync_every - 1} or more"
        if schedule.mode == "sequential":
            nearest = f"schedule.max_staleness: {schedule.sync_every - 1}"
        yield (
            f"schedule.sync_every: got {schedule.sync_every}, so weights would be {schedule.sync_every - 1} steps old, "
            f"but schedule.mode {schedule.mode} with schedule.max_staleness {schedule.max_staleness} allows {limit}. "
            f"The nearest that works is schedule.sync_every: {limit + 1}; or {nearest}"
        )
    seldom = schedule.mode == "sequential" and schedule.sync_every > 1
    if schedule.max_staleness and schedule.mode != "asynchronous" and not schedule.partial_rollouts and not seldom:
        yield (
            f"schedule.max_staleness: got {schedule.max_staleness} with schedule.mode {schedule.mode}, so no sample is "
            "older than its step; expected 0, or schedule.mode: asynchronous"
        )
    if schedule.partial_rollouts and schedule.max_staleness == 0 and schedule.on_stale == "drop":
        yield (
            "schedule.partial_rollouts: got true with schedule.max_staleness 0 and schedule.on_stale drop, so every "
            "continued response would be dropped. The nearest that works is schedule.on_stale: mask, or "
            "schedule.max_staleness: 1"
        )
    if schedule.on_stale == "correct" and config.loss.correction.high is None:
        yield "schedule.on_stale: got correct without loss.correction.high; expected a bound such as 2.0, or drop"


def _chunk_problems(config: Config, grids: Mapping[str, Grid]) -> Iterator[str]:
    chunks = RunShape.of(config).num_chunks
    if chunks == 1:
        return
    if config.schedule.mode == "sequential":
        yield (
            f"schedule.chunks: got {chunks} with schedule.mode sequential, so chunks of a step could not overlap. The "
            "nearest that works is schedule.chunks: 1; or schedule.mode: pipelined"
        )
        return
    obstacle = _obstacle_to_chunks(config, grids, chunks)
    if obstacle:
        possible = range(1, config.batch.prompts_per_step + 1)
        legal = [n for n in possible if _obstacle_to_chunks(config, grids, n) is None]
        nearest = min(legal, key=lambda n: (abs(n - chunks), n), default=1)
        yield f"schedule.chunks: got {chunks}{obstacle}. The nearest that works is schedule.chunks: {nearest}"


def _obstacle_to_chunks(config: Config, grids: Mapping[str, Grid], chunks: int) -> str | None:
    """Returns the reason why a step cannot have this number of chunks, or None if it can."""
    prompts, blocks = config.batch.prompts_per_step, RunShape.of(config).prompt_blocks
    if prompts % chunks:
        return f", which does not divide batch.prompts_per_step {prompts}"
    if chunks % blocks and blocks % chunks:
        return (
            f" with {blocks} blocks of prompts (batch.mini_batches {config.batch.mini_batches}); expected a divisor or "
            f"a multiple of {blocks}"
        )
    share = prompts // chunks
    for role, grid in grids.items():
        if role != "rollout" and not DECLARED[role].beside_steps and share < grid.dp:
            return f": chunks of {share} prompts are too few for the {grid.dp} data-parallel replicas of {role}"
    return None


def _engine_problems(config: Config, placement: Placement, grids: Mapping[str, Grid]) -> Iterator[str]:
    """Yields engines with ranks of different roles. All ranks of an engine act at one time, so none may be busy
    elsewhere."""
    held_up = _uneven_engine("rollout", placement, grids, set(placement.roles))
    if RunShape.of(config).syncs_in_flight and held_up:
        yield (
            f"schedule.in_flight_sync: got true, but ranks {format_ranks(held_up)} of one engine have different roles, "
            "so it could not change its weights at one decode step. The nearest that works is "
            "schedule.in_flight_sync: false; or place the other roles on all of its ranks or none"
        )
    for role in served_roles():
        sharing = _uneven_engine(role, placement, grids, set(device_roles()))
        if config.served(role).engine == "sglang" and sharing:
            yield (
                f"placement.{role}: the engine on ranks {format_ranks(sharing)} shares the devices of only some of its "
                "ranks, but its server leaves and returns to all of them at once "
                f"({config.engine_key(role, 'engine')} sglang). Place the other roles on all of its ranks or none; or "
                f"set {role}.engine: embedded"
            )


def _overlap_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    begins_early = rollout.engine == "sglang" and rollout.sglang.args.get(OVERLAP_OFF, True) is False
    if begins_early and RunShape.of(config).draws_during_syncs:
        yield (
            f"rollout.sglang.args.{OVERLAP_OFF}: got false, but responses may be running when weights arrive, and "
            "SGLang would then count a token of the old weights as one of the new weights. Remove the key (the "
            "server's batches overlap if this cannot happen), or set schedule.in_flight_sync: false and "
            "schedule.partial_rollouts: false"
        )


def _uneven_engine(
    role: str, placement: Placement, grids: Mapping[str, Grid], roles: set[str]
) -> tuple[int, ...] | None:
    """Returns the ranks of the first engine of `role` on which `roles` differ between ranks, or None."""
    grid = grids.get(role)
    for ranks in [grid.replica(dp) for dp in range(grid.dp)] if grid else []:
        if len({frozenset(roles.intersection(placement.hosts(rank))) for rank in ranks}) > 1:
            return ranks
    return None


def _offload_problems(config: Config, placement: Placement) -> Iterator[str]:
    """Yields the problems of engine offload. In-flight weights can arrive at any time, also between generate tasks."""
    if RunShape.of(config).syncs_in_flight and config.rollout.offload is True:
        yield (
            "rollout.offload: got true with in-flight weight syncs, which need the engine's memory on the device. The "
            "nearest that works here is rollout.offload: auto (an engine alone on its ranks stays there); or "
            "schedule.in_flight_sync: false"
        )
    for role in (role for role in served_roles() if role in placement.roles):
        served = config.served(role)
        keeps = served.engine != "sglang" or served.sglang.keep_weights
        if not keeps and _leaves(role, served.offload, placement):
            yield (
                f"{role}.sglang.keep_weights: got false for an engine that may leave its device and would return "
                f"without valid weights; expected true, or {role}.offload: false"
            )


def _leaves(role: str, offload: str | bool, placement: Placement) -> bool:
    """Returns whether any engine of a role leaves its device between tasks."""
    if offload != "auto" or role not in placement.roles:
        return offload is True
    others = {other for rank in placement.ranks(role) for other in placement.hosts(rank)} - {role}
    return not others.isdisjoint(device_roles())


# A valid config in a world of ranks, with its placement, grids, models and order.


@dataclass(frozen=True)
class PlacedConfig:
    placement: Placement
    grids: Mapping[str, Grid]
    architectures: Mapping[str, Architecture]
    """Architectures by role. Empty if no model was read."""
    order: Order


def place_config(config: Config, world_size: int, ranks_per_node: int, *, reads_models: bool = True) -> PlacedConfig:
    """Returns the placement, grids, models and order of `config` in this world. Call `check_config` first.

    With `reads_models` it reads each checkpoint's config.json and checks the models. Raises UserError if the config
    cannot work in this world.
    """
    placement = placement_of(config, world_size, ranks_per_node)
    grids = role_grids(config, placement)
    architectures = role_architectures(config, placement.roles) if reads_models else {}
    if reads_models:
        check_against_architecture(config, grids, architectures)
    check_schedule(config, placement, grids)
    order = build_order(config, placement)
    check(order.excerpt(), placement)
    return PlacedConfig(placement, grids, architectures, order)
