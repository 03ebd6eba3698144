"""Tensors given by name, checked against what a plan says of them, in the order in which its table numbers them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import ElementType, IntArray, TypeArray
from rltrain.reshard.kernels.torch_types import DTYPES
from rltrain.reshard.plan.rank_plan import Parameters, RankPlan

UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class _Side:
    """One of the layouts on this rank; `types` [parameters] are element types or UNKNOWN."""

    name: str
    parameters: Parameters
    types: IntArray


class Binding:
    """What a reshard expects of the tensors that it is given on this rank.

    Raises ValueError where one parameter is to hold elements of several types.
    """

    def __init__(self, plan: RankPlan, device: torch.device) -> None:
        self._rank, self._device = plan.rank, device
        copies = plan.copies
        outgoing, incoming = plan.direct.sends, [plan.direct.receives, plan.fan_out.sends, plan.fan_out.receives]
        source = [(copies["source_parameter"], copies["tensor"]), (outgoing["parameter"], outgoing["tensor"])]
        destination = [(copies["destination_parameter"], copies["tensor"])]
        destination += [(boxes["parameter"], boxes["tensor"]) for boxes in incoming]
        self._sides = tuple(
            _Side(name, parameters, _types_of(parameters, [(number, types[tensor]) for number, tensor in used]))
            for name, parameters, used, types in (
                ("source", plan.source_parameters, source, plan.source_types),
                ("destination", plan.destination_parameters, destination, plan.destination_types),
            )
        )

    def check(
        self,
        source_tensors: Mapping[str, Tensor] | None,
        destination_tensors: Mapping[str, Tensor] | None,
        *,
        without: Iterable[str] = (),
    ) -> None:
        """Raises SyncError naming the first tensor that is not as the plan says; `without` are not given yet."""
        for side, tensors in zip(self._sides, (source_tensors, destination_tensors), strict=True):
            if side.parameters and tensors is None:
                raise SyncError(
                    f"rank {self._rank} is in the {side.name} layout, but no {side.name} tensors were given"
                )
            for (name, shape), kind in zip(side.parameters, side.types.tolist(), strict=True):
                if tensors is not None and name not in without:
                    self._check(side.name, name, shape, kind, tensors.get(name))

    def ordered(
        self, source_tensors: Mapping[str, Tensor] | None, destination_tensors: Mapping[str, Tensor] | None
    ) -> list[Tensor]:
        """Source parameters, then destination parameters."""
        given = (source_tensors, destination_tensors)
        return [
            tensors[name]
            for side, tensors in zip(self._sides, given, strict=True)
            if tensors is not None
            for name, _ in side.parameters
        ]

    def _check(self, side: str, name: str, shape: tuple[int, ...], kind: int, tensor: Tensor | None) -> None:
        dtype = None if kind == UNKNOWN else DTYPES[ElementType(kind)]
        expected = f"{shape} of {dtype or 'any dtype'}, contiguous on {self._device}"
        if tensor is None:
            raise SyncError(f"{side} tensor {name} of rank {self._rank} was not given; expected {expected}")
        right = tuple(tensor.shape) == shape and dtype in (None, tensor.dtype) and tensor.is_contiguous()
        if not right or tensor.device.type != self._device.type:
            raise SyncError(
                f"{side} tensor {name} of rank {self._rank} is {tuple(tensor.shape)} of {tensor.dtype} with strides "
                f"{tensor.stride()} on {tensor.device}; expected {expected}, as the {side} layout says. Was the model "
                "changed after the reshard was planned?"
            )


def _types_of(parameters: Parameters, used: list[tuple[IntArray, TypeArray]]) -> IntArray:
    """[parameters]: their element types; UNKNOWN where nothing is `used`, which are (numbers of parameters, types)."""
    types = np.full(len(parameters), UNKNOWN, dtype=np.int64)
    for number, kind in used:
        types[number] = kind
    for number, kind in used:
        mixed = np.flatnonzero(types[number] != kind)
        if len(mixed):
            name = parameters[number[mixed[0]]][0]
            raise ValueError(f"parameter {name} is to hold elements of several types; expected one per parameter")
    return types


def device_of(tensors: Iterable[Mapping[str, Tensor] | None]) -> torch.device:
    """Of the first tensor; the CPU where there is none."""
    for given in tensors:
        for tensor in (given or {}).values():
            return tensor.device
    return torch.device("cpu")
