"""The matrices of a layer's experts on a rank, and what these make of the tokens that visit them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models.products import clamped_swiglu
from rltrain.rollout.embedded.grouped_product import is_grouped_on_device
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix, TransposedMatrices


class Visits(NamedTuple):
    """Which expert each row visits: `expert` [rows], ascending, of this rank's or a number behind those, and where the
    rows of each end, `ends` [experts]. Of every expert the rank has part number `part`."""

    expert: Tensor
    ends: Tensor
    part: int


class GatedMatrices:
    """Gates, what they gate and the way down [experts, outputs, inputs], and SiLU."""

    def __init__(self, parameters: LayerParameters, block: str) -> None:
        names = [f"{block}.experts.w13_weight", f"{block}.experts.w2_weight"]
        self._gate_up, self._down = (parameters.matrix(name) for name in names)
        self._weights = [parameters[name] for name in names]
        self.count = len(self._weights[0])

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """As grouped_product says, of all of them."""
        adapters = (matrix.adapter for matrix in (self._gate_up, self._down) if matrix.adapter)
        plain = (is_grouped_on_device(weight, dtype) for weight in self._weights)
        return all(plain) and all(adapter.is_grouped_on_device(dtype) for adapter in adapters)

    def made(self, rows: Tensor, weights: Tensor, visits: Visits) -> Tensor:
        """[rows, hidden]: this rank's part of what experts make of `rows` [rows, hidden], times `weights` [rows, 1];
        undefined where none of its experts is visited."""
        gate, up = self._gate_up.grouped_product(rows, visits.ends).chunk(2, -1)
        # The weight comes before the last product, as in Megatron's experts: so it is rounded in the same place.
        return self._down.grouped_product(F.silu(gate).mul_(up).mul_(weights), visits.ends)


class InterleavedMatrices:
    """gpt-oss's: matrices [experts, inputs, outputs], with biases."""

    def __init__(self, parameters: LayerParameters, block: str) -> None:
        weights = [parameters[f"{block}.experts.{name}"] for name in ("gate_up_proj", "down_proj")]
        self._weights, self.count = weights, len(weights[0])
        matrices: list[Matrix] = [TransposedMatrices(weight) for weight in weights]
        self._gate_up, self._down = matrices
        self._gate_up_bias = parameters[f"{block}.experts.gate_up_proj_bias"]
        self._down_bias = parameters[f"{block}.experts.down_proj_bias"]

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """As GatedMatrices."""
        return all(is_grouped_on_device(weight, dtype) for weight in self._weights)

    def made(self, rows: Tensor, weights: Tensor, visits: Visits) -> Tensor:
        """As GatedMatrices; the first part of an expert adds the bias of what it makes."""
        own = visits.expert.clamp(max=self.count - 1)
        gate_up = self._gate_up.grouped_product(rows, visits.ends) + self._gate_up_bias.index_select(0, own)
        inner = clamped_swiglu(gate_up)
        made = self._down.grouped_product((inner * weights).to(inner.dtype), visits.ends)
        if visits.part == 0:
            made += self._down_bias.index_select(0, own) * weights
        return made
