"""One engine over several ranks: each stages its own share, and the first one talks to the server."""

from typing import Any

import torch
import torch.distributed as dist

from rltrain.errors import EngineError, EngineLost
from rltrain.reshard.layout import split
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.servers.sglang_weights import Delivery
from rltrain.runtime.grid import Grid
from tests.support.loading_server import LoadingServer, Model, model_of
from tests.support.model_shards import PADDING, Place, engine_shard, full_tensors, tiny_architecture

ARCHITECTURE = tiny_architecture("qwen2")


def deliver_over_ranks() -> dict[str, Any]:
    """Returns each rank's view of three syncs: one succeeds, in one a rank of the server fails, in one it dies."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    layout = engine_layout(ARCHITECTURE, Grid(tuple(range(tp)), tp=tp))
    server = LoadingServer(*(model_of(layout, other) for other in range(tp)))
    delivery = Delivery(
        split(layout, 2000),
        rank,
        device=torch.device("cpu"),
        keep=True,
        group=dist.group.WORLD,
        call=(lambda path, body: server.call(path, body)) if rank == 0 else None,
    )
    results: dict[str, Any] = {"layout": outcome(delivery.check_layout)}
    results["whole"] = outcome(lambda: deliver(delivery, rank, tp, 1))
    results["version"], results["shares"] = delivery.version, shares_are_right(server, tp) if rank == 0 else True
    results["changes"] = outcome(lambda: send_changes(delivery, rank, tp, 4))
    results["changed shares"] = rank > 0 or shares_are_right(server, tp)
    last = [name for name in server.models[-1].held][-1]
    good, server.models = server.models, (*server.models[:-1], without(server.models[-1], last))
    results["last rank lacks a parameter"] = outcome(lambda: deliver(delivery, rank, tp, 2))
    server.is_open = False
    results["layout of the last rank"] = outcome(delivery.check_layout)
    server.models, server.calls, server.dies_at, server.is_open = good, [], 3, False
    results["dies"] = outcome(lambda: deliver(delivery, rank, tp, 3))
    server.models, server.dies_at, server.is_open = tuple(model_of(layout, other) for other in range(tp)), None, False
    results["again"] = outcome(delivery.redeliver)
    results["version again"], results["shares again"] = delivery.version, rank > 0 or shares_are_right(server, tp)
    delivery.close()
    return results


def outcome(work: Any) -> str:
    try:
        work()
    except (EngineLost, EngineError) as error:
        return f"{type(error).__name__}: {error}"
    return "good"


def deliver(delivery: Delivery, rank: int, tp: int, version: int) -> None:
    expected = share(rank, tp)
    delivery.begin()
    for part in range(delivery.num_parts):
        for name, view in delivery.tensors(part).items():
            real = expected[name] != PADDING
            view[real] = expected[name][real]
        delivery.arrived(part, verify=True)
    delivery.finish(version)


def send_changes(delivery: Delivery, rank: int, tp: int, version: int) -> None:
    """Sends wrong values for some elements of each server rank. No other elements are written."""
    expected = share(rank, tp)
    delivery.begin()
    for part in range(delivery.num_parts):
        for name, view in delivery.tensors(part, is_kept=True).items():
            real = expected[name] != PADDING
            assert torch.equal(view[real], expected[name][real]), "kept values are the server's"
            view.view(-1)[0] += 1.0
        delivery.arrived(part)
    delivery.finish(version)
    delivery.begin()
    for part in range(delivery.num_parts):
        for view in delivery.tensors(part, is_kept=True).values():
            view.view(-1)[0] -= 1.0
        delivery.arrived(part, verify=True)
    delivery.finish(version + 1)


def share(rank: int, tp: int) -> dict[str, torch.Tensor]:
    shard = engine_shard(ARCHITECTURE, full_tensors(ARCHITECTURE), Place(tp=tp, tp_rank=rank))
    return {name: torch.tensor(values) for name, values in shard.items()}


def without(model: Model, name: str) -> Model:
    return Model({other: tensor for other, tensor in model.held.items() if other != name})


def shares_are_right(server: LoadingServer, tp: int) -> bool:
    return all(
        torch.equal(model.held[name], values.masked_fill(values == PADDING, 0))
        for rank, model in enumerate(server.models)
        for name, values in share(rank, tp).items()
    )
