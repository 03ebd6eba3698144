"""The ranks of test_nccl_rules: reshards, pipelines and reopened groups under NCCL's rules, and breaches of the
rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rltrain.reshard import execute
from rltrain.reshard.execute import Resharding
from rltrain.runtime.grid import Grid
from rltrain.runtime.machine import end_job_by_threads
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups, plain_group
from tests.distributed import cases_communicators, cases_delta, cases_training
from tests.distributed.cases_reshard import ARCHITECTURES, PLACEMENTS, Settings, pairs_of, reshard_twice, union_of
from tests.support import nccl_rules
from tests.support.cuda_graphs import RuleBrokenError
from tests.support.trained_models import load_experience, of_replica

WORLD = (0, 1, 2, 3)
PIPELINES = {"pp4": Grid(WORLD, pp=4), "pp2_cp2": Grid(WORLD, pp=2, cp=2), "pp2_vpp2": Grid((1, 2), pp=2, vpp=2)}
KEPT = "pp4"
"""The pipeline with permanent groups. The groups of the others are reopened between updates."""
NUM_STEPS, NUM_SAMPLES, NUM_MICRO_BATCH_TOKENS = 2, 6, 60
DELTA_PLACEMENTS = ("disaggregated tp2 -> tp1 dp2", "one rank feeds all")
RANK_1_HAS_NOTHING_TO_SEND = Grid((0, 1, 2)), Grid((0, 3))
"""With two ranks to a node, rank 2 feeds rank 3."""


def all_cases(checkpoint: str) -> dict[str, Any]:
    """Returns this rank's checks by name."""
    nccl_rules.install()
    results: dict[str, Any] = {}
    for kept in ("kept", "reopened"):
        results[f"reshard/{kept}"] = reshards(reopened=kept == "reopened")
    results["delta"] = deltas()
    results["communicators"] = cases_communicators.run(stop_after=None, backend="nccl")
    for name, grid in PIPELINES.items():
        results[f"{name}/gloo"] = losses(checkpoint, name, grid, "gloo", reopened=False)
        results[f"{name}/nccl"] = losses(checkpoint, name, grid, "nccl", reopened=name != KEPT)
    return results


def reshards(*, reopened: bool) -> dict[str, Any]:
    """Runs every other placement in many rounds. With `reopened`, runs the remaining ones, each with a reopened
    group."""
    pairs = pairs_of("one bucket")[reopened::2]
    cases = [(ARCHITECTURES[name], PLACEMENTS[placement], Settings(2048)) for placement, name in pairs]
    cases.append((ARCHITECTURES["llama"], RANK_1_HAS_NOTHING_TO_SEND, Settings(2048, ranks_per_node=2)))
    unions = [tuple(sorted({*actor.ranks, *rollout.ranks})) for _, (actor, rollout), _ in cases]
    lists = sorted({*unions})
    groups = ProcessGroups(lists, backend="nccl", timeout_s=60, reopenable=lists if reopened else ())
    run, found = Resharding.run, []
    for union, (architecture, places, settings) in zip(unions, cases, strict=True):
        if dist.get_rank() not in union:
            continue

        def run_anew(self: Resharding, *tensors: Any, union: tuple[int, ...] = union) -> Any:
            if reopened:
                following = groups[union].generation + 1  # type: ignore[attr-defined]
                groups.close([union])
                groups.open({union: following})
            return run(self, *tensors)

        with mock.patch.object(execute, "LARGE_BYTES", None), mock.patch.object(Resharding, "run", run_anew):
            found.append(reshard_twice(architecture, *places, groups[union], groups.cpu[union], settings))
    return {
        "wrong": [name for case in found for name in case["wrong"]],
        "compared": sum(case["compared"] for case in found),
        "num_rounds": max(case["num_rounds"] for case in found),
        "idle": sum(not case["sent_to"] and not case["compared"] for case in found),
    }


def deltas() -> list[dict[str, Any]]:
    """Runs delta reshards. Both ends must know the lengths of their messages."""
    cases = [(placement, name) for placement, name in pairs_of("one bucket") if placement in DELTA_PLACEMENTS]
    groups = ProcessGroups(sorted({union_of(placement) for placement, _ in cases}), backend="nccl", timeout_s=60)
    found = []
    for placement, name in cases:
        if dist.get_rank() in (union := union_of(placement)):
            made = cases_delta.runs(placement, name, groups[union], Settings(4096), groups.cpu[union])
            found += [run.described() for run in made]
    return found


