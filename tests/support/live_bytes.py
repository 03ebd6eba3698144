"""Measures the live memory of operators."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The peak bytes of live storages made by operators inside the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = operator(*args, **kwargs or {})
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (_storage(made) in self._tensors or _storage(made) not in given):
                self._hold(made)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
        self._tensors[storage] = self._tensors.get(storage, 0) + 1
        if self._tensors[storage] == 1:
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._drop, storage, size)

    def _drop(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self._now -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
