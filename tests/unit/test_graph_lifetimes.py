"""Recorded steps, the pools that they lie in and the communicators that they hold: tests/stand_ins/cuda_graphs.py."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart
from rltrain.offload.offload import Offloader
from rltrain.rollout.embedded import EmbeddedEngine, decoder
from rltrain.rollout.embedded.decoder import CudaGraphs, Recordings
from rltrain.rollout.embedded.engine import keeps_recordings
from rltrain.rollout.engine import SamplingParams
from rltrain.schedule.order import Order
from tests.rollout_models import load_engine, ragged_requests
from tests.stand_ins.cuda_graphs import Graph, GraphDevice, RuleBrokenError, expect_unheld
from tests.unit.schedule_configs import make_config
from tests.unit.test_residency import order_of

GREEDY = SamplingParams(0.0, 1.0, 0, 20, ())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    """Of the test, with one communicator that all recorded steps use."""
    device = GraphDevice(holders=[WeakSet[Graph]()])
    device.install(monkeypatch)
    return device


def generate(engine: EmbeddedEngine) -> list[list[int]]:
    """Often enough for steps to be recorded."""
    for _ in range(2):
        engine.generate(ragged_requests(4), GREEDY)
    return [list(done.tokens) for done in engine.generate(ragged_requests(4), GREEDY)]


def test_what_is_recorded_after_all_was_forgotten_lies_in_a_new_pool(qwen3: Path, device: GraphDevice) -> None:
    engine, _ = load_engine(qwen3, record=CudaGraphs())
    expected = generate(engine)
    for _ in range(2):
        engine.release_cache()
        assert generate(engine) == expected
    assert [bool(graphs) for graphs in device.pools.values()] == [False] * (len(device.pools) - 1) + [True]
    assert len(device.pools) >= 3


@pytest.mark.usefixtures("device")
def test_a_pool_ends_with_the_last_recording_whatever_ends_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_MAX_REPLAYS", 1)
    recordings, total = Recordings(CudaGraphs()), torch.zeros(())
    for name in ("a", "b") * 3:
        recordings.run(name, lambda: total.add_(1))
    assert total == 6


def test_a_closed_engine_holds_no_communicator(qwen3: Path, device: GraphDevice) -> None:
    engine, _ = load_engine(qwen3, record=CudaGraphs())
    generate(engine)
    with pytest.raises(RuleBrokenError, match="recorded graphs hold it"):
        expect_unheld("the communicator", device.holders[0])
    engine.close()
    expect_unheld("the communicator", device.holders[0])


class Released:
    """In the place of Communicators: before every task it destroys the one that is given."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.num_released = 0

    def release(self, position: int) -> None:
        self._release()
        self.num_released += 1

    def restore(self, position: int) -> None:
        pass


def test_communicators_go_after_what_is_recorded_of_them(qwen3: Path, device: GraphDevice) -> None:
    engine, parameters = load_engine(qwen3, record=CudaGraphs())
    order = order_of(2, ("generate", "update"))
    communicators = Released(lambda: expect_unheld("the communicator", device.holders[0]))
    residency = Offloader(
        Order.of(order),
        {"actor": "auto", "rollout": "auto"},
        DeviceMemory(torch.device("cpu")),
        communicators=communicators,  # type: ignore[arg-type]
    )
    ones, actor = torch.ones(3), ("weights", "master_weights", "optimizer", "gradients")
    residency.admit("actor", {name: MemoryPart(lambda: [ones.clone()]) for name in actor})
    cache = MemoryPart(engine.cache_tensors, forget=engine.release_cache)
    residency.admit("rollout", {"weights": MemoryPart(parameters.values), "kv_cache": cache, "base": MemoryPart(tuple)})
    for position, entry in enumerate(order):
        residency.enter(position)
        if entry.name == "generate":
            generate(engine)
            assert len(device.holders[0]) > 0
    assert communicators.num_released == len(order)


@pytest.mark.parametrize(
    "communicators, num_ranks, kept", [("keep", 2, True), ("release", 2, False), ("release", 1, True)]
)
def test_recordings_are_kept_only_with_the_communicators_that_they_hold(
    communicators: str, num_ranks: int, kept: bool
) -> None:
    site = SimpleNamespace(config=make_config(residency={"communicators": communicators}), ranks=range(num_ranks))
    part = SimpleNamespace(memory=SimpleNamespace(keeps_addresses=True))
    assert keeps_recordings(site, part) is kept  # type: ignore[arg-type]
