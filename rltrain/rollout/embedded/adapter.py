"""Low-rank adapters whose weights are kept apart from those that they are added to: scale * (x A.T) B.T beside x W.T,
Hu et al. 2021, "LoRA", section 4.1."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded.grouped_product import grouped_product, is_grouped_on_device


class Adapter:
    """Of the matrices that lie one below the other in one parameter, or of such for each of several experts.

    `a` [parts * rank, columns] and `b` [rows, rank] are held by reference and read on every call, with one dimension
    more, of experts, where these are stacked; part i goes with `rows`[i] of `b`. Where `a` is cut by columns, as the
    matrix is, what is added is a part of a sum over the ranks, as the matrix's product is.
    """

    def __init__(self, a: Tensor, b: Tensor, rows: Sequence[int], scale: float) -> None:
        self._a, self._b, self._rows, self.scale = a, b, [*rows], scale
        self._rank = b.shape[-1]

    def product(self, inputs: Tensor) -> Tensor:
        """[tokens, columns] -> what is added to [tokens, rows]."""
        return self._outer(F.linear(inputs, self._a), F.linear)

    def grouped_product(self, inputs: Tensor, ends: Tensor) -> Tensor:
        """The same of experts, as grouped_product.grouped_product has tokens."""
        inner = grouped_product(inputs, self._a, ends)
        return self._outer(inner, lambda part, b: grouped_product(part.contiguous(), b, ends))

    def factors(self) -> tuple[Tensor, Tensor]:
        """(a, b) of one matrix that is alone in its parameter."""
        return self._a, self._b

    def is_grouped_on_device(self, dtype: torch.dtype) -> bool:
        """As grouped_product.is_grouped_on_device, of both its products."""
        return is_grouped_on_device(self._a, dtype) and is_grouped_on_device(self._b, dtype)

    def _outer(self, inner: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        inner *= self.scale
        if len(self._rows) == 1:
            return product(inner, self._b)
        parts = zip(inner.split(self._rank, -1), self._b.split(self._rows, -2), strict=True)
        return torch.cat([product(part, b) for part, b in parts], -1)
