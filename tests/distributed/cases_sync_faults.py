"""Failing weight syncs on real ranks: the error of each rank, its delay, and the weights that its engine serves
later."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import Checks, Rollout, WeightSync
from rltrain.errors import SyncError
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.execute import Resharding
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.wires import GlooWire, SharedWire, Wire
from rltrain.roles.weight_sync import WeightSyncTask
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.sample import Sample
from rltrain.runtime.grid import Grid
from rltrain.runtime.heartbeat import TaskClock
from rltrain.runtime.placement import group_lists
from rltrain.runtime.process_groups import ProcessGroups
from tests.distributed.cases_reshard import Settings, resharding_of
from tests.support.model_shards import tiny_architecture

NUM_RANKS = 4
CPU = torch.device("cpu")
GRIDS = {"actor": Grid((0, 1), tp=2), "rollout": Grid((2, 3))}
UNION = (0, 1, 2, 3)
ARCHITECTURE = tiny_architecture("qwen3", vocab_size=4096, hidden_size=128)  # several buckets of the smallest size
VICTIM = 1


class Rank:
    """One rank of a job whose only task is the weight sync."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.number = dist.get_rank()
        self.groups = ProcessGroups(group_lists(GRIDS), backend="gloo", timeout_s=timeout_s)
        source = megatron_layout(ARCHITECTURE, GRIDS["actor"])
        destination = engine_layout(ARCHITECTURE, GRIDS["rollout"])
        job = SimpleNamespace(
            config=SimpleNamespace(
                model=SimpleNamespace(dtype="float32", lora=None),
                weight_sync=WeightSync(bucket_mb=1),
                checks=Checks(),
                served=lambda role: Rollout(),
                keeps_adapters_apart=lambda role: False,
                freezes_tower=False,
                makes_served_weights=False,
                synced_delta=None,
            ),
            world=SimpleNamespace(rank=self.number, ranks_per_node=NUM_RANKS, device=CPU),
            heartbeat=SimpleNamespace(task_clock=TaskClock()),
            grids=GRIDS,
            groups=self.groups,
            architecture=ARCHITECTURE,
            training_layout=lambda role: source,
        )
        actor = rollout = None
        self.parameters = self._allocate(source)
        for name, tensor in self.parameters.items():
            tensor.fill_(len(name) / 1000)
        if self.number in GRIDS["actor"].ranks:
            actor = SimpleNamespace(model=SimpleNamespace(parameters=self.parameters, served=self.parameters))
        self.destination = self._allocate(destination)
        if self.number in GRIDS["rollout"].ranks:
            rollout = SimpleNamespace(parameters=self.destination, engine=self._engine(), parts={"base": None})
        self.engine = rollout and rollout.engine
        with mock.patch("rltrain.roles.weight_sync.TRANSPORT_TIMEOUT_S", timeout_s):  # less than a watchdog
            self.role = WeightSyncTask(job, actor, rollout)  # type: ignore[arg-type]

    def attempt(self, step: int) -> dict[str, Any]:
        """Runs a weight sync and returns its outcome."""
        before = {name: tensor.clone() for name, tensor in self.destination.items()}
        found = failure(lambda: self.role(step, 0))
        if self.engine:
            found["policy_version"] = self.engine.policy_version
            found["generate"] = failure(self._generate)["error"]
        found["num_parameters"] = len(before)
        found["num_written"] = sum(not torch.equal(before[name], tensor) for name, tensor in self.destination.items())
        return found

    def _allocate(self, layout: Layout) -> dict[str, Tensor]:
        return allocate_parameters(layout, self.number) if self.number in layout.ranks else {}

    def _engine(self) -> EmbeddedEngine:
        limits = {"max_running_requests": 1, "max_context_tokens": 8}
        return EmbeddedEngine(ARCHITECTURE, self.destination, tp_group=None, dtype=torch.float32, **limits)

    def _generate(self) -> None:
        greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, max_response_tokens=2, stop_token_ids=())
        self.engine.generate([Sample(id=0, prompt=(1, 2), seed=0)], greedy)


