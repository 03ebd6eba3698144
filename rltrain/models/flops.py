"""Floating-point operations of a model, counted from its architecture. A multiply-add is two.

What is counted are matrix products, as in Kaplan et al. 2020 (arXiv:2001.08361, section 2.1: 2 per parameter and token
forward, twice as many backward) and in the definition of model FLOPs utilisation in PaLM (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B): projections, experts that a token visits, attention's two products, the head. Norms,
rotary embeddings, softmax and the embedding's look-up are left out. Attention counts the positions that a causal kernel
reads, half of what PaLM counts: a token at position i attends to i + 1. Latent attention (DeepSeek-V2,
arXiv:2405.04434, section 2.1) is counted as training computes it, keys and values of all heads made from the latent.

Recomputation is that of Korthikanti et al. 2022 (arXiv:2205.05198): "selective" repeats attention's two products,
"full" the forward pass of all layers. Utilisation by convention leaves it out (MFU); with it, it is that of the
hardware (HFU).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rltrain.models.architecture import Architecture
from rltrain.models.canonical import canonical_tensors, layer_of, sizes, table_of
from rltrain.models.table import LayerKind, Row

DELTA_PRODUCTS = 3
"""Of a token with the state of a gated delta net's head: what is known of its key, its change, and its query's."""
BACKWARD = 2
"""A backward pass over a forward pass: each product has two gradients, each a product of the same size."""


@dataclass(frozen=True)
class ForwardFlops:
    """Of one token in a forward pass through the whole model.

    `layers` and `head` are for its projections, `attention` for each position that it attends to, itself among them,
    over all layers but those with a window: `sliding` is for those, in which it attends to `window` positions at most.
    """

    layers: int
    attention: int
    head: int
    sliding: int = 0
    window: int = 0

    def forward(self, lengths: Collection[int]) -> int:
        """Of sequences of `lengths` tokens, each attending to itself alone."""
        return sum(lengths) * (self.layers + self.head) + self._attended(lengths)

    def training(self, lengths: Collection[int], *, recompute: str = "none") -> int:
        """Forward and backward of sequences of `lengths` tokens. `recompute` is model.recompute; "none" for MFU."""
        attention = self._attended(lengths)
        repeated = {"none": 0, "selective": attention, "full": attention + sum(lengths) * self.layers}
        return (1 + BACKWARD) * self.forward(lengths) + repeated[recompute]

    def of_token(self, context: float) -> float:
        """Forward, of one token that attends to `context` positions."""
        return self.layers + self.head + self.of_attention(context)

    def of_attention(self, context: float) -> float:
        """Forward, of attention's products alone, of one token that attends to `context` positions."""
        return context * self.attention + min(context, self.window) * self.sliding

    def _attended(self, lengths: Collection[int]) -> int:
        inside = positions_read(lengths, self.window) * self.sliding if self.sliding else 0
        return positions_read(lengths) * self.attention + inside


@lru_cache(maxsize=64)
def forward_flops(architecture: Architecture) -> ForwardFlops:
    """What a forward pass costs, with the head that the model has: the vocabulary's, or a value's."""
    if architecture.unlisted:
        return _unlisted_flops(architecture)
    windows = architecture.windows
    num_sliding = sum(windows.layers) if windows else 0
    return ForwardFlops(
        layers=sum(layer_flops(architecture, sparse) for sparse in architecture.sparse_layers),
        attention=(architecture.num_attention_layers - num_sliding) * attention_flops(architecture),
        head=2 * _elements(architecture, (table_of(architecture).head,)),
        sliding=num_sliding * attention_flops(architecture),
        window=windows.size if windows else 0,
    )


def _unlisted_flops(architecture: Architecture) -> ForwardFlops:
    """Of the matrices that a number in their names says to be a layer's."""
    tensors = canonical_tensors(architecture)
    of_layers = [
        prod(shape)
        for name, shape in zip(tensors.names, tensors.shapes, strict=True)
        if len(shape) == 2 and any(part.isdigit() for part in name.split("."))
    ]
    head = architecture.vocab_size if architecture.head == "vocabulary" else 1
    return ForwardFlops(
        layers=2 * sum(of_layers),
        attention=architecture.num_layers * attention_flops(architecture),
        head=2 * architecture.hidden_size * head,
    )


def layer_flops(architecture: Architecture, sparse: bool) -> int:
    """Of one token in one layer, but for attention's two products: with experts (`sparse`), those that it visits. Of
    models with gated delta nets the mean of their layers and of those with attention."""
    if architecture.unlisted:
        return forward_flops(architecture).layers // architecture.num_layers
    once = 2 * _elements(architecture, layer_of(architecture, LayerKind(sparse)).rows)
    if delta := architecture.delta:
        of_delta = 2 * _elements(architecture, layer_of(architecture, LayerKind(sparse, delta=True)).rows)
        of_delta += 2 * DELTA_PRODUCTS * delta.num_heads * delta.key_dim * delta.value_dim
        once += delta.num_layers * (of_delta - once) // architecture.num_layers
    return once + expert_flops(architecture) if sparse else once


def expert_flops(architecture: Architecture) -> int:
    """Of one token in the experts that it visits in one layer, of the model's that every token shares apart."""
    moe = architecture.moe
    return 2 * moe.top_k * _elements(architecture, layer_of(architecture, LayerKind(sparse=True)).experts) if moe else 0


def mlp_flops(architecture: Architecture) -> int:
    """Of one token in the MLP of a layer without experts."""
    return 2 * architecture.mlp_matrices * architecture.hidden_size * architecture.ffn_hidden_size


def attention_flops(architecture: Architecture) -> int:
    """Of one token in one layer for each position that it attends to: a score and a weighted value of every head."""
    value_head_dim = architecture.mla.value_head_dim if architecture.mla else architecture.head_dim
    return 2 * architecture.num_heads * (architecture.head_dim + value_head_dim)


def latent_reading_flops(architecture: Architecture) -> int:
    """As `attention_flops`, of engines that keep latents: queries and what is attended to are as wide as those."""
    mla = architecture.mla
    return 2 * architecture.num_heads * (2 * mla.kv_rank + mla.rope_head_dim) if mla else 0


def positions_read(lengths: Collection[int], window: int | None = None) -> int:
    """Pairs of a token and a position that it attends to, of `window` at most, in sequences of `lengths` tokens."""
    beyond = (0 if window is None else max(0, length - window) for length in lengths)
    return sum((length * (length + 1) - more * (more + 1)) // 2 for length, more in zip(lengths, beyond, strict=True))


def _elements(architecture: Architecture, rows: tuple[Row, ...]) -> int:
    """Of the matrices in `rows`; vectors are multiplied with nothing but themselves."""
    size = sizes(architecture)
    shapes = [part.shape(size) for row in rows for part in row.parts]
    return sum(prod(shape) for shape in shapes if len(shape) == 2)


# Attention that no kernel computes: how many scores are in memory at once. Apart from what computes them, which loads
# torch.

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
