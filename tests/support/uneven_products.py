"""Matrix products whose last bits depend on more than their numbers, as on some processors.

On those processors the rows of a product depend on the number of rows and on the address of the memory. Bitwise equal
results must be equal there too. So their tests give every processor this behaviour.
"""

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

LINE_BYTES = 64
"""Bytes of a memory line. torch aligns its allocations to it."""


@contextmanager
def uneven_products() -> Iterator[None]:
    """Makes float products on the CPU wrong by up to 8 units in the last place.

    The error depends on the shapes of the factors and on their places in a line of memory.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns about replaced implementations
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            library.impl(name, partial(_product, getattr(torch.ops.aten, name).out), "CPU")
        library.impl("addmm_", _add_product, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _product(exact: Any, *arguments: Tensor, **factors: float) -> Tensor:
    left, right = arguments[-2:]
    out = left.new_empty(*left.shape[:-1], right.shape[-1])
    exact(*arguments, **factors, out=out)
    if not out.is_floating_point():
        return out
    seen = [(tuple(matrix.shape), matrix.data_ptr() % LINE_BYTES) for matrix in (left, right)]
    units = zlib.crc32(repr(seen).encode()) % 17 - 8
    return out.mul_(1 + units * torch.finfo(out.dtype).eps)


def _add_product(total: Tensor, left: Tensor, right: Tensor, **factors: float) -> Tensor:
    return total.copy_(_product(torch.ops.aten.addmm.out, total, left, right, **factors))
