"""What makes the steps of Megatron's optimizers, where that is not torch's or Transformer Engine's Adam."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rltrain.config import schema
from rltrain.models.table import Array, is_hidden_matrix
from rltrain.training.matrix_exchange import MatrixExchange
from rltrain.training.megatron.model import LanguageModel, local_parameters
from rltrain.training.megatron.optimizer import members
from rltrain.training.optimizers import Slot, SteppingOptimizer
from rltrain.training.shards import within


def is_replaced(settings: schema.Optimizer) -> bool:
    """Whether the settings ask for something that Megatron's own Adam does not do everywhere."""
    return settings.name != "adamw" or settings.moments_dtype != "float32" or bool(settings.cpu_offload)


def replace_steps(model: LanguageModel, optimizer: MegatronOptimizer, settings: schema.Optimizer) -> None:
    """Have a new `optimizer` make its steps as the settings say: gradients, their norm, loss scale and the gathering of
    weights stay Megatron's. Collective over: with muon the ranks of the model's pipeline stage."""
    names = {id(parameter): name for name, parameter in local_parameters(model).items()}
    matrices = _matrix_pieces(model) if settings.name == "muon" else {}
    for member in members(optimizer):
        found: list[tuple[str, Slot]] = []
        firsts: list[int] = []
        for parameter, key in masters(member):
            name = names[id(parameter)]
            found.append((name, Slot(key, _weights(member, parameter, key), name in matrices)))
            firsts.append(first_of(member, parameter))
        exchange = None
        if settings.name == "muon":
            boxes = _boxes(found, firsts, matrices, model.layout.on(dist.get_rank()).pieces[:0])
            shapes = model.layout.tensors.shapes
            exchange = MatrixExchange.of(boxes, shapes, model.pg_collection.tp_dp_cp, model.device)
        slots = [slot for _, slot in found]
        member.optimizer = SteppingOptimizer(member.param_groups, slots, settings, model.device, exchange)
        if hasattr(member, "_copy_main_params_to_model_params"):
            member._copy_main_params_to_model_params = _nothing  # the step has written them


def stepping(member: MegatronOptimizer) -> SteppingOptimizer | None:
    """What replaced a member's steps."""
    return member.optimizer if isinstance(member.optimizer, SteppingOptimizer) else None


def masters(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """The parameters of which a member has something here, with what it works on."""
    groups: list[tuple[list[Any], list[Any]]] = []
    if isinstance(member, DistributedOptimizer):
        groups += zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True)
        groups += zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
    elif member.config.bf16 or member.config.fp16:
        groups += zip(member.fp32_from_fp32_groups, member.fp32_from_fp32_groups, strict=True)
        groups += zip(member.float16_groups, member.fp32_from_float16_groups, strict=True)
    else:
        groups += [(group["params"], group["params"]) for group in member.param_groups]
    for parameters, held in groups:
        yield from zip(parameters, held, strict=True)


def first_of(member: MegatronOptimizer, parameter: torch.nn.Parameter) -> int:
    """Where a member's share of a flattened parameter begins."""
    if not isinstance(member, DistributedOptimizer):
        return 0
    first: int = member._get_model_param_range_map(parameter)["param"].start
    return first


def _weights(member: MegatronOptimizer, parameter: torch.nn.Parameter, key: Tensor) -> Tensor:
    """Flat: what the model computes with, of the member's share."""
    if parameter.dtype == key.dtype:
        return key.detach().view(-1)
    first = first_of(member, parameter)
    return parameter.detach().view(-1)[first : first + key.numel()]


def _matrix_pieces(model: LanguageModel) -> Mapping[str, Array]:
    """By name, the pieces of parameters that consist of nothing but matrices that are made orthogonal."""
    on, tensors = model.layout.on(dist.get_rank()), model.layout.tensors
    found: dict[str, Array] = {}
    for number, (name, _) in enumerate(on.parameters):
        pieces = on.pieces[on.pieces["parameter"] == number]
        held = np.unique(pieces["tensor"])
        if len(held) and all(is_hidden_matrix(tensors.names[tensor], tensors.shapes[tensor]) for tensor in held):
            found[name] = pieces
    return found


def _boxes(found: list[tuple[str, Slot]], firsts: list[int], matrices: Mapping[str, Array], none: Array) -> Array:
    """What this rank's slots hold of matrices; `parameter` is the slot's number. `none` where they hold nothing."""
    tables = [none]
    for number, ((name, slot), first) in enumerate(zip(found, firsts, strict=True)):
        if slot.matrices:
            pieces = matrices[name].copy()
            pieces["parameter"] = 0
            cut = within(pieces, np.array([first]), np.array([first + slot.key.numel()]))
            cut["parameter"] = number
            tables.append(cut)
    return np.concatenate(tables)


def _nothing() -> None:
    pass
