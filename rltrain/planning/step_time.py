"""Estimates the seconds of every task and of a step, and the waits of each role."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean

from rltrain.planning.hardware import Gpu
from rltrain.planning.memory import cache_bytes, places_along, rank_memories, resident_bytes
from rltrain.planning.planned import Kind, PlannedJob, Workload
from rltrain.planning.sync_time import PlannedSync, least_sync_s
from rltrain.planning.task_time import TrainingTime, generation, judging
from rltrain.runtime.placement import Placement
from rltrain.schedule.iterations import fullest_step, steady_order
from rltrain.schedule.order import WEIGHT_SYNC, Entry
from rltrain.schedule.replay import timetable
from rltrain.tasks.roles import DECLARED, SYNCED, model_tasks


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of a run relative to its estimate."""

    factors: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds over estimated ones, by task."""
    between_s: float = 0.0
    """Seconds of a step beyond its tasks: experience on its way, metrics, waits for later ranks."""


RARE_TASKS = (
    *("decide_to_stop", "stop_if_reached", "checkpoint", "save_hf", "save_best", "save_candidate", "keep_candidate"),
    *("sync_evaluation", "run_evaluation", "keep_evaluated"),
)
"""Tasks that are not in every step. Their seconds are left out."""


@dataclass(frozen=True)
class StepTime:
    """The estimate for one step in the middle of the run.

    `tasks` are seconds by task and role, all chunks of a step together. `moves_s` are the seconds of moving memory, on
    the kind of rank with the most moves.
    """

    tasks: Mapping[tuple[str, tuple[str, ...]], float]
    moves_s: float
    step_s: float
    busy: Mapping[str, float]
    """[role] share of a step in which its ranks work, for this role or another."""
    tokens_per_s: float
    """Prompt and response tokens in training, per second and rank."""


class Clock:
    """Estimates the seconds of a job's tasks.

    With `exact_sync` the weight sync follows its real plan. Planning takes seconds for thousands of ranks.
    """

    def __init__(
        self,
        job: PlannedJob,
        gpu: Gpu,
        workload: Workload,
        calibration: Calibration | None = None,
        *,
        exact_sync: bool = True,
    ) -> None:
        self.job, self.gpu, self.workload = job, gpu, workload
        self._calibration = calibration or Calibration()
        self._exact_sync = exact_sync
        self.sync = PlannedSync(job)
        self._seconds: dict[tuple[str, str], float] = {}

    @cached_property
    def _cache_bytes(self) -> int:
        return cache_bytes(rank_memories(self.job, self.gpu))

    def task(self, name: str, role: str) -> float:
        """Returns the seconds of one entry of the order. If steps have several chunks, it is one chunk."""
        if (name, role) not in self._seconds:
            self._seconds[name, role] = self._task(name, role) * self._factor(name)
        return self._seconds[name, role]

    def step(self) -> StepTime:
        job = self.job
        placement, kinds = _one_rank_of_each_kind(job)
        moves = [self._moves(kind) for kind in kinds]
        steps = _measured_steps(job)
        order = steady_order(job.config, job.placement, more_steps=steps.stop)

        def seconds(entry: Entry, rank: int) -> float:
            roles = [role for role in entry.roles if role in kinds[rank].roles]
            return max(self.task(entry.name, role) for role in roles) + moves[rank].get((entry.name, entry.chunk), 0.0)

        periods = timetable(order, placement, seconds)
        ends = [
            max(periods[entry].end for entry in periods if entry.step == step) for step in (steps[0] - 1, steps[-1])
        ]
        step_s = (ends[1] - ends[0]) / len(steps) + self._calibration.between_s
        inside = [entry for entry in periods if entry.step in steps]
        busy = {
            rank: sum(seconds(entry, rank) for entry in inside if set(entry.roles) & set(kinds[rank].roles))
            for rank in range(len(kinds))
        }
        shares = {
            role: min(1.0, max(busy[rank] for rank in placement.ranks(role)) / len(steps) / step_s)
            for role in placement.roles
            if not DECLARED[role].beside_steps
        }
        tasks: dict[tuple[str, tuple[str, ...]], float] = {}
        for entry in inside:
            longest = max(self.task(entry.name, role) for role in entry.roles)
            tasks[entry.name, entry.roles] = tasks.get((entry.name, entry.roles), 0.0) + longest / len(steps)
        moved = max(
            (sum(of.get((entry.name, entry.chunk), 0.0) for entry in inside) for of in moves), default=0.0
        ) / len(steps)
        tokens = job.samples_per_step * self.workload.sample
        return StepTime(tasks, moved, step_s, shares, tokens / step_s / len(job.placement.hosting))

    def _factor(self, name: str) -> float:
        """Returns the measured factor of a task. A task without one gets the mean of tasks with the same passes."""
        factors = self._calibration.factors
        if name in factors:
            return factors[name]
        computing = model_tasks()
        trains = computing.get(name, (None, None))[1]
        alike = [factor for task, factor in factors.items() if task in computing and computing[task][1] == trains]
        return mean(alike) if alike else 1.0

    def _task(self, name: str, role: str) -> float:
        task_s, share = self.gpu.efficiency.task_s, 1 / self.job.shape.num_chunks
        if name in RARE_TASKS or "evaluation" in name:
            return 0.0
        if name in SYNCED:
            synced = SYNCED[name]
            if synced in self.job.guests:
                return task_s
            sync = self.sync if name == WEIGHT_SYNC else PlannedSync(self.job, synced)
            return sync.seconds(self.gpu) if self._exact_sync else least_sync_s(self.job, synced, self.gpu)
        if name == "generate":
            made = generation(self.job, self.gpu, self.workload, self._cache_bytes)  # all prompts at once
            return share * made * self._crowding("rollout") + task_s
        if name == "verdicts":
            return share * judging(self.job, self.gpu, self.workload) + task_s
        if name == "score":
            samples = self.job.samples_per_step * share / self.job.grids["reward"].dp
            return samples * self.gpu.efficiency.reward_s / self.job.config.reward.num_workers + task_s
        model_role, trains = model_tasks().get(name, (None, False))
        if model_role is None:
            return task_s
        model, crowding = TrainingTime(self.job, model_role, self.gpu, self.workload), self._crowding(model_role)
        if not trains:
            return model.evaluating(share) * crowding + task_s
        if name.startswith("accumulate"):
            return model.accumulating(share) * crowding + task_s
        accumulated = self.job.shape.accumulates_actor if model_role == "actor" else self.job.shape.accumulates_critic
        passes = 0.0 if accumulated else model.accumulating(1.0) * crowding
        return passes + model.optimizer_steps() + task_s

    def _crowding(self, role: str) -> float:
        """Returns the factor on the computing time of a role's ranks."""
        ranks = self.job.grids[role].ranks
        nodes = {rank // self.job.ranks_per_node for rank in ranks}
        return self.gpu.efficiency.crowding if len(ranks) > len(nodes) else 1.0

    def _moves(self, kind: Kind) -> dict[tuple[str, int], float]:
        """Returns the seconds of memory moves to and from the host before each task, by its name and chunk.

        No move is assumed to overlap with the task before.
        """
        if not kind.stages:
            return {}
        sizes = {
            (role, part): size
            for role, stage in kind.stages
            for part, size in resident_bytes(self.job, role, stage).items()
        }
        before: Mapping[tuple[str, str], str] = {}
        seconds: dict[tuple[str, int], float] = {}
        step = fullest_step(self.job.order)
        for position, places in places_along(self.job, kind):
            entry = self.job.order[position]
            moved = sum(
                sizes.get(key, 0)
                for key, place in places.items()
                if before and {before[key], place} == {"host", "device"}
            )
            if entry.step == step:
                seconds[entry.name, entry.chunk] = moved / self.gpu.host
            before = places
        return seconds


def _one_rank_of_each_kind(job: PlannedJob) -> tuple[Placement, list[Kind]]:
    """Returns a placement with one rank per kind, and the kinds. Roles overlap like in the job."""
    distinct: dict[tuple[str, ...], Kind] = {}
    for kind in job.kinds:
        distinct.setdefault(kind.roles, kind)
    kinds = [*distinct.values()]
    ranks = {role: tuple(rank for rank, kind in enumerate(kinds) if role in kind.roles) for role in job.placement.roles}
    return Placement(ranks, job.placement.given, len(kinds)), kinds


def _measured_steps(job: PlannedJob) -> range:
    """Returns steps in the middle of a run. They come after the first unusual steps, and each task is in them as often
    as in the run."""
    first = job.shape.lead + job.config.schedule.sync_every + 1
    return range(first, first + max(2, job.config.schedule.sync_every))
