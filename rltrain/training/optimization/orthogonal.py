"""Muon's update: a matrix of momenta made orthogonal (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from math import sqrt

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan's quintic: singular values from about 0.02 on come to between 0.7 and 1.2 in five passes."""
EPS = 1e-7
UPDATE_RMS = 0.2
"""About what AdamW's updates have (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""


def update_scale(rows: int, columns: int) -> float:
    """What an orthogonal matrix is multiplied by so that its elements' root mean square is UPDATE_RMS, whatever its
    shape: learning rate and weight decay of AdamW then fit (equation 4 there)."""
    return UPDATE_RMS * sqrt(max(rows, columns))


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """[count, rows, columns], in the type of `matrices`, made of their singular vectors with values near 1."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norms = torch.linalg.matrix_norm(x.float(), keepdim=True)
    x = (x / (norms + EPS)).to(matrices.dtype)
    for _ in range(steps):
        squared = x @ x.mT
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x.mT if is_tall else x
