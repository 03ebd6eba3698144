"""Torch's dtype of every element type. Apart from element_types because it loads torch."""

import torch

from rltrain.models.table import ElementType

DTYPES = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.FLOAT16: torch.float16,
    ElementType.FLOAT8_E4M3: torch.float8_e4m3fn,
}
