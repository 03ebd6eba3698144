"""How much every kind of rank holds at most, during which task, and whether that fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rltrain.estimate.delta import keeping, kept_bytes
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.memory import MIB, cache_on_gpu, host_bytes, resident_bytes, working_bytes
from rltrain.estimate.planned import Kind, PlannedJob
from rltrain.schedule.memory_plan import MemoryPlan, Place, leaving_roles
from rltrain.schedule.steps import evaluated_step, fullest_step
from rltrain.tasks.declaration import Key
from rltrain.tasks.roles import DECLARED, drawing_roles, served_roles

COMMUNICATORS, CONTEXT, SENT_LAST = "communicators", "context", "sent last"


@dataclass(frozen=True)
class TaskMemory:
    """Bytes on the device during a task: parts by "role.part", and what the task needs beside them."""

    task: str
    bytes_of: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_of.values())


@dataclass(frozen=True)
class RankMemory:
    """Of the ranks of one kind."""

    kind: Kind
    ranks: tuple[int, ...]
    parts: Mapping[Key, int]
    tasks: Sequence[TaskMemory]
    host: Mapping[str, int]

    @property
    def peak(self) -> TaskMemory:
        """The task with most; the first of several."""
        return max(self.tasks, key=lambda task: task.total)

    def fits(self, gpu: Gpu) -> bool:
        return self.peak.total <= gpu.usable_bytes


def rank_memories(job: PlannedJob, gpu: Gpu) -> list[RankMemory]:
    """One for each kind of rank with something on the device, in the order of their first ranks."""
    kinds = [(kind, ranks) for kind, ranks in job.kinds.items() if kind.stages]
    return [_memory(job, gpu, kind, ranks, _fixed_bytes(job, gpu, ranks[0])) for kind, ranks in kinds]


def cache_bytes(memories: Sequence[RankMemory], role: str = "rollout") -> int:
    """Keys and values on the rank of a role's engine that has least room for them; 0 without engines."""
    cache = (role, "kv_cache")
    return min((memory.parts[cache] for memory in memories if cache in memory.parts), default=0)


def largest(memories: Sequence[RankMemory]) -> RankMemory:
    """The kind of rank with the highest peak."""
    return max(memories, key=lambda memory: memory.peak.total)


def _memory(job: PlannedJob, gpu: Gpu, kind: Kind, ranks: tuple[int, ...], fixed: Mapping[str, int]) -> RankMemory:
    stages = dict(kind.stages)
    held = {role: resident_bytes(job, role, stage) for role, stage in kind.stages}
    parts = {(role, part): size for role, of_role in held.items() for part, size in of_role.items()}
    step = _of_a_step(job, kind)
    for role in (role for role in drawing_roles() if role in stages):
        cache, draws = (role, "kv_cache"), "run_evaluation" if role == "evaluation" else "generate"
        beside = [_on_device(parts, places) - parts[cache] for task, places in step if task == draws]
        taken = max(beside, default=parts[role, "weights"]) + sum(fixed.values())
        parts[cache] = cache_on_gpu(job, role, gpu, taken)
    rows, on_host = [], set[Key]()
    for task, places in step:
        on_host |= {key for key, place in places.items() if place == "host" and key[0] not in job.guests}
        there = {".".join(key): parts[key] for key, place in places.items() if place == "device" and key in parts}
        rows.append(TaskMemory(task, {**there, **working_bytes(job, task, stages), **fixed}))
    rows = rows or [TaskMemory("start", {**{".".join(key): size for key, size in parts.items()}, **fixed})]
    host = host_bytes(job, stages, frozenset(on_host))
    if keeping(job) == "host":
        host[SENT_LAST] = kept_bytes(job, ranks[0])
    return RankMemory(kind, ranks, parts, rows, host)


def _on_device(parts: Mapping[Key, int], places: Mapping[Key, Place]) -> int:
    return sum(parts.get(key, 0) for key, place in places.items() if place == "device")


def places_along(job: PlannedJob, kind: Kind) -> list[tuple[int, dict[Key, Place]]]:
    """(position, where each part is during it) along the steady order, for a rank of a kind."""
    hosted = kind.device_roles
    guests = [role for role in job.guests if role in hosted]
    sharing = [role for role in job.sharing if role in hosted]
    offload = {role: getattr(job.config, role).offload for role in hosted}
    leaving = leaving_roles(offload, [*guests, *sharing])
    overlays = {(role, "weights"): ("actor", "weights") for role in guests}
    return [*MemoryPlan(job.order, hosted, guests, sharing).places(leaving, overlays)]


def _of_a_step(job: PlannedJob, kind: Kind) -> list[tuple[str, dict[Key, Place]]]:
    """(task, where each part is) of the fullest step; tasks and places that come again are left out."""
    beside_steps = any(DECLARED[role].beside_steps for role in kind.roles)
    step = evaluated_step(job.order) if beside_steps else fullest_step(job.order)
    found: list[tuple[str, dict[Key, Place]]] = []
    for position, places in places_along(job, kind):
        entry = job.order[position]
        if entry.step == step and (entry.name, places) not in found:
            found.append((entry.name, places))
    return found


def _fixed_bytes(job: PlannedJob, gpu: Gpu, rank: int) -> dict[str, int]:
    """The driver's context, of which each SGLang server has one more, communicators, and what was sent last."""
    efficiency = gpu.efficiency
    served = [job.config.served(role) for role in served_roles() if role in job.placement.hosts(rank)]
    num_servers = sum(settings.engine == "sglang" for settings in served)
    return {
        COMMUNICATORS: int(job.num_communicators[rank] * efficiency.communicator_mb * MIB),
        CONTEXT: int((1 + num_servers) * efficiency.context_mb * MIB),
        **({SENT_LAST: kept_bytes(job, rank)} if keeping(job) == "device" else {}),
    }
