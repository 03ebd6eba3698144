"""Which schedules a placement and an algorithm allow. Every refusal names the reason and the nearest legal choice."""

from collections.abc import Iterator, Mapping

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.schema import Config
from rltrain.legality.dynamic_sampling import dynamic_sampling_problems
from rltrain.legality.evaluation import apart_problems
from rltrain.legality.problems import refuse
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks
from rltrain.schedule.shape import RunShape
from rltrain.tasks.roles import DECLARED, device_roles, roles_of_samples, served_roles

OVERLAP_OFF = "disable_overlap_schedule"
"""SGLang's argument."""


def check_schedule(config: Config, placement: Placement, grids: Mapping[str, Grid]) -> None:
    """ConfigError with all that the schedule section asks for and this run cannot have."""
    problems = [*_mode_problems(config, placement), *_staleness_problems(config), *_chunk_problems(config, grids)]
    problems += [*_engine_problems(config, placement, grids), *_offload_problems(config, placement)]
    problems += [
        *apart_problems(config, placement),
        *_overlap_problems(config),
        *dynamic_sampling_problems(config, placement, grids),
    ]
    refuse(problems, several="things in the schedule that cannot be")


def _mode_problems(config: Config, placement: Placement) -> Iterator[str]:
    mode = config.schedule.mode
    if mode == "sequential":
        return
    if not algorithm_of(config).generates:
        named = f"algorithm {config.algorithm}"
        yield f"schedule.mode: got {mode} with {named}, which generates nothing; expected sequential"
        return
    consumers = [role for role in ("reward", *roles_of_samples()) if role in placement.roles]
    rollout = set(placement.ranks("rollout"))
    apart = [role for role in consumers if rollout.isdisjoint(placement.ranks(role))]
    if mode == "pipelined" and not apart:
        yield (
            f"schedule.mode: got pipelined, but rollout (ranks {format_ranks(rollout)}) shares ranks with every role "
            f"that follows it ({', '.join(consumers)}): a rank that decodes can do nothing else meanwhile. The nearest "
            "that works here is schedule.mode: sequential; or give one of these roles ranks of its own"
        )
    if mode == "asynchronous":
        yield from _asynchronous_problems(config, placement, apart)


def _asynchronous_problems(config: Config, placement: Placement, apart: list[str]) -> Iterator[str]:
    nearest = f"schedule.mode: {'pipelined' if apart else 'sequential'}{_without_staleness(config)}"
    for role in roles_of_samples():
        if role in placement.roles and role not in apart:
            shared = format_ranks(set(placement.ranks("rollout")) & set(placement.ranks(role)))
            yield (
                f"schedule.mode: got asynchronous, but rollout and {role} share ranks {shared}, which cannot decode "
                f"the next step while they work on this one. The nearest that works here is {nearest}; "
                f"or place rollout and {role} on different ranks"
            )


def _without_staleness(config: Config) -> str:
    """What is to be changed along with the mode, for one in which weights are never old."""
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
            f"schedule.sync_every: got {schedule.sync_every}: weights would be {schedule.sync_every - 1} steps old, "
            f"and schedule.mode {schedule.mode} with schedule.max_staleness {schedule.max_staleness} allows {limit}. "
            f"The nearest that works is schedule.sync_every: {limit + 1}; or {nearest}"
        )
    seldom = schedule.mode == "sequential" and schedule.sync_every > 1
    if schedule.max_staleness and schedule.mode != "asynchronous" and not schedule.partial_rollouts and not seldom:
        yield (
            f"schedule.max_staleness: got {schedule.max_staleness} with schedule.mode {schedule.mode}, in which no "
            "sample is older than its step; expected 0, or schedule.mode: asynchronous"
        )
    if schedule.partial_rollouts and schedule.max_staleness == 0 and schedule.on_stale == "drop":
        yield (
            "schedule.partial_rollouts: with schedule.max_staleness 0 and schedule.on_stale drop every continued "
            "response would be thrown away. The nearest that works is schedule.on_stale: mask, or "
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
            f"schedule.chunks: got {chunks} with schedule.mode sequential, where parts of a step have nothing to "
            "overlap with. The nearest that works is schedule.chunks: 1; or schedule.mode: pipelined"
        )
        return
    obstacle = _obstacle_to_chunks(config, grids, chunks)
    if obstacle:
        possible = range(1, config.batch.prompts_per_step + 1)
        legal = [n for n in possible if _obstacle_to_chunks(config, grids, n) is None]
        nearest = min(legal, key=lambda n: (abs(n - chunks), n), default=1)
        yield f"schedule.chunks: got {chunks}{obstacle}. The nearest that works is schedule.chunks: {nearest}"


