"""Device memory that the embedded engine needs beside its weights, keys and values, and what it may take for these."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rltrain.config.schema import Config
from rltrain.models import Architecture
from rltrain.models.delta_net import CHUNK_TOKENS
from rltrain.models.table import item_bytes
from rltrain.rollout.layout import ARRIVING_BYTES, engine_layout
from rltrain.runtime.grid import Grid

FP32 = 4
MIB = 2**20
PASS_TOKENS = 8192
"""Padded tokens of one pass over prompts; bounds its activations. A longer prompt stands alone."""
SAMPLING_COPIES = 3
"""Of the running responses' logits in fp32, while tokens are drawn: logits, probabilities, their sums."""
PLACE_BYTES = 32
"""Of a token: its id, its position, and where it comes from and goes to."""
WEIGHT_SYNC_BUFFERS = 4
"""Of weight_sync.bucket_mb: two that a rank packs and two that it receives into."""
LOST_SHARE = 0.05
"""Of a device's memory, between the allocator's blocks."""


@dataclass(frozen=True)
class Workspace:
    """Bytes on one rank. Recorded decode steps have memory of their own, which a pass over prompts does not share."""

    logits: int
    """Of the running responses, while they draw."""
    decoding: int
    """Activations of their decode step."""
    prefill: int
    dequantized: int
    """The largest of the matrices in FP8, as products read it."""

    @property
    def activations(self) -> int:
        return self.decoding + self.prefill + self.dequantized

    @property
    def generating(self) -> int:
        return self.logits + self.activations


def workspace(
    architecture: Architecture,
    grid: Grid,
    *,
    num_running: int,
    prefill_tokens: int,
    item_bytes: int,
    residual_bytes: int | None = None,
    fp8: bool = False,
) -> Workspace:
    """Of engines of `grid` with `num_running` responses at once and `prefill_tokens` in one pass over prompts."""
    of_token = token_bytes(architecture, grid, item_bytes, residual_bytes or item_bytes)
    return Workspace(
        logits=num_running * architecture.vocab_size * FP32 * SAMPLING_COPIES,
        decoding=num_running * of_token,
        prefill=prefill_tokens * of_token,
        dequantized=largest_matrix(architecture, grid.tp, grid.ep) * (FP32 + item_bytes) if fp8 else 0,
    )


def workspace_beside_cache(config: Config, architecture: Architecture, grid: Grid, role: str) -> int:
    """Bytes on a rank of a role's engines, where as many responses run as may, and weights arrive; while an evaluation
    goes on by engines of its own those of the next one do."""
    settings, model = config.served(role), config.model
    fp8 = settings.dtype == "fp8"
    needed = workspace(
        architecture,
        grid,
        num_running=settings.max_running_requests,
        prefill_tokens=max(PASS_TOKENS, settings.max_context_tokens),
        item_bytes=item_bytes(model.dtype),
        residual_bytes=item_bytes(model.residual),
        fp8=fp8,
    )
    buckets = WEIGHT_SYNC_BUFFERS * config.weight_sync.bucket_mb * MIB
    if role == "evaluation":
        return needed.generating + buckets + ARRIVING_BYTES
    return needed.logits + needed.decoding + max(needed.prefill + needed.dequantized, buckets)


def room_for_cache(free_bytes: float, device_bytes: float, beside: int) -> int:
    """What rollout.kv_cache_gb: auto is on a GPU with `free_bytes` of its `device_bytes`, of which an engine needs
    `beside` for other things while it has its keys and values."""
    return max(0, int(free_bytes - device_bytes * LOST_SHARE - beside))


def token_bytes(architecture: Architecture, grid: Grid, item_bytes: int, residual_bytes: int) -> int:
    """Of one token at most at once, in its way through an engine's layers: in its attention, its MLP, or the experts
    that it visits, beside the residual stream, its rotation and its place."""
    rotated = architecture.mla.rope_head_dim if architecture.mla else architecture.head_dim
    stream = architecture.hidden_size * residual_bytes + 2 * rotated * FP32 + PLACE_BYTES
    attention = _latent_attention if architecture.mla else _grouped_attention
    widest = max(attention(architecture, grid, item_bytes), _feed_forward(architecture, grid) * item_bytes)
    return stream + max(widest, _delta_net(architecture, grid, item_bytes))


def _grouped_attention(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """What is projected, queries and keys once more as they are normed, and in fp32 while they are rotated: as they
    are, times the cosines, and with their halves swapped."""
    keys = max(architecture.kv_size // grid.tp, architecture.head_dim)
    turned = architecture.query_size // grid.tp + keys
    copies = 3 if item_bytes < FP32 else 2
    return (turned + keys + turned) * item_bytes + copies * turned * FP32


def _delta_net(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """What is projected, and of a pass over prompts, in fp32: what the convolution makes; of every head its queries and
    keys with what is left of them between chunks, its values, its changes before and after they are solved, and the
    scores of a chunk."""
    if architecture.delta is None:
        return 0
    delta = architecture.delta.shared_by(grid.tp)
    of_a_head = 5 * delta.key_dim + 4 * delta.value_dim + 4 * CHUNK_TOKENS
    wide = 2 * delta.channels + delta.num_heads * of_a_head
    return (2 * delta.channels + delta.values) * item_bytes + wide * FP32


def _latent_attention(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """Latents as projected and as normed, those kept; of every head queries and keys, each also put together."""
    mla = architecture.mla
    assert mla is not None
    kept = mla.kv_rank + mla.rope_head_dim
    latents = architecture.hidden_size + 2 * ((mla.q_rank or 0) + kept) + kept
    of_a_head = 4 * architecture.head_dim + 2 * mla.value_head_dim
    return (latents + architecture.num_heads * of_a_head // grid.tp) * item_bytes


def _feed_forward(architecture: Architecture, grid: Grid) -> int:
    """Elements: the normed token, gate (where there is one), up and what becomes of them; of experts for every visit,
    with what they take and make, which is then put into the order of the tokens."""
    hidden, moe = architecture.hidden_size, architecture.moe
    widest = hidden + architecture.mlp_matrices * architecture.ffn_hidden_size // grid.tp
    if moe:
        inner = 3 * moe.ffn_hidden_size * grid.ep // grid.tp
        widest = max(widest, 2 * hidden + moe.top_k * (3 * hidden + inner))
    return widest


@lru_cache(maxsize=1024)
def largest_matrix(architecture: Architecture, tp: int, ep: int) -> int:
    """Elements on a rank of the largest parameter of a layer, in which a layer's experts lie together."""
    parameters = engine_layout(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep)).on(0).parameters
    return max(prod(shape) for name, shape in parameters if ".layers." in name)
