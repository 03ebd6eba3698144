"""The two parts used by megatron-core: rotating heads and splitting tensors. The rest is absent."""

from importlib import import_module
from typing import Any

from torch import Tensor


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("transformer_engine.pytorch.absent"), name)


class _SplitAlongDim:
    @staticmethod
    def apply(mixed_x_layer: Tensor, split_dim: int, split_size_or_sections: list[int]) -> tuple[Tensor, ...]:
        return mixed_x_layer.split(split_size_or_sections, split_dim)