def _obstacle_to_chunks(config: Config, grids: Mapping[str, Grid], chunks: int) -> str | None:
    """Why a step cannot have so many chunks; None if it can."""
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
    """What the ranks of one engine do together, they do at one time: so none of them may be held up elsewhere."""
    held_up = _uneven_engine("rollout", placement, grids, set(placement.roles))
    if RunShape.of(config).syncs_in_flight and held_up:
        yield (
            f"schedule.in_flight_sync: the engine on ranks {format_ranks(held_up)} has ranks that host different "
            "roles, and could not change its weights at one decode step. The nearest that works is "
            "schedule.in_flight_sync: false; or place the other roles on all of its ranks or none"
        )
    for role in served_roles():
        sharing = _uneven_engine(role, placement, grids, set(device_roles()))
        if config.served(role).engine == "sglang" and sharing:
            yield (
                f"placement.{role}: the engine on ranks {format_ranks(sharing)} shares the devices of some of its "
                "ranks, but its server leaves and returns to all of them at once "
                f"({config.engine_key(role, 'engine')} sglang). Place the other roles on all of its ranks or none; or "
                f"set {role}.engine: embedded"
            )


def _overlap_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    begins_early = rollout.engine == "sglang" and rollout.sglang.args.get(OVERLAP_OFF, True) is False
    if begins_early and RunShape.of(config).draws_during_syncs:
        yield (
            f"rollout.sglang.args.{OVERLAP_OFF}: got false in a run whose responses may be under way when weights "
            "come: SGLang pauses between two batches that overlap, with one token drawn and not yet taken, which would "
            "be counted to the weights that come. Remove the key, and the server's batches overlap wherever that "
            "cannot happen; or set schedule.in_flight_sync: false and schedule.partial_rollouts: false"
        )


def _uneven_engine(
    role: str, placement: Placement, grids: Mapping[str, Grid], roles: set[str]
) -> tuple[int, ...] | None:
    """The ranks of an engine of `role` that do not all host the same of `roles`, if there is one."""
    grid = grids.get(role)
    for ranks in [grid.replica(dp) for dp in range(grid.dp)] if grid else []:
        if len({frozenset(roles.intersection(placement.hosts(rank))) for rank in ranks}) > 1:
            return ranks
    return None


def _offload_problems(config: Config, placement: Placement) -> Iterator[str]:
    """Weights in flight come whenever the actor has them, also between two generate tasks."""
    if RunShape.of(config).syncs_in_flight and config.rollout.offload is True:
        yield (
            "rollout.offload: got true with weights that arrive in flight, which would find the engine's memory away "
            "from the device. The nearest that works here is rollout.offload: auto, by which an engine alone on its "
            "ranks stays; or schedule.in_flight_sync: false"
        )
    for role in (role for role in served_roles() if role in placement.roles):
        served = config.served(role)
        keeps = served.engine != "sglang" or served.sglang.keep_weights
        if not keeps and _leaves(role, served.offload, placement):
            yield (
                f"{role}.sglang.keep_weights: got false for an engine that may leave its device and come back to "
                f"weights that nobody has renewed; expected true, or {role}.offload: false"
            )


def _leaves(role: str, offload: str | bool, placement: Placement) -> bool:
    """Whether any engine of a role leaves its device between its tasks."""
    if offload != "auto" or role not in placement.roles:
        return offload is True
    others = {other for rank in placement.ranks(role) for other in placement.hosts(rank)} - {role}
    return not others.isdisjoint(device_roles())
