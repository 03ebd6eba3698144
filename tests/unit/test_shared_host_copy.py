"""The copy that servers are given their weights from again: one for the engines of a node."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rltrain.errors import EngineLost
from rltrain.offload import host_memory
from rltrain.offload.host_memory import NodeCopy
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.loading_server import LoadingServer, model_of
from tests.model_shards import tiny_architecture
from tests.unit.shared_store import on_ranks, open_store
from tests.unit.test_sglang_delivery import assert_holds, deliver, weights

CPU = torch.device("cpu")
LAYOUT = engine_layout(tiny_architecture("qwen2"), Grid((0, 1, 2, 3)))
"""Of four engines with one rank each; two to a node."""
PARTS = split(LAYOUT, 3000)
FIRST_CALLS = 3


class Engine:
    """One of the engines, as its rank has it."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        job_store = JobStore(World(rank, 4, rank % 2, 2, CPU, store, timeout_s=10))
        self.rank, self.server = rank, LoadingServer(model_of(LAYOUT, rank))
        shared = NodeCopy.among(job_store, "the engines' weights", LAYOUT.ranks, LAYOUT.parts)
        call = lambda path, body: self.server.call(path, body)  # noqa: E731 - the server is another one after a restart
        self.delivery = Delivery(PARTS, rank, device=CPU, keep=True, group=None, call=call, shared=shared)

    def start_anew(self) -> None:
        self.server = LoadingServer(model_of(LAYOUT, self.rank))
        self.delivery.check_layout()
        self.delivery.redeliver()


def updates(rank: int, store: dist.Store, others_are_done: threading.Event, meeting: threading.Barrier) -> Any:
    """Two updates; in the second one every server is lost, and those of ranks that keep nothing are back first."""
    engine = Engine(rank, store)
    deliver(engine.delivery, weights(1), 1)
    meeting.wait(10)
    engine.server.calls, engine.server.dies_at = [], FIRST_CALLS
    writes = rank % 2 == 0
    if writes:
        others_are_done.wait(0.3)  # whoever reads before this one has written would find version 1
    with pytest.raises(EngineLost, match="connection reset"):
        deliver(engine.delivery, weights(2), 2)
    engine.start_anew()
    others_are_done.set()
    assert_holds(engine.server.models[0], weights(2))
    engine.start_anew()
    assert_holds(engine.server.models[0], weights(2))
    found = engine.delivery.kept_bytes
    meeting.wait(10)
    engine.delivery.close()
    return found


@pytest.mark.parametrize("reachable", [True, False])
def test_engines_of_a_node_keep_one_copy_which_serves_them_all(
    reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reachable:
        machines = iter(f"machine {number}" for number in range(99))
        monkeypatch.setattr(host_memory, "this_machine", lambda: next(machines))
    done, meeting = threading.Event(), threading.Barrier(4)
    with open_store() as store:
        kept = on_ranks(store, lambda rank, own: updates(rank, own, done, meeting), 4)
    assert kept[0] > 0 and kept == [kept[0], 0 if reachable else kept[0]] * 2


def test_what_is_forgotten_of_earlier_updates_leaves_one_key() -> None:
    def body(rank: int, store: dist.Store) -> int:
        engine = Engine(rank, store)
        before = store.num_keys()
        for version in range(3):
            deliver(engine.delivery, weights(version), version)
        engine.delivery.close()
        return store.num_keys() - before

    with open_store() as store:
        [grown] = on_ranks(store, body, 1)
    assert grown == 1
