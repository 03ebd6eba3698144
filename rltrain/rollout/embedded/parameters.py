"""Parameters of the embedded engine, with tensor parallelism, adapters and grouped products."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rltrain.reshard.fp8_blocks import SCALE_SUFFIX, ScalePlaces, scale_places
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import adapter_pairs

# Tensor parallelism of the embedded engine over an explicit group.


class TensorParallel:
    """This rank's position in a tensor-parallel group. Without a group its size is 1 and there is no communication."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sums `partial` over the ranks in place and returns it. Collective over: the tensor-parallel group."""
        if self.size > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def least(self, number: int, device: torch.device) -> int:
        """Returns the least of the ranks' numbers. Collective over: the tensor-parallel group."""
        if self.size == 1:
            return number
        least = torch.tensor(number, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return int(least)

    def all_gather_columns(self, shard: Tensor) -> Tensor:
        """Concatenates the ranks' shards to [rows, size * columns]. Collective over: the tensor-parallel group."""
        if self.size == 1:
            return shard
        rows, columns = shard.shape
        gathered = shard.new_empty(self.size * rows, columns)
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=self.group)
        return gathered.view(self.size, rows, columns).transpose(0, 1).reshape(rows, self.size * columns)


def local_token_ids(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns (row numbers within a vocabulary shard that starts at `first`, mask of the tokens outside the shard)."""
    local = tokens - first
    outside = torch.logical_or(local < 0, local >= count)
    return local.masked_fill(outside, 0), outside


# Grouped products: each run of rows is multiplied with another matrix.

_ALIGNMENT = 16
"""Required alignment in bytes of rows in torch's grouped product."""


def is_grouped_on_device(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether torch multiplies all groups of `matrices`, read as `dtype`, in one launch without help by the
    host."""
    return (
        matrices.is_cuda
        and dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and all(size * dtype.itemsize % _ALIGNMENT == 0 for size in matrices.shape[1:])
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiplies `rows` [rows, n] by the transposed `matrices` [groups, m, n]. Returns [rows, m].

    The rows of group g end at `ends`[g] and use matrix g. Rows after the last group are undefined in the result.
    """
    if is_grouped_on_device(matrices, matrices.dtype):
        product: Tensor = F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends.int())
        return product
    product = rows.new_empty(len(rows), matrices.shape[1])
    start = 0
    for matrix, end in zip(matrices.unbind(), ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], matrix.t(), out=product[start:end])
        start = end
    return product


# Separate low-rank adapters: x W.T + scale * (x A.T) B.T (Hu et al. 2021, "LoRA", section 4.1).


class EngineAdapter:
    """The adapter of one parameter. The parameter may be several matrices stacked by rows, for one layer or for each
    expert.

    `a` [parts * rank, columns] and `b` [rows, rank] are held by reference and read on every call. For experts both have
    a leading dimension of experts. Part i belongs to `rows`[i] rows of `b`. If `a` is cut by columns like the matrix,
    products are partial sums over the ranks, like the matrix's products.
    """

    def __init__(self, a: Tensor, b: Tensor, rows: Sequence[int], scale: float) -> None:
        self._a, self._b, self._rows, self.scale = a, b, [*rows], scale
        self._rank = b.shape[-1]

    def product(self, inputs: Tensor) -> Tensor:
        """Returns the addition to a product: [tokens, columns] -> [tokens, rows]."""
        return self._outer(F.linear(inputs, self._a), F.linear)

    def grouped_product(self, inputs: Tensor, ends: Tensor) -> Tensor:
        """Returns the addition to a grouped product (see the function `grouped_product`)."""
        inner = grouped_product(inputs, self._a, ends)
        return self._outer(inner, lambda part, b: grouped_product(part.contiguous(), b, ends))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns (a, b) of a parameter with a single matrix."""
        return self._a, self._b

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """Returns whether both of its grouped products run on the device only (see the function
        `is_grouped_on_device`)."""
        return is_grouped_on_device(self._a, dtype) and is_grouped_on_device(self._b, dtype)

    def _outer(self, inner: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        inner *= self.scale
        if len(self._rows) == 1:
            return product(inner, self._b)
        parts = zip(inner.split(self._rank, -1), self._b.split(self._rows, -2), strict=True)
        return torch.cat([product(part, b) for part, b in parts], -1)


# The parameters of the embedded engine as matrices for products.


class Matrix(ABC):
    """One matrix, or several stacked ones, for products with tokens."""

    adapter: EngineAdapter | None = None
    """A separate adapter, added to products."""

    @abstractmethod
    def read(self) -> Tensor:
        """Returns its present values without the adapter: [rows, columns], or [matrices, rows, columns] if stacked."""

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies [tokens, columns] to [tokens, rows]."""
        return F.linear(inputs, self.read(), bias)

    def grouped_product(self, inputs: Tensor, ends: Tensor) -> Tensor:
        """Returns the grouped product of stacked matrices (see the function `grouped_product`)."""
        return grouped_product(inputs, self.read(), ends)

    def add_product(self, hidden: Tensor, inputs: Tensor) -> None:
        """Computes hidden [tokens, rows] += inputs [tokens, columns] @ matrix.T. All have the same dtype."""
        hidden.addmm_(inputs, self.read().t())


