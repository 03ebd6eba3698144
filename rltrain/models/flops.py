"""Floating-point operations of a model, computed from its architecture. A multiply-add counts as two.

Only matrix products count: projections, visited experts, the two products of attention, and the head. Norms, rotary
embeddings, softmax and embeddings are ignored. A parameter costs 2 per token forward and 4 backward (Kaplan et al.
2020, arXiv:2001.08361, section 2.1). The same products define PaLM's model FLOPs utilisation (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B). Attention counts the positions read by a causal kernel, half of PaLM's count: a token at
position i attends to i + 1. Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) counts as in training, with
keys and values of all heads made from the latent.

Recomputation of attention ("core_attn", Korthikanti et al. 2022, arXiv:2205.05198) repeats its two products, "full" the
forward pass of all layers. MFU ignores recomputation. HFU includes it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rltrain.models.architecture import Architecture
from rltrain.models.canonical import canonical_tensors, layer_of, sizes, table_of
from rltrain.models.table import LayerKind, Row
from rltrain.models.vision import Grid, Vision

DELTA_PRODUCTS = 3
"""Products of a token with the state of a gated delta net's head: the known value of its key, the change, and the
query's output."""
BACKWARD = 2
"""FLOPs of a backward pass relative to forward. Each product has two gradients of the same size."""


@dataclass(frozen=True)
class ForwardFlops:
    """The FLOPs of one token in a forward pass through the whole model.

    `layers` and `head` count its projections. `attention` counts each attended position (including itself), over all
    layers without a window. `sliding` is the same for layers with a window of at most `window` positions.
    """

    layers: int
    attention: int
    head: int
    sliding: int = 0
    window: int = 0

    def forward(self, lengths: Collection[int]) -> int:
        """Returns the FLOPs of sequences of `lengths` tokens. Each attends only to itself."""
        return sum(lengths) * (self.layers + self.head) + self._attended(lengths)

    def training(self, lengths: Collection[int], *, recompute: str = "none") -> int:
        """Returns the FLOPs of forward and backward for sequences of `lengths` tokens. `recompute` is "core_attn" or
        "full", or "none" for MFU."""
        attention = self._attended(lengths)
        repeated = {"none": 0, "core_attn": attention, "full": attention + sum(lengths) * self.layers}
        return (1 + BACKWARD) * self.forward(lengths) + repeated[recompute]

    def of_token(self, context: float) -> float:
        """Returns the forward FLOPs of one token that attends to `context` positions."""
        return self.layers + self.head + self.of_attention(context)

    def of_attention(self, context: float) -> float:
        """Returns the forward FLOPs of attention's products for one token that attends to `context` positions."""
        return context * self.attention + min(context, self.window) * self.sliding

    def _attended(self, lengths: Collection[int]) -> int:
        inside = positions_read(lengths, self.window) * self.sliding if self.sliding else 0
        return positions_read(lengths) * self.attention + inside


@lru_cache(maxsize=64)
def forward_flops(architecture: Architecture) -> ForwardFlops:
    """Returns the cost of a forward pass, including the model's head."""
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
    """Returns the cost of a model without a table. Matrices with a number in their names belong to layers."""
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
    """Returns the FLOPs per token of one layer, without attention's two products. With `sparse` it includes the visited
    experts. In models with gated delta nets it is the mean over both kinds of layers."""
    if architecture.unlisted:
        return forward_flops(architecture).layers // architecture.num_layers
    once = 2 * _elements(architecture, layer_of(architecture, LayerKind(sparse)).rows)
    if delta := architecture.delta:
        of_delta = 2 * _elements(architecture, layer_of(architecture, LayerKind(sparse, delta=True)).rows)
        of_delta += 2 * DELTA_PRODUCTS * delta.num_heads * delta.key_dim * delta.value_dim
        once += delta.num_layers * (of_delta - once) // architecture.num_layers
    return once + expert_flops(architecture) if sparse else once


def expert_flops(architecture: Architecture) -> int:
    """Returns the FLOPs per token of one layer's routed experts. Shared experts are counted in `layer_flops`."""
    moe = architecture.moe
    return 2 * moe.top_k * _elements(architecture, layer_of(architecture, LayerKind(sparse=True)).experts) if moe else 0


def mlp_flops(architecture: Architecture) -> int:
    """Returns the FLOPs per token of one dense MLP."""
    return 2 * architecture.mlp_matrices * architecture.hidden_size * architecture.ffn_hidden_size


def attention_flops(architecture: Architecture) -> int:
    """Returns the FLOPs per token and attended position in one layer: a score and a weighted value for every head."""
    value_head_dim = architecture.mla.value_head_dim if architecture.mla else architecture.head_dim
    return 2 * architecture.num_heads * (architecture.head_dim + value_head_dim)


def latent_reading_flops(architecture: Architecture) -> int:
    """Returns the `attention_flops` of engines that store latents. Queries and attended vectors then have the latents'
    size."""
    mla = architecture.mla
    return 2 * architecture.num_heads * (2 * mla.kv_rank + mla.rope_head_dim) if mla else 0


def vision_flops(vision: Vision, grids: Iterable[Grid]) -> int:
    """Returns the FLOPs of encoding images of `grids`, in patches, in a forward pass of a vision tower.

    A patch attends to the patches of its frame, or to those of its window in blocks with windows. Windows cut by the
    edge of an image count as whole.
    """
    num_full = len(vision.full_attention) if vision.window else vision.depth
    hidden, joined = vision.hidden, vision.merge**2 * vision.hidden
    of_patch = 2 * hidden * vision.patch_size + vision.depth * 2 * hidden * (
        4 * hidden + vision.mlp_matrices * vision.ffn
    )
    of_token = 2 * joined * (joined + vision.out_hidden) * (1 + len(vision.deepstack))
    total = 0
    for frames, height, width in grids:
        patches, of_frame = frames * height * width, height * width
        attended = num_full * of_frame
        if vision.window:
            attended += (vision.depth - num_full) * min(of_frame, (vision.window // vision.patch) ** 2)
        total += patches * (of_patch + 4 * hidden * attended) + patches // vision.merge**2 * of_token
    return total


def positions_read(lengths: Collection[int], window: int | None = None) -> int:
    """Returns the number of pairs (token, attended position) in sequences of `lengths` tokens, with at most `window`
    positions per token."""
    beyond = (0 if window is None else max(0, length - window) for length in lengths)
    return sum((length * (length + 1) - more * (more + 1)) // 2 for length, more in zip(lengths, beyond, strict=True))


def _elements(architecture: Architecture, rows: tuple[Row, ...]) -> int:
    """Returns the number of elements of all matrices in `rows`. Vectors do not count."""
    size = sizes(architecture)
    shapes = [part.shape(size) for row in rows for part in row.parts]
    return sum(prod(shape) for shape in shapes if len(shape) == 2)


# Attention without a kernel: the number of simultaneous scores. This file has the constants, because it does not load
# torch.

SCORES_AT_ONCE = 2**25
SCORE_COPIES = 6
"""Number of fp32 copies of a block of attention scores in the backward pass: soft-capped scores, shares, gradients of
both, and temporary ones."""
FP32 = 4


def block_bytes(architecture: Architecture, num_heads: int, num_tokens: int) -> int:
    """Returns the bytes of a layer's scores and their copies. `num_heads` is the number on the rank, and `num_tokens`
    the size of a micro-batch. Returns 0 if a kernel computes attention."""
    if architecture.attention_softcap is None and not architecture.attention_sinks:
        return 0
    return SCORE_COPIES * FP32 * min(SCORES_AT_ONCE, num_heads * num_tokens**2)
