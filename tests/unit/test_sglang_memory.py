"""The memory of an SGLang server that shares its device, and its prefix cache right after responses."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from rltrain.errors import EngineError
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart
from rltrain.offload.offload import Offloader
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.sglang_engine import SGLangEngine, parts_of_server
from rltrain.schedule.order import Order
from tests.support.sglang_server import FakeServer
from tests.unit.test_memory_plan import order_of
from tests.unit.test_sglang_engine import GREEDY, Rig, requests


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs with weights of version 0."""
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(**options))
        rigs[-1].sync(0)
        return rigs[-1]

    yield make
    for one in rigs:
        one.engine.close()
        assert one.server.broken == [], "a request broke a rule of SGLang"


@pytest.fixture
def colocated(rig: Callable[..., Rig]) -> Rig:
    return rig(pace_s=0.01, max_running_requests=4)


@pytest.fixture
def server(colocated: Rig) -> FakeServer:
    return colocated.server


@pytest.fixture
def engine(colocated: Rig) -> SGLangEngine:
    return colocated.engine


def test_memory_is_released_and_taken_back_by_tag(rig: Callable[..., Rig]) -> None:
    one = rig(max_restarts=5)
    one.engine.release(["kv_cache", "weights"])
    one.engine.resume(["kv_cache", "cuda_graph"])
    one.engine.resume(["weights"])
    one.engine.redeliver()
    memory = [(path, body["tags"]) for path, body in one.server.calls if "memory" in path]
    assert memory == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
        ("/resume_memory_occupation", ["weights"]),
    ]
    assert len(one.engine.generate(requests(2), GREEDY)) == 2
    one.engine.release(["weights"])
    one.server.die()
    one.engine.resume(["weights"])
    assert one.server.num_starts == 2
    assert one.server.calls[-1][0] != "/resume_memory_occupation", "a new server has all of its memory"
    one.server.die()
    one.engine.release(["weights"])
    assert (one.server.num_starts, one.server.calls[-1][0]) == (3, "/release_memory_occupation")


MOVES = {
    "/abort_request": "abort",
    "/flush_cache": "flush",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "resume",
    "/begin_weight_update": "sync",
}


@pytest.mark.parametrize(("leaves", "expected"), [(True, ["resume weights", "sync"]), (False, [])])
def test_a_server_that_kept_its_memory_is_given_nothing_again(
    engine: SGLangEngine, server: FakeServer, leaves: bool, expected: list[str]
) -> None:
    residency, _ = residency_of(engine, ("weight_sync", "generate", "update", "generate"), leaves=leaves)
    residency.enter(0)
    engine.begin_update()
    engine.end_update(1)
    residency.enter(1)
    residency.enter(2)
    moves(server)
    residency.enter(3)
    assert [move for move in moves(server) if move in ("resume weights", "sync")] == expected


def test_adapters_stay_where_they_are_when_the_base_leaves(engine: SGLangEngine) -> None:
    parts = parts_of_server(engine, engine.delivery, lambda: None, leaves=True, has_adapters=True)
    assert parts["weights"].size_bytes == 0 and parts["base"].size_bytes == engine.delivery.num_bytes
    assert [*parts] == ["kv_cache", "base", "weights"]


def test_what_is_kept_for_a_server_counts_as_memory_of_the_host(engine: SGLangEngine) -> None:
    residency, _ = residency_of(engine, ("weight_sync", "generate", "update"))
    on_host = residency.metrics()["memory/host_bytes"]
    engine.delivery.kept_bytes += 7  # type: ignore[misc]
    assert residency.metrics()["memory/host_bytes"] == on_host + 7 > 100


def residency_of(
    engine: SGLangEngine, names: tuple[str, ...], num_steps: int = 2, *, leaves: bool = True
) -> tuple[Offloader, list[Sample]]:
    """Returns the offloader of a rank with actor and rollout, and a list for samples suspended on leaving."""
    suspended: list[Sample] = []

    def leave() -> None:
        suspended.extend(engine.suspend())
        engine.release_cache()

    residency = Offloader(
        Order.of(order_of(num_steps, names)), {"actor": "auto", "rollout": "auto"}, DeviceMemory(torch.device("cpu"))
    )
    tensor = torch.ones(3)
    parts = ("weights", "master_weights", "optimizer", "gradients")
    residency.admit("actor", {name: MemoryPart(lambda: [tensor]) for name in parts})
    of_server = parts_of_server(engine, engine.delivery, leave, leaves=leaves)
    residency.admit("rollout", {"base": MemoryPart(tuple), **of_server})
    return residency, suspended


def moves(server: FakeServer) -> list[str]:
    """Returns the requests to the server since the last call, as words."""
    calls, server.calls = server.calls, []
    known = [(MOVES[path.split("?")[0]], body) for path, body in calls if path.split("?")[0] in MOVES]
    return [f"{word} {'+'.join(body['tags'])}" if "tags" in body else word for word, body in known]


def test_a_step_of_a_colocated_server(engine: SGLangEngine, server: FakeServer) -> None:
    residency, suspended = residency_of(engine, ("weight_sync", "generate", "update"))
    assert moves(server)[-2:] == ["release kv_cache+cuda_graph", "release weights"], (
        "the memory must be free for the next role"
    )
    residency.enter(0)
    engine.begin_update()
    engine.end_update(0)
    assert moves(server)[:2] == ["resume weights", "sync"], "keys and values have no room beside the actor"
    residency.enter(1)
    assert moves(server) == ["resume kv_cache+cuda_graph"]
    engine.submit([Sample(7, (1, 2, 3), seed=0)], SamplingParams(1.0, 1.0, 0, 400, ()))
    engine.step()
    residency.enter(2)
    asked = moves(server)
    assert asked[0] == "abort" and asked[-3:] == ["flush", "release kv_cache+cuda_graph", "release weights"]
    assert [request.id for request in suspended] == [7], "it continues once the engine is back"


HOLDS_S = 0.3
"""Time for which the scheduler counts the last request after its response."""


@pytest.mark.parametrize("num_busy_flushes", [0, 2], ids=["held", "another flush waits"])
def test_a_call_right_after_a_response_waits_until_the_server_is_idle(
    rig: Callable[..., Rig], num_busy_flushes: int
) -> None:
    """SGLang refuses a flush then, and would end itself at a release of memory."""
    one = rig(holds_batch_s=HOLDS_S)

    def respond() -> None:
        assert len(one.engine.generate(requests(2), GREEDY)) == 2
        one.server.num_busy_flushes = num_busy_flushes
        assert not one.server.is_idle

    respond()
    one.engine.release_cache()
    assert one.server.is_idle
    respond()
    one.sync(1)
    respond()
    one.engine.release(["kv_cache", "weights"])
    one.engine.resume(["kv_cache", "weights"])
    one.engine.redeliver()
    assert one.server.num_starts == 1 and len(one.engine.generate(requests(2), GREEDY)) == 2


def test_a_server_that_never_gets_idle_is_replaced(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rltrain.rollout.servers.protocols.FLUSH_S", 0.3)
    one = rig(max_restarts=1)
    one.server.num_busy_flushes = 10**6
    one.engine.release_cache()
    assert (one.server.num_starts, one.engine.num_restarts) == (2, 1)
    said = "the SGLang server is not idle after 0.3 s without requests: .*Another flush_cache is already in progress"
    assert any(re.search(said, message) for message in caplog.messages)
    with pytest.raises(EngineError, match=said):
        one.engine.release_cache()
