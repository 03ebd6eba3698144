"""Memory of an engine's server on a device that it shares: it leaves, comes back, and gets its contents anew."""

import pytest
import torch

from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart, RemotePart
from rltrain.offload.offload import Offloader
from rltrain.schedule.order import Order
from tests.unit.test_residency import order_of


class Server:
    """What a server holds, and what was asked of it."""

    def __init__(self) -> None:
        self.holds = {"weights", "kv_cache"}
        self.asked: list[str] = []

    def part(self, name: str, *, restores: bool) -> RemotePart:
        return RemotePart(
            release=lambda: self._release(name),
            resume=lambda: self._resume(name),
            num_bytes=lambda: 100,
            restore=(lambda: self.asked.append(f"restore {name}")) if restores else None,
        )

    def _release(self, name: str) -> None:
        self.holds.remove(name)
        self.asked.append(f"release {name}")

    def _resume(self, name: str) -> None:
        assert name not in self.holds
        self.holds.add(name)
        self.asked.append(f"resume {name}")


def residency_of(server: Server, names: tuple[str, ...]) -> Offloader:
    order = order_of(2, names)
    residency = Offloader(Order.of(order), {"actor": "auto", "rollout": "auto"}, DeviceMemory(torch.device("cpu")))
    parts = ("weights", "master_weights", "optimizer", "gradients")
    tensor = torch.ones(3)
    residency.admit("actor", {name: MemoryPart(lambda: [tensor]) for name in parts})
    parts = {name: server.part(name, restores=name == "weights") for name in server.holds.copy()}
    residency.admit("rollout", {"base": MemoryPart(tuple), **parts})
    return residency


def test_weights_come_back_for_the_sync_and_the_cache_for_generate():
    server = Server()
    residency = residency_of(server, ("weight_sync", "generate", "score", "update"))
    assert server.holds == set(), "it shares the device, so it leaves at once"
    residency.enter(0)
    assert server.holds == {"weights"}, "a sync needs no keys and values"
    residency.enter(1)
    assert server.holds == {"weights", "kv_cache"}
    residency.enter(2)
    assert server.holds == {"weights", "kv_cache"}, "scoring needs nothing of the device"
    residency.enter(3)
    assert server.holds == set()
    assert "restore weights" not in server.asked, "the next sync rewrites them"


def test_weights_that_no_sync_renews_are_restored():
    server = Server()
    residency = residency_of(server, ("weight_sync", "generate", "actor_logprobs", "generate", "update"))
    for position in range(4):
        residency.enter(position)
    assert server.asked.count("restore weights") == 1
    assert server.asked.index("restore weights") > server.asked.index("resume weights")


def test_a_part_of_which_nothing_is_kept_can_only_be_dropped():
    part = Server().part("kv_cache", restores=False)
    with pytest.raises(RuntimeError, match="only be dropped"):
        part.save()
    part.leave(drop=True)
    assert part.device_bytes == part.allocated_bytes == 0