class PlainMatrix(Matrix):
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def read(self) -> Tensor:
        return self._weight


class TransposedMatrices(Matrix):
    """Stacked matrices stored as [matrices, columns, rows]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def read(self) -> Tensor:
        return self._weight.transpose(1, 2)


class AdaptedMatrix(Matrix):
    """Another matrix with a separate adapter."""

    adapter: EngineAdapter

    def __init__(self, matrix: Matrix, adapter: EngineAdapter) -> None:
        self._matrix, self.adapter = matrix, adapter

    def read(self) -> Tensor:
        return self._matrix.read()

    def product(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._matrix.product(inputs, bias).add_(self.adapter.product(inputs))

    def grouped_product(self, inputs: Tensor, ends: Tensor) -> Tensor:
        return self._matrix.grouped_product(inputs, ends).add_(self.adapter.grouped_product(inputs, ends))

    def add_product(self, hidden: Tensor, inputs: Tensor) -> None:
        hidden.add_(self.product(inputs))


class LayerParameters:
    """The parameters of one layer, by their names within it."""

    def __init__(self, parameters: Mapping[str, Tensor], matrices: Mapping[str, Matrix], layer: int) -> None:
        self._parameters, self._matrices, self._prefix = parameters, matrices, f"model.layers.{layer}."

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[self._prefix + name]

    def get(self, name: str) -> Tensor | None:
        """Returns the parameter, or None if the layer has none of this name."""
        return self._parameters.get(self._prefix + name)

    def first(self, *names: str) -> Tensor:
        """Returns the first existing parameter of `names`. Raises KeyError if there is none."""
        return self[next((name for name in names if self._prefix + name in self._parameters), names[-1])]

    def matrix(self, name: str) -> Matrix:
        """Returns the parameter as a matrix for products."""
        name = self._prefix + name
        return self._matrices.get(name) or PlainMatrix(self._parameters[name])


class QuantizedMatrix(Matrix):
    """A matrix in FP8 with a scale per block. It is dequantized on every read, so no second copy stays in memory."""

    def __init__(self, weight: Tensor, scales: Tensor, places: ScalePlaces, dtype: torch.dtype) -> None:
        self._weight, self._scales, self._dtype = weight, scales, dtype
        self._entries, self._column_blocks = (
            torch.from_numpy(numbers).to(weight.device) for numbers in (places.entries, places.column_blocks)
        )
        widths = np.bincount(places.column_blocks)
        self._width = int(widths[0]) if (widths == widths[0]).all() else None
        """Columns of each block. None if they differ."""

    def read(self) -> Tensor:
        scales = self._scales.view(-1)[self._entries]
        values = self._weight.float()
        if self._width is None:
            values.flatten(0, -2).mul_(scales[:, self._column_blocks])
        else:
            values.view(*scales.shape, self._width).mul_(scales[:, :, None])
        return values.to(self._dtype)


def quantized_matrices(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Matrix]:
    """Returns the FP8 matrices of `rank`'s parameters in `layout`, to be read as `dtype`."""
    return {
        name: QuantizedMatrix(parameters[name], parameters[name + SCALE_SUFFIX], places, dtype)
        for name, places in scale_places(layout, rank).items()
    }


def adapted_matrices(
    layout: Layout, rank: int, parameters: Mapping[str, Tensor], matrices: Mapping[str, Matrix], scale: float
) -> dict[str, Matrix]:
    """Returns `matrices` with adapters added. `layout` is the adapters' layout and `parameters` are those of `rank`."""
    found = dict(matrices)
    for pair in adapter_pairs(layout, rank):
        matrix, (a, b) = matrices.get(pair.adapted) or PlainMatrix(parameters[pair.adapted]), pair.names
        found[pair.adapted] = AdaptedMatrix(
            matrix, EngineAdapter(parameters[a], parameters[b], pair.rows_of_parts, scale)
        )
    return found
