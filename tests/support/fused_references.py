"""The formulas of fused kernels in plain torch, and their comparison with the kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rltrain.models.attention import halves_of_pairs
from rltrain.models.fused import Turn

EPS = 1e-6
KINDS = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 2**-7}}
"""bf16: one rounding of a result, and sums over tokens of values that were rounded once."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def agrees(
    fused_one: Callable[..., Sequence[Tensor]], plain: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> None:
    """Compares results and gradients of all inputs with those of `plain` in fp64."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = fused_one(*own), plain(*wide)
    given_back = [normal(*one.shape, dtype=one.dtype, seed=7).to(one.device) for one in found]
    torch.autograd.backward(list(found), given_back)
    torch.autograd.backward(list(expected), [one.double() for one in given_back])
    pairs = [*zip(found, expected, strict=True), *((x.grad, y.grad) for x, y in zip(own, wide, strict=True))]
    for actual, exact in pairs:
        assert actual is not None and exact is not None
        scale = max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(actual.double() / scale, exact / scale, **TOLERANCE[actual.dtype])


def plain_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight + offset, EPS)


def plain_turn(heads: Tensor, weight: Tensor | None, turn: Turn) -> Tensor:
    """Normalizes and rotates heads [tokens, heads, head_dim]."""
    size = 2 * turn.half
    heads = heads if weight is None else plain_norm(heads, weight, turn.offset)
    heads = halves_of_pairs(heads, size) if turn.pairs else heads
    first, second, rest = heads.split([turn.half, turn.half, heads.size(-1) - size], -1)
    cos, sin = (x[:, None, : turn.half].double() for x in (turn.cos, turn.sin))
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def turn_of(num_tokens: int, half: int, *, pairs: bool, magnitude: float = 1.25) -> Turn:
    angles = normal(num_tokens, half, seed=3) * 3
    return Turn(angles.cos() * magnitude, angles.sin() * magnitude, half, pairs, None, EPS, 1.0)
