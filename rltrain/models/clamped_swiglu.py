"""gpt-oss's activation of experts. Apart from its siblings because it loads torch."""

from torch import Tensor

ALPHA = 1.702
"""With which x * sigmoid(ALPHA * x) is near GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""
LIMIT = 7.0


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 n] -> [..., n], of gates g and what they gate u, which lie in turn: g * sigmoid(ALPHA * g) * (u + 1), of
    g at most LIMIT and of u between -LIMIT and LIMIT."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (ALPHA * gate).sigmoid() * (up + 1)
