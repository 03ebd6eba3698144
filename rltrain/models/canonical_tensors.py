"""The tensors of a Hugging Face checkpoint, seen as two-dimensional: [n] is [1, n], and
[n, m, k] is [n * m, k]."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.void]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class CanonicalTensors:
    """Names and shapes of a checkpoint's tensors; a tensor's number is its place here."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def matrix_shapes(self) -> IntArray:
        """[tensors, 2]: the shapes with vectors as one row."""
        return np.array([(prod(shape[:-1]), shape[-1]) for shape in self.shapes], dtype=np.int64)
