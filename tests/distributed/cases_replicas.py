"""The ranks of test_replicas: a model with two shards on two replicas each. One bit of it flips."""

from math import prod
from types import SimpleNamespace

import torch
import torch.distributed as dist

from rltrain.errors import ReplicaError
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.roles.actor import gathered
from rltrain.roles.trained import ReplicaCheck
from rltrain.runtime.grid import Grid
from tests.support.model_shards import tiny_architecture

EVERY = 3
KINDS = {"numbers": torch.int64, "truths": torch.bool}


def compared(dp: int) -> dict[str, str]:
    """Returns the messages of three checks: equal replicas, different replicas without a check due, and with one
    due."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layout = megatron_layout(tiny_architecture("qwen3"), Grid(tuple(range(num_ranks)), tp=num_ranks // dp))
    parameters = {name: torch.arange(prod(shape)).view(shape).float() for name, shape in layout.on(rank).parameters}
    model = SimpleNamespace(layout=layout, parameters=parameters, adapted=None)
    check = ReplicaCheck(EVERY, "actor", rank, dist.group.WORLD)
    said = {"equal": _said(check, EVERY - 1, model)}
    if rank == num_ranks - 1:
        last = parameters[layout.on(rank).parameters[-1][0]]
        last.view(torch.int32).view(-1)[3] ^= 1
    return said | {"unasked": _said(check, EVERY, model), "different": _said(check, 2 * EVERY - 1, model)}


def put_behind_each_other(tp: int) -> dict[str, list[int]]:
    """Gathers numbers of all replicas, as integers and as booleans. Replica n has n + 1 numbers, the last one none."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    grid = Grid(tuple(range(num_ranks)), tp=tp)
    number = next(dp for dp in range(grid.dp) if rank in grid.replica(dp))
    own = torch.arange(number + 1 if number < grid.dp - 1 else 0) + 10 * number
    found = {name: gathered(own.to(dtype), grid, dist.group.WORLD) for name, dtype in KINDS.items()}
    return {name: values.tolist() for name, values in found.items()}


def _said(check: ReplicaCheck, step: int, model: SimpleNamespace) -> str:
    try:
        check.check(step, model)
    except ReplicaError as error:
        return str(error)
    return ""
