"""Products with a layer's matrix, for training and for engines. Apart from its siblings because it loads torch.

In float32 torch takes MKL on CPUs, which uses half the width of the vector units of processors that are not Intel's.
oneDNN, which torch has as well, takes less than half of its time there. It makes machine code for every number of rows
that is new, which takes as long as a small product: who can, keeps to multiples of `rows_multiple`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 64
"""Below it a call of oneDNN costs more than it saves."""


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


HAS_ONEDNN = _has_onednn()


def takes_onednn(rows: Tensor) -> bool:
    """Whether `rows_product` with these [n, inner] is oneDNN's."""
    return _serves(rows.device, rows.dtype) and len(rows) >= LEAST_ROWS


def rows_multiple(device: torch.device, dtype: torch.dtype, most: int) -> int:
    """To what rows on this device are best padded: at most to a multiple of `most`."""
    return most if _serves(device, dtype) else 1


def rows_product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [n, inner] and matrix [m, inner] -> rows @ matrix.T + bias [n, m], without a gradient."""
    if not takes_onednn(rows):
        return F.linear(rows, matrix, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
    return product


def add_rows_product(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """total [n, m] += rows @ matrix.T."""
    if takes_onednn(rows):
        total.add_(rows_product(rows, matrix))
    else:
        total.addmm_(rows, matrix.t())


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return HAS_ONEDNN and dtype == torch.float32 and device.type == "cpu"