def failure(action: Callable[[], Any]) -> dict[str, Any]:
    """Returns the message of the SyncError raised by `action` ("" without one), and the seconds until then."""
    start, message = time.perf_counter(), ""
    try:
        action()
    except SyncError as error:
        message = str(error)
    return {"error": message, "seconds": time.perf_counter() - start}


def killed_in_shared_memory() -> None:
    _killed(SharedWire)


def killed_over_gloo() -> None:
    with mock.patch("rltrain.reshard.native.available", lambda: False):
        _killed(GlooWire)


def _killed(wire: type[Wire]) -> None:
    """Runs a complete sync. In the next one a rank ends silently between two rounds.

    Every rank ends inside. So each leaves its result in the place read by run_distributed.
    """
    rank = Rank()
    results = {"complete": rank.attempt(step=3)}
    for tensor in rank.parameters.values():
        tensor.add_(1)
    if rank.number == VICTIM:
        _before_third_round(wire, lambda: leave({"complete": results["complete"]}))
    results["broken"] = rank.attempt(step=4)
    leave(results)


def abandoned() -> dict[str, Any]:
    """Runs a sync that a rank leaves between two rounds without ending."""

    def leave_sync() -> None:
        raise SyncError("it went to do something else")

    rank = Rank(timeout_s=3)
    if rank.number == VICTIM:
        _before_third_round(SharedWire, leave_sync)
    return rank.attempt(step=3)


def _before_third_round(wire: type[Wire], action: Callable[[], None]) -> None:
    start = wire.start

    def start_or_not(self: Wire, number: int, packed: Any) -> None:
        if number == 2:
            action()
        start(self, number, packed)

    mock.patch.object(wire, "start", start_or_not).start()


def leave(results: dict[str, Any]) -> None:
    """Ends this process at once with status 0. After a failure torchrun would end the others."""
    folder = sys.argv[3]
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    os._exit(0)


def disagreements() -> dict[str, Any]:
    """Runs syncs of ranks that disagree. No rank ends."""
    rank = Rank()
    return {
        "complete": rank.attempt(step=3),
        "shape": _with_changed_tensor(rank, lambda tensor: tensor[:-1]),
        "dtype": _with_changed_tensor(rank, lambda tensor: tensor.bfloat16()),
        "absent": _with_changed_tensor(rank, None),
        "complete again": rank.attempt(step=5),
        "plans": failure(lambda: _resharding(rank, plan_differs=rank.number == 2)),
        "buckets": failure(lambda: _resharding(rank, bucket_bytes=2**20 + 2**10 * (rank.number == 2))),
        "tiny buckets": failure(lambda: _resharding(rank, bucket_bytes=16)),
        "missing rank": _without_a_rank(),
    }


def _with_changed_tensor(rank: Rank, change: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
    """Runs a sync in which the victim's tensor differs from the layout."""
    name = "embedding.word_embeddings.weight"
    original = rank.parameters.pop(name, None)
    if original is not None and (rank.number != VICTIM or change is not None):
        rank.parameters[name] = change(original) if change and rank.number == VICTIM else original
    found = rank.attempt(step=4)
    if original is not None:
        rank.parameters[name] = original
    return found


def _resharding(rank: Rank, *, bucket_bytes: int = 2**20, plan_differs: bool = False) -> Resharding:
    """Prepares a reshard. With `plan_differs` this rank expects tied embeddings, so no weights for the head."""
    architecture = replace(ARCHITECTURE, tied_embeddings=True) if plan_differs else ARCHITECTURE
    source = megatron_layout(architecture, GRIDS["actor"])
    destination = engine_layout(architecture, GRIDS["rollout"])
    groups = rank.groups[UNION], rank.groups.cpu[UNION]
    return resharding_of(source, destination, groups[0], Settings(bucket_bytes), cpu_group=groups[1])


def _without_a_rank() -> dict[str, Any]:
    """Runs a sync without one rank. It must be the last case, because it leaves the groups unusable."""
    rank = Rank(timeout_s=3)
    return {"error": "", "seconds": 0.0} if rank.number == NUM_RANKS - 1 else rank.attempt(step=6)
