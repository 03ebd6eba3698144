"""The embedded engine's parameters, and its matrices as products read them."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rltrain.models.element_types import ElementType
from rltrain.reshard.fp8.blocks import SCALE_SUFFIX
from rltrain.reshard.fp8.scale_places import ScalePlaces, scale_places
from rltrain.reshard.kernels.torch_types import DTYPES
from rltrain.reshard.layout import Layout
from rltrain.reshard.parts import parameter_types


class Matrix(Protocol):
    def read(self) -> Tensor:
        """[rows, columns], or [matrices, rows, columns] of stacked ones, as it is now."""
        ...


class PlainMatrix:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def read(self) -> Tensor:
        return self._weight


class LayerParameters:
    """Those of one layer, by their names in it."""

    def __init__(self, parameters: Mapping[str, Tensor], matrices: Mapping[str, Matrix], layer: int) -> None:
        self._parameters, self._matrices, self._prefix = parameters, matrices, f"model.layers.{layer}."

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        """None where the layer has no such parameter."""
        return self._parameters.get(self._prefix + name)

    def first(self, *names: str) -> Tensor:
        """That of the first of `names` which the layer has. KeyError where it has none."""
        return self[next((name for name in names if self._prefix + name in self._parameters), names[-1])]

    def matrix(self, name: str) -> Matrix:
        """As products read it."""
        name = self._prefix + name
        return self._matrices.get(name) or PlainMatrix(self._parameters[name])


class QuantizedMatrix:
    """In FP8 with a scale per block. What is read is made anew each time, so that no second copy stays in memory."""

    def __init__(self, weight: Tensor, scales: Tensor, places: ScalePlaces, dtype: torch.dtype) -> None:
        self._weight, self._scales, self._dtype = weight, scales, dtype
        self._entries, self._column_blocks = (
            torch.from_numpy(numbers).to(weight.device) for numbers in (places.entries, places.column_blocks)
        )
        widths = np.bincount(places.column_blocks)
        self._width = int(widths[0]) if (widths == widths[0]).all() else None
        """Columns in each block, where all blocks have as many."""

    def read(self) -> Tensor:
        scales = self._scales.view(-1)[self._entries]
        values = self._weight.float()
        if self._width is None:
            values.flatten(0, -2).mul_(scales[:, self._column_blocks])
        else:
            values.view(*scales.shape, self._width).mul_(scales[:, :, None])
        return values.to(self._dtype)


def allocate_parameters(layout: Layout, rank: int, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Zeroed tensors of every parameter that `rank` holds in `layout`, by name."""
    kinds = parameter_types(layout, layout.parts[layout.ranks.index(rank)]).tolist()
    return {
        name: torch.zeros(shape, dtype=DTYPES[ElementType(kind)], device=device)
        for (name, shape), kind in zip(layout.on(rank).parameters, kinds, strict=True)
    }


def quantized_matrices(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Matrix]:
    """Of `parameters`, those of `rank` in `layout`, the ones in FP8; they are read as `dtype`."""
    return {
        name: QuantizedMatrix(parameters[name], parameters[name + SCALE_SUFFIX], places, dtype)
        for name, places in scale_places(layout, rank).items()
    }
