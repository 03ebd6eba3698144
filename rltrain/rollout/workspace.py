"""Device memory of the embedded engine other than weights and KV cache, and the room left for the KV cache."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rltrain.config.schema import Config, VisionSettings
from rltrain.models import Architecture
from rltrain.models.delta_net import CHUNK_TOKENS
from rltrain.models.table import item_bytes
from rltrain.models.vision import Vision
from rltrain.rollout.layout import ARRIVING_BYTES, engine_layout
from rltrain.runtime.grid import Grid

FP32 = 4
MIB = 2**20
PASS_TOKENS = 8192
"""Padded tokens of one prefill pass. This bounds its activations. A longer prompt gets a pass for itself."""
SAMPLING_COPIES = 3
"""Copies of the running responses' logits in fp32 during sampling: logits, probabilities and their sums."""
PLACE_BYTES = 32
"""Bytes of bookkeeping per token: its id, its position, its source and its destination."""
WEIGHT_SYNC_BUFFERS = 4
"""Buffers of weight_sync.bucket_mb on a rank: two for packing and two for receiving."""
LOST_SHARE = 0.05
"""Share of the device's memory lost between the allocator's blocks."""


@dataclass(frozen=True)
class Workspace:
    """Bytes on one rank. Recorded decode steps have separate memory, not shared with a prefill pass."""

    logits: int
    """Logits of the running responses during sampling."""
    decoding: int
    """Activations of a decode step."""
    prefill: int
    """Activations of a prefill pass, or of the vision tower before it."""
    dequantized: int
    """The largest FP8 matrix, dequantized for a product."""
    features: int = 0
    """Features of the images of a prefill pass, and those kept of earlier ones."""

    @property
    def activations(self) -> int:
        return self.decoding + self.prefill + self.dequantized + self.features

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
    vision: VisionSettings | None = None,
) -> Workspace:
    """Returns the workspace of engines with `num_running` responses at once and `prefill_tokens` per prefill pass.

    `vision` are the settings of images, if the model has a tower. All tokens of a pass may be of images.
    """
    of_token = token_bytes(architecture, grid, item_bytes, residual_bytes or item_bytes)
    return Workspace(
        logits=num_running * architecture.vocab_size * FP32 * SAMPLING_COPIES,
        decoding=num_running * of_token,
        prefill=max(prefill_tokens * of_token, _tower_bytes(architecture.vision, vision, prefill_tokens, item_bytes)),
        features=_feature_bytes(architecture.vision, vision, prefill_tokens, item_bytes),
        dequantized=largest_matrix(architecture, grid.tp, grid.ep) * (FP32 + item_bytes) if fp8 else 0,
    )


def workspace_beside_cache(config: Config, architecture: Architecture, grid: Grid, role: str) -> int:
    """Returns the bytes on a rank of a role's engines outside weights and KV cache.

    They suffice for the most running responses and for arriving weights. The weights of the next evaluation arrive
    while engines of role evaluation are running.
    """
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
        vision=model.vision,
    )
    buckets = WEIGHT_SYNC_BUFFERS * config.weight_sync.bucket_mb * MIB
    if role == "evaluation":
        return needed.generating + buckets + ARRIVING_BYTES
    beside = needed.logits + needed.decoding + needed.features
    return beside + max(needed.prefill + needed.dequantized, buckets)


def room_for_cache(free_bytes: float, device_bytes: float, beside: int) -> int:
    """Returns the bytes of rollout.kv_cache_gb: auto on a GPU with `free_bytes` of `device_bytes`.

    The engine needs `beside` bytes for other purposes at the same time.
    """
    return max(0, int(free_bytes - device_bytes * LOST_SHARE - beside))


def token_bytes(architecture: Architecture, grid: Grid, item_bytes: int, residual_bytes: int) -> int:
    """Returns the most bytes in use at once for one token on its way through an engine's layers.

    This is the largest of attention, MLP and experts, plus the residual stream, the rotation and the bookkeeping.
    """
    rotated = architecture.mla.rope_head_dim if architecture.mla else architecture.head_dim
    stream = architecture.hidden_size * residual_bytes + 2 * rotated * FP32 + PLACE_BYTES
    attention = _latent_attention if architecture.mla else _grouped_attention
    widest = max(attention(architecture, grid, item_bytes), _feed_forward(architecture, grid) * item_bytes)
    return stream + max(widest, _delta_net(architecture, grid, item_bytes))


