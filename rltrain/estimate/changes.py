"""Which changes of a config would save most memory, each estimated by the same model as the config itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rltrain.config.schema import Config, Parallel
from rltrain.errors import UserError
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.peak import RankMemory, largest, rank_memories
from rltrain.estimate.planned import PlannedJob, plan_job
from rltrain.tasks.roles import model_roles, trained_roles

MOST = 3
CHUNK_TOKENS = 2048
"""Whose logits may exist at a time: enough for a product at full speed."""


@dataclass(frozen=True)
class Change:
    """What to write, in the config's terms, and the highest peak of any rank then."""

    text: str
    memory: RankMemory


def best_changes(job: PlannedJob, gpu: Gpu, is_legal: Callable[[PlannedJob], bool]) -> list[Change]:
    """At most three, lowest peak first; only those that lower the highest peak."""
    found, before = [], largest(rank_memories(job, gpu)).peak.total
    for text, config in _changed(job.config, gpu.memory_gb):
        try:
            changed = plan_job(config, job.placement, job.architectures, job.ranks_per_node)
        except (UserError, ValueError):
            continue
        if is_legal(changed):
            memory = largest(rank_memories(changed, gpu))
            if memory.peak.total < before:
                found.append(Change(text, memory))
    return sorted(found, key=lambda change: change.memory.peak.total)[:MOST]


def with_keys(config: Config, **values: object) -> Config:
    """`config` with other values for dotted keys, their dots written as two underscores."""
    for key, value in values.items():
        config = _replaced(config, key.split("__"), value)
    return config


def _replaced(section: Config, path: Sequence[str], value: object) -> Config:
    first, *rest = path
    inner = _replaced(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: inner})


def _changed(config: Config, gpu_memory_gb: float) -> Iterator[tuple[str, Config]]:
    """(what to write, the config with it)."""
    yield "model.recompute: full", with_keys(config, model__recompute="full")
    if config.model.recomputed.granularity == "full":
        yield "model.activation_offload: true", with_keys(config, model__activation_offload=True)
    yield f"model.logits_chunk_tokens: {CHUNK_TOKENS}", with_keys(config, model__logits_chunk_tokens=CHUNK_TOKENS)
    for role in model_roles():
        tokens = getattr(config, role).micro_batch_tokens
        for fewer in (tokens // 2, tokens // 4):
            yield f"{role}.micro_batch_tokens: {fewer}", with_keys(config, **{f"{role}__micro_batch_tokens": fewer})
    for role in (*trained_roles(), "rollout"):
        if getattr(config, role).parallel is not None:
            yield from _more_parallel(config, role)
    for role in trained_roles():
        yield f"{role}.distributed_optimizer: true", with_keys(config, **{f"{role}__distributed_optimizer": True})
        in_bf16 = {f"{role}__optimizer__moments_dtype": "bfloat16"}
        yield f"{role}.optimizer.moments_dtype: bfloat16", with_keys(config, **in_bf16)
        if getattr(config, role).optimizer.name == "adamw":
            on_host = {f"{role}__optimizer__cpu_offload": True}
            yield f"{role}.optimizer.cpu_offload: true", with_keys(config, **on_host)
    for role in (*model_roles(), "rollout"):
        yield f"{role}.offload: true", with_keys(config, **{f"{role}__offload": True})
    for role in ("rollout", "evaluation") if config.evaluates_apart else ("rollout",):
        yield from _smaller_engines(config, role, round(gpu_memory_gb / 4, 1))


def _smaller_engines(config: Config, role: str, kv_cache_gb: float) -> Iterator[tuple[str, Config]]:
    engines = config.served(role)
    if engines.engine == "embedded":
        yield f"{role}.kv_cache_gb: {kv_cache_gb}", with_keys(config, **{f"{role}__kv_cache_gb": kv_cache_gb})
    for fewer in (engines.max_running_requests // 2, engines.max_running_requests // 4):
        changes = {f"{role}__max_running_requests": max(fewer, 1)}
        yield f"{role}.max_running_requests: {fewer}", with_keys(config, **changes)


def _more_parallel(config: Config, role: str) -> Iterator[tuple[str, Config]]:
    parallel: Parallel = getattr(config, role).parallel
    for name in ("tp", "pp", "cp", "ep"):
        for factor in (2, 4, 8) if name == "ep" else (2, 4):
            if name == "tp" or role != "rollout":
                size = getattr(parallel, name) * factor
                changes: dict[str, object] = {f"{role}__parallel__{name}": size}
                yield f"{role}.parallel.{name}: {size}", with_keys(config, **changes)
    if parallel.tp > 1 and role != "rollout" and not parallel.sequence_parallel:
        changes = {f"{role}__parallel__sequence_parallel": True}
        yield f"{role}.parallel.sequence_parallel: true", with_keys(config, **changes)
