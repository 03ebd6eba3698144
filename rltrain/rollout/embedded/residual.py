"""The residual stream [tokens, hidden]: what layers read of it, and how they add to it."""

import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded.parallel import TensorParallel
from rltrain.rollout.embedded.parameters import Matrix


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divided by its root mean square, times `weight`: in the weights' type, rounded once, also where `hidden` is
    wider."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(weight.dtype)


def add_product(hidden: Tensor, inner: Tensor, matrix: Matrix, group: TensorParallel) -> None:
    """hidden += inner @ matrix.T, where `inner` and `matrix` are split by columns over `group`.

    Collective over: `group`.
    """
    if group.size == 1 and hidden.dtype == inner.dtype:
        hidden.addmm_(inner, matrix.read().t())
    else:
        hidden.add_(group.all_reduce(F.linear(inner, matrix.read())))