def _grouped_attention(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """Returns the bytes per token of the projections, the normed queries and keys, and their rotation in fp32.

    The rotation needs the originals, their product with the cosines, and a copy with swapped halves.
    """
    keys = max(architecture.kv_size // grid.tp, architecture.head_dim)
    turned = architecture.query_size // grid.tp + keys
    copies = 3 if item_bytes < FP32 else 2
    return (turned + keys + turned) * item_bytes + copies * turned * FP32


def _delta_net(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """Returns the bytes per token of a gated delta net, including the fp32 tensors of a prefill pass.

    These are the output of the convolution and several tensors per head. Per head they are queries and keys with their
    remainders between chunks, values, changes before and after solving, and the scores of a chunk.
    """
    if architecture.delta is None:
        return 0
    delta = architecture.delta.shared_by(grid.tp)
    of_a_head = 5 * delta.key_dim + 4 * delta.value_dim + 4 * CHUNK_TOKENS
    wide = 2 * delta.channels + delta.num_heads * of_a_head
    return (2 * delta.channels + delta.values) * item_bytes + wide * FP32


def _latent_attention(architecture: Architecture, grid: Grid, item_bytes: int) -> int:
    """Returns the bytes per token of latents before and after the norm, kept latents, and each head's queries and keys.
    The latter are also counted a second time in concatenated form."""
    mla = architecture.mla
    assert mla is not None
    kept = mla.kv_rank + mla.rope_head_dim
    latents = architecture.hidden_size + 2 * ((mla.q_rank or 0) + kept) + kept
    of_a_head = 4 * architecture.head_dim + 2 * mla.value_head_dim
    return (latents + architecture.num_heads * of_a_head // grid.tp) * item_bytes


def _feed_forward(architecture: Architecture, grid: Grid) -> int:
    """Returns the elements per token of the normed input, the gate (if any), the up projection and their product.

    For experts these count once per visit, with inputs and outputs, and outputs once more in token order.
    """
    hidden, moe = architecture.hidden_size, architecture.moe
    widest = hidden + architecture.mlp_matrices * architecture.ffn_hidden_size // grid.tp
    if moe:
        inner = 3 * moe.ffn_hidden_size * grid.ep // grid.tp
        widest = max(widest, 2 * hidden + moe.top_k * (3 * hidden + inner))
    return widest


@lru_cache(maxsize=1024)
def largest_matrix(architecture: Architecture, tp: int, ep: int) -> int:
    """Returns the elements of the largest layer parameter on a rank. All experts of a layer form one parameter."""
    parameters = engine_layout(architecture, Grid(tuple(range(tp)), tp=tp, ep=ep)).on(0).parameters
    return max(prod(shape) for name, shape in parameters if ".layers." in name)


# Images.

_PATCH_COPIES = 3
"""Copies in fp32 of pixels while they are cut into patches."""
_BLOCK_COPIES, _WIDE_COPIES = 9, 6
"""Tensors with the hidden size per patch in a block of a tower, in the dtype of the model and in fp32. They are the
residual stream, its norm, and queries, keys and values before and after the rotation. The rotation is in fp32."""
_FFN_COPIES = 3


def _tower_bytes(vision: Vision | None, settings: VisionSettings | None, prefill_tokens: int, item_bytes: int) -> int:
    """Returns the bytes of the activations of a tower for the patches that it encodes at a time."""
    if vision is None or settings is None:
        return 0
    num_patches = min(settings.max_patches, prefill_tokens * vision.merge**2)
    attention = vision.hidden * (_BLOCK_COPIES * item_bytes + _WIDE_COPIES * FP32)
    feed_forward = (2 * vision.hidden + _FFN_COPIES * vision.ffn) * item_bytes
    pixels = vision.patch_size * FP32
    return num_patches * max(_PATCH_COPIES * pixels, pixels + max(attention, feed_forward))


def _feature_bytes(vision: Vision | None, settings: VisionSettings | None, prefill_tokens: int, item_bytes: int) -> int:
    """Returns the bytes of features, by image and in the order of a pass, and of those kept."""
    if vision is None or settings is None:
        return 0
    of_token = vision.out_hidden * (1 + len(vision.deepstack)) * item_bytes
    return 2 * prefill_tokens * of_token + int(settings.engine_cache_gb * 1e9)
