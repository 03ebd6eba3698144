"""Attention that no kernel computes: how many scores are in memory at once. Apart from what computes them, which loads
torch."""

from rltrain.models.architecture import Architecture

SCORES_AT_ONCE = 2**25
SCORE_COPIES = 6
"""In fp32, of a block of scores on its way backward: bent ones, shares, gradients of both, and what is made between."""
FP32 = 4


def block_bytes(architecture: Architecture, num_heads: int, num_tokens: int) -> int:
    """Of a layer's scores and what is made of them, with `num_heads` on the rank and `num_tokens` in a micro-batch; 0
    where a kernel computes attention."""
    if architecture.attention_softcap is None and not architecture.attention_sinks:
        return 0
    return SCORE_COPIES * FP32 * min(SCORES_AT_ONCE, num_heads * num_tokens**2)
