"""Element types of tensors, by the numbers that the native kernels use (csrc/reshard.h)."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

TypeArray = NDArray[np.uint8]


class ElementType(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT8_E4M3 = 3
    """Quantised in 128 x 128 blocks of the checkpoint's tensor, each with an fp32 scale in a tensor of its own."""


ITEM_BYTES = np.array([4, 2, 2, 1], dtype=np.int64)
"""Bytes per element, by ElementType."""


def item_bytes(dtype: str) -> int:
    """Of an element of `dtype`, as torch spells it."""
    return int(ITEM_BYTES[ElementType[dtype.upper()]])


def uniform(num_tensors: int, dtype: str) -> TypeArray:
    """The type `dtype`, as torch spells it ("float32", "bfloat16", "float16"), for every one of `num_tensors`."""
    return np.full(num_tensors, ElementType[dtype.upper()], dtype=np.uint8)


def wire_types(source: TypeArray, destination: TypeArray) -> TypeArray:
    """The narrower of two types, element by element: what narrows is cast before the wire, what widens after it."""
    narrower: TypeArray = np.where(ITEM_BYTES[destination] <= ITEM_BYTES[source], destination, source)
    return narrower
