"""Products of weights in half precision whose sums stay in fp32. Apart from its siblings because it loads torch.

Products of two numbers in half precision are exact in fp32, so that nothing but the sums is rounded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20
"""Of a matrix that are converted at a time where there is no such product: few enough for a processor's cache."""


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., columns], weight [rows, columns] of one type -> x @ weight.T [..., rows] fp32. Not differentiable where
    that type is not fp32."""
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    flat = x.flatten(0, -2)
    if x.device.type == "cuda":
        product = torch.mm(flat, weight.t(), out_dtype=torch.float32)
    else:
        product = torch.empty(len(flat), len(weight), dtype=torch.float32, device=x.device)
        count = max(1, _CHUNK_ELEMENTS // weight.size(1))
        for first in range(0, len(weight), count):
            rows = slice(first, first + count)
            product[:, rows] = F.linear(flat.float(), weight[rows].float())
    return product.view(*x.shape[:-1], len(weight))
