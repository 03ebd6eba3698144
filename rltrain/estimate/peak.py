"""How much every kind of rank holds at most, during which task, and whether that fits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rltrain.cluster.rank_lists import group_lists
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.memory import MIB, host_bytes, resident_bytes, working_bytes
from rltrain.estimate.planned import Kind, PlannedJob
from rltrain.residency.memory_plan import MemoryPlan, Place, leaving_roles
from rltrain.schedule.steady import fullest_step
from rltrain.tasks.declaration import Key

COMMUNICATORS, CONTEXT = "communicators", "context"


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
    found = [(kind, ranks) for kind, ranks in job.kinds.items() if kind.stages]
    fixed = _fixed_bytes(job, gpu, {ranks[0] for _, ranks in found})
    return [_memory(job, gpu, kind, ranks, fixed[ranks[0]]) for kind, ranks in found]


def largest(memories: Sequence[RankMemory]) -> RankMemory:
    """The kind of rank with the highest peak."""
    return max(memories, key=lambda memory: memory.peak.total)


def _memory(job: PlannedJob, gpu: Gpu, kind: Kind, ranks: tuple[int, ...], fixed: Mapping[str, int]) -> RankMemory:
    stages = dict(kind.stages)
    parts = {
        (role, part): size
        for role, stage in kind.stages
        for part, size in resident_bytes(job, role, stage, gpu).items()
    }
    rows, on_host = [], set[Key]()
    for task, places in _of_a_step(job, kind):
        on_host |= {key for key, place in places.items() if place == "host" and key[0] not in job.guests}
        there = {".".join(key): parts[key] for key, place in places.items() if place == "device" and key in parts}
        rows.append(TaskMemory(task, {**there, **working_bytes(job, task, stages), **fixed}))
    rows = rows or [TaskMemory("start", {**{".".join(key): size for key, size in parts.items()}, **fixed})]
    return RankMemory(kind, ranks, parts, rows, host_bytes(job, stages, frozenset(on_host)))


def places_along(job: PlannedJob, kind: Kind) -> list[tuple[int, dict[Key, Place]]]:
    """(position, where each part is during it) along the steady order, for a rank of a kind."""
    hosted = kind.device_roles
    guests = [role for role in job.guests if role in hosted]
    leaving = leaving_roles({role: getattr(job.config, role).offload for role in hosted}, guests)
    overlays = {(role, "weights"): ("actor", "weights") for role in guests}
    return [*MemoryPlan(job.order, hosted).places(leaving, overlays)]


def _of_a_step(job: PlannedJob, kind: Kind) -> list[tuple[str, dict[Key, Place]]]:
    """(task, where each part is) of the fullest step; tasks and places that come again are left out."""
    step = fullest_step(job.order)
    found: list[tuple[str, dict[Key, Place]]] = []
    for position, places in places_along(job, kind):
        entry = job.order[position]
        if entry.step == step and (entry.name, places) not in found:
            found.append((entry.name, places))
    return found


def _fixed_bytes(job: PlannedJob, gpu: Gpu, ranks: set[int]) -> dict[int, dict[str, int]]:
    """By rank: the driver's context, of which an SGLang server has one more, and communicators."""
    efficiency = gpu.efficiency
    count = Counter(rank for group in _communicators(job) for rank in group if rank in ranks)
    servers = set(job.placement.ranks("rollout")) if job.config.rollout.engine == "sglang" else set()
    return {
        rank: {
            COMMUNICATORS: int(count[rank] * efficiency.communicator_mb * MIB),
            CONTEXT: int((1 + (rank in servers)) * efficiency.context_mb * MIB),
        }
        for rank in ranks
    }


def _communicators(job: PlannedJob) -> list[tuple[int, ...]]:
    return [group for group in group_lists(job.grids) if len(group) > 1]