def losses(checkpoint: str, name: str, grid: Grid, backend: str, *, reopened: bool) -> list[float]:
    """Returns the losses of some updates of one model. With `reopened` its groups are reopened before each."""
    lists = group_lists({"actor": grid})
    groups = ProcessGroups(lists, backend=backend, timeout_s=60, reopenable=lists if reopened else ())
    if dist.get_rank() not in grid.ranks:
        return []
    path, found = Path(checkpoint), []
    with mock.patch.dict(cases_training.GRIDS, {name: grid}):
        model = cases_training.load_model(path, name, groups)
        trainable = cases_training.make_trainable(model, max_tokens=NUM_MICRO_BATCH_TOKENS)
        experience = of_replica(load_experience(path).select(torch.arange(NUM_SAMPLES)), grid)
        for step in range(NUM_STEPS):
            if reopened:
                groups.close(groups.reopenable)
                groups.open(dict.fromkeys(groups.reopenable, step + 1))
            found.append(trainable.train_batch(experience, cases_training.negative_log_likelihood)["loss"])
    return found


def broken_rules() -> dict[str, str]:
    """Returns each rank's error for calls that would make NCCL hang or move wrong bytes."""
    nccl_rules.install(limit_s=2.0)
    breaches = (
        a_message_over_a_subclass,
        both_send_first,
        a_first_call_of_some,
        sizes_that_differ,
        collectives_out_of_order,
        a_graph_that_is_left,
        a_communicator_that_some_destroy,
    )
    failed: list[BaseException] = []
    end_job_by_threads(lambda _, error: failed.append(error))
    told = {}
    for breach in breaches:
        dist.barrier()
        told[breach.__name__] = _told(breach) or "; ".join(map(str, failed))
        failed.clear()
    return told


def _told(breach: Callable[[], None]) -> str:
    try:
        breach()
    except (RuleBrokenError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _exchange(group: dist.ProcessGroup, sent: int = 4, received: int = 4) -> None:
    """Sends to the other rank and receives from it in one batch."""
    peer = WORLD[1 - dist.get_rank()]
    operations = [
        dist.P2POp(dist.isend, torch.zeros(sent), peer, group),
        dist.P2POp(dist.irecv, torch.zeros(received), peer, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _group_of(ranks: tuple[int, ...], *, reopenable: bool = False) -> dist.ProcessGroup | None:
    groups = ProcessGroups([ranks], backend="nccl", timeout_s=60, reopenable=[ranks] if reopenable else ())
    return groups[ranks] if dist.get_rank() in ranks else None


def a_message_over_a_subclass() -> None:
    group = _group_of((0, 1), reopenable=True)
    if group is not None:
        _exchange(plain_group(group))
        _exchange(group)


def both_send_first() -> None:
    group = _group_of((0, 1))
    if group is not None:
        peer = 1 - dist.get_rank()
        works = [dist.isend(torch.zeros(4), peer, group), dist.irecv(torch.zeros(4), peer, group)]
        for work in works:
            assert work is not None
            work.wait()


def a_first_call_of_some() -> None:
    group = _group_of(WORLD)
    if dist.get_rank() in (0, 1):
        assert group is not None
        _exchange(group)


def sizes_that_differ() -> None:
    group = _group_of((0, 1))
    if group is not None:
        _exchange(group, sent=4, received=8)


def collectives_out_of_order() -> None:
    group = _group_of((0, 1))
    if group is not None:
        calls = [lambda: dist.all_reduce(torch.zeros(4), group=group), lambda: dist.barrier(group=group)]
        for call in calls if dist.get_rank() else reversed(calls):
            call()


def a_graph_that_is_left() -> None:
    groups = ProcessGroups([(0, 1)], backend="nccl", timeout_s=60, reopenable=[(0, 1)])
    if dist.get_rank() in (0, 1):
        graph = mock.Mock()
        nccl_rules.COMMUNICATORS[plain_group(groups[0, 1])].holders.add(graph)
        groups.close([(0, 1)])
        groups.open({(0, 1): 1})


def a_communicator_that_some_destroy() -> None:
    group = _group_of((0, 1))
    if group is not None:
        dist.all_reduce(torch.zeros(4), group=group)
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)


def released_one_after_the_other() -> list[float]:
    """Rank 1 closes and reopens a communicator after rank 0 has closed it. Returns sums over the communicator."""
    nccl_rules.install(limit_s=5.0)
    groups = ProcessGroups([(0, 1)], backend="nccl", timeout_s=60, reopenable=[(0, 1)])
    sums, token = [], torch.zeros(1)
    for generation in range(3):
        groups.open({(0, 1): generation})
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total, group=groups[0, 1])
        sums.append(float(total))
        if dist.get_rank() == 1:
            dist.recv(token, 0)
        groups.close([(0, 1)])
        if dist.get_rank() == 0:
            dist.send(token, 1)
    return sums
