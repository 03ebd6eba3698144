"""The ranks of test_communicators: overlapping roles release and reopen their groups at different times."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rltrain.offload.offload import CommunicatorPlan, Communicators
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, RankList, group_lists, lists_of_task
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.schedule.order import Order

WORLD_SIZE = 4
GRIDS = {
    "actor": Grid((0, 1, 2, 3), tp=2),
    "critic": Grid((0, 1, 2), pp=3),
    "reference": Grid((1, 2, 3)),
    "rollout": Grid((0, 2, 3)),
    "reward": Grid((1,)),
}
ROLES_OF = {
    "weight_sync": ("actor", "rollout"),
    "generate": ("rollout",),
    "score": ("reward",),
    "reference_logprobs": ("reference",),
    "values": ("critic",),
    "advantages": ("actor",),
    "update_critic": ("critic",),
    "update": ("actor",),
    "save_hf": ("actor",),
}
NUM_STEPS = 4
STOP_AFTER = 20
"""A position in the middle of a step."""


@dataclass(frozen=True)
class Entry:
    name: str
    step: int
    kind: str = "task"

    @property
    def roles(self) -> tuple[str, ...]:
        return ROLES_OF[self.name]

    @property
    def final(self) -> bool:
        return self.name == "save_hf"


ORDER = [Entry(name, step) for step in range(NUM_STEPS) for name in ROLES_OF if name != "save_hf"]
ORDER.append(Entry("save_hf", NUM_STEPS))


def run_all_tasks() -> dict[str, Any]:
    """Returns the numbers of right reductions, wrong reductions and reopened groups, for a whole and for a stopped
    run."""
    return {"whole": run(stop_after=None), "stopped": run(stop_after=STOP_AFTER)}


def run(stop_after: int | None, backend: str = "gloo") -> dict[str, int]:
    rank = dist.get_rank()
    lists = group_lists(GRIDS)
    always = {tuple(range(WORLD_SIZE))}
    released = [ranks for ranks in lists if ranks not in always]
    groups = ProcessGroups(lists, backend=backend, timeout_s=30, reopenable=released)
    placement = Placement({role: grid.ranks for role, grid in GRIDS.items()}, {}, WORLD_SIZE)
    communicators = Communicators(CommunicatorPlan(Order.of(ORDER), placement, GRIDS, rank, lists=released), groups)
    generations: set[tuple[RankList, int]] = set()
    result = {"right": 0, "wrong": 0}
    for position, entry in enumerate(ORDER):
        skipped = stop_after is not None and position > stop_after and not entry.final
        if skipped or not any(rank in GRIDS[role].ranks for role in entry.roles):
            continue
        time.sleep(random.Random(rank * 1000 + position).random() * 0.02)
        communicators.release(position)
        communicators.restore(position)
        for ranks in sorted(ranks for ranks in lists_of_task(entry.roles, GRIDS) if rank in ranks):
            total = torch.tensor(rank)
            dist.all_reduce(total, group=groups[ranks])
            result["right" if int(total) == sum(ranks) else "wrong"] += 1
            if ranks not in always:
                generations.add((ranks, groups[ranks].generation))  # type: ignore[attr-defined]
    return {**result, "generations": len(generations)}


def use_one_group() -> list[Any]:
    """Returns the answers of a group opened three times, and its message after closing."""
    rank, ranks = dist.get_rank(), (0, 2)
    groups = ProcessGroups([ranks, (0, 1, 2)], backend="gloo", timeout_s=30, reopenable=[ranks])
    if rank not in ranks:
        return []
    group = groups[ranks]
    answers: list[Any] = []
    for generation in range(3):
        groups.open({ranks: generation})
        answers.append(_answers(group, rank, ranks))
        groups.close([ranks])
        groups.close([ranks])
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        answers.append(str(error))
    return answers


def release_at_once() -> int:
    """Opens a group of all ranks many times. Each rank closes it at once. Returns the number of times."""
    ranks = tuple(range(WORLD_SIZE))
    groups = ProcessGroups([ranks], backend="gloo", timeout_s=30, reopenable=[ranks])
    num_generations = 30
    for generation in range(1, num_generations + 1):
        groups.open({ranks: generation})
        groups.close([ranks])
    return num_generations


def _answers(group: dist.ProcessGroup, rank: int, ranks: RankList) -> list[Any]:
    """Makes every kind of call used by models and schedules."""
    peer = ranks[1 - ranks.index(rank)]
    gathered, scattered, received = torch.zeros(2), torch.zeros(1), torch.zeros(1)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
    dist.reduce_scatter_tensor(scattered, torch.tensor([1.0, 2.0]), group=group)
    from_last = torch.tensor([float(rank)])
    dist.broadcast(from_last, group=group, group_src=1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), peer, group),
        dist.P2POp(dist.irecv, received, peer, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.monitored_barrier(group=group)
    numbers = [*gathered.tolist(), float(scattered), float(from_last), float(received)]
    return [numbers, dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)]
