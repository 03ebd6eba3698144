"""An SGLang server that shares its device with training: what it gives back when, and what it is given again."""

from collections.abc import Iterator

import pytest
import torch

from rltrain.config.schema import SGLang
from rltrain.offload.device_memory import DeviceMemory
from rltrain.offload.memory_parts import MemoryPart
from rltrain.offload.offload import Offloader
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Client
from rltrain.rollout.servers.sglang_engine import SGLangEngine, parts_of_server
from rltrain.schedule.order import Order
from tests.unit.fake_sglang import FakeDelivery, FakeServer
from tests.unit.test_residency import order_of

MOVES = {
    "/abort_request": "abort",
    "/flush_cache": "flush",
    "/release_memory_occupation": "release",
    "/resume_memory_occupation": "resume",
    "/begin_weight_update": "sync",
}


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(pace_s=0.01)


@pytest.fixture
def engine(server: FakeServer) -> Iterator[SGLangEngine]:
    client = Client(limit_s=5.0)
    engine = SGLangEngine(
        server,
        client,
        FakeDelivery(client),
        group=None,
        max_running_requests=4,
        max_context_tokens=500,
        settings=SGLang(),
        advance=lambda: None,
    )
    engine.start()
    yield engine
    engine.close()
    assert server.broken == []


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
    """(of a rank that hosts actor and rollout, what the engine had running when it left)."""
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
    """What was asked of the server since the last look, in words."""
    calls, server.calls = server.calls, []
    known = [(MOVES[path.split("?")[0]], body) for path, body in calls if path.split("?")[0] in MOVES]
    return [f"{word} {'+'.join(body['tags'])}" if "tags" in body else word for word, body in known]


def test_a_step_of_a_colocated_server(engine: SGLangEngine, server: FakeServer) -> None:
    residency, suspended = residency_of(engine, ("weight_sync", "generate", "update"))
    assert moves(server)[-2:] == ["release kv_cache+cuda_graph", "release weights"], "the next role finds room"
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
    assert [request.id for request in suspended] == [7], "it goes on when the engine is back"
