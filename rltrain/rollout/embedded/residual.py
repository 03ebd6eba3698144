"""The residual stream [tokens, hidden]: what layers read of it, and how they add to it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import Matrix


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divided by its root mean square, times `weight`: in the weights' type, rounded once, also where `hidden` is
    wider."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(weight.dtype)


class Norm:
    """`normed` with a weight that is read on every call, plus `offset`; with a bias, of what the mean is taken off."""

    def __init__(self, weight: Tensor, architecture: Architecture, bias: Tensor | None = None) -> None:
        self._weight, self._eps, self._offset = weight, architecture.norm_eps, architecture.norm_offset
        self._bias = bias

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        if self._bias is not None:
            gain, bias = self._weight.float() + self._offset, self._bias.float()
            return F.layer_norm(hidden.float(), gain.shape, gain, bias, self._eps).to(self._weight.dtype)
        if not self._offset:
            return normed(hidden, self._weight, self._eps)
        gain = self._weight.float() + self._offset
        return F.rms_norm(hidden.float(), gain.shape, gain, self._eps).to(self._weight.dtype)


def add_product(hidden: Tensor, inner: Tensor, matrix: Matrix, group: TensorParallel, norm: Norm | None = None) -> None:
    """hidden += inner @ matrix.T, where `inner` and `matrix` are split by columns over `group`; what is added passes
    `norm` first, where there is one.

    Collective over: `group`.
    """
    if norm is not None:
        hidden.add_(norm(group.all_reduce(matrix.product(inner))))
    elif group.size == 1 and hidden.dtype == inner.dtype:
        matrix.add_product(hidden, inner)
    else:
        hidden.add_(group.all_reduce(matrix.product(inner)))
