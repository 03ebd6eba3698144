"""Attention by torch's kernels, for training and engines. Loads torch.

cuDNN's kernel is disabled. torch prefers it on Hopper and newer GPUs, but it builds a plan for every new shape. That
takes tens of milliseconds on the host, and nearly every packed batch has a new shape.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models.architecture import Architecture
from rltrain.models.flops import SCORES_AT_ONCE
from rltrain.models.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnScaling,
)

CAUSAL_WINDOW, WHOLE_WINDOW = (-1, 0), (-1, -1)
FLASH_DEVICE = "cuda"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_MULTIPLE, FLASH_LARGEST_HEAD = 8, 256
"""Head sizes of the flash kernels: a multiple of the first, at most the second."""
FLASH_RELEASES = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute.interface")}
"""Releases of flash attention for GPUs, by the major number of their compute capability: torch's name of a release,
and the module that brings it."""
FUSED_DEVICE = "cuda"
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def packed_kernel() -> Callable[..., object] | None:
    """Returns torch's attention over packed rows (torch 2.11 or later), or None if it lacks a needed feature. Its
    kernels are those of the newest release of flash attention that is installed.

    It loads torch's compiler, and that takes a second. So call it only if the device has kernels for it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    kernel = _with_grouped_heads(varlen_attn)
    if kernel is not None:
        newer_flash_attention(kernel)
    return kernel


def newer_flash_attention(kernel: Callable[..., object]) -> str | None:
    """Gives torch's flash attention the kernels of FLASH_RELEASES, if they are installed for this GPU (torch 2.11 or
    later). Returns torch's name of the release, or None if torch's own kernels stay: those of FlashAttention 2.

    First `kernel`, attention over packed rows, is called with both. Results and gradients must agree.
    """
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    name, module = FLASH_RELEASES.get(major, ("", ""))
    try:
        if not name or find_spec(module) is None:
            return None
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    except ImportError:  # an older torch, or a parent of the module is missing
        return None
    expected = _flash_example(kernel)
    try:
        activate_flash_attention_impl(name)
        found = _flash_example(kernel)
        agree = all(torch.allclose(*pair, rtol=2e-2, atol=2e-2) for pair in zip(found, expected, strict=True))
        reason = "" if agree else "it differs from torch's own"
    except Exception as refusal:  # any failure of a version, GPU or compiler
        reason = f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    if reason:
        restore_flash_attention_impl(_raise_warn=False)
        logging.getLogger(__name__).warning("attention uses torch's own flash kernels, not %s: %s", name, reason)
    return None if reason else name


def _flash_example(kernel: Callable[..., object]) -> list[Tensor]:
    """Returns attention within two sequences, with grouped heads and a window, and its gradients."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(40, heads, 64, generator=generator).to(FLASH_DEVICE, torch.bfloat16) for heads in (4, 2, 2)]
    inputs = [x.requires_grad_() for x in rows]
    ends = torch.tensor([0, 13, 40], dtype=torch.int32, device=FLASH_DEVICE)
    made = kernel(*inputs, ends, ends, 27, 27, scale=0.125, window_size=_window_size(9, causal=True), enable_gqa=True)
    assert isinstance(made, Tensor), "nothing else was asked for"
    return [made.detach(), *torch.autograd.grad(made.float().square().sum(), inputs)]


@cache
def fused_kernels(device: torch.device) -> ModuleType | None:
    """Returns the module `fused` if its kernels work on `device`, or None. Then layers use torch's operators.

    They are compared with torch's operators first. Triton also needs a C compiler and a driver.
    """
    if device.type != FUSED_DEVICE:
        return None
    try:
        from rltrain.models import fused

        fused.check(device)
    except Exception as refusal:  # any failure of a version, GPU, compiler or driver
        reason = f"{type(refusal).__name__}: {refusal}".split("\n")[0]
        logging.getLogger(__name__).warning("layers use torch's operators, not fused Triton kernels: %s", reason)
        return None
    return fused


def fused_kernels_for(x: Tensor) -> ModuleType | None:
    """Returns `fused_kernels` of the tensor's device if the kernels take its type."""
    return fused_kernels(x.device) if x.dtype in FUSED_DTYPES else None


def _with_grouped_heads(kernel: Callable[..., object]) -> Callable[..., object] | None:
    """Returns `kernel` with the interface of torch 2.12: a scale, a window and `enable_gqa`. Returns None if it has no
    window.

    torch 2.11 accepts fewer key heads without `enable_gqa`.
    """
    known = signature(kernel).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    if "enable_gqa" in known:
        return kernel

    def untold(*rows: object, enable_gqa: bool, **settings: object) -> object:
        return kernel(*rows, **settings)

    return untold


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention of queries [..., heads, n, head_dim] over keys and values [..., kv_heads, m, head_dim], with
    shape [..., heads, n, head_dim of values].

    `bias` is added to the scores. `scale` is 1 / sqrt(head_dim) by default. `softcap` bends the scores first
    (`soft_capped`). `sinks` [..., heads, n or 1, 1] are additional scores with a share but no value (Xiao et al. 2023,
    arXiv:2309.17453, learned as in gpt-oss). No fused kernel supports the last two.
    """
    if softcap is not None or sinks is not None:
        if causal:
            bias = torch.ones(queries.size(-2), keys.size(-2), dtype=torch.bool, device=queries.device).tril()
        return _attend_by_scores(
            queries, keys, values, bias, sinks, scale=scale or queries.size(-1) ** -0.5, softcap=softcap
        )
    grouped = queries.size(-3) != keys.size(-3)
    with _without_cudnn():
        return F.scaled_dot_product_attention(
            queries, keys, values, bias, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def soft_capped(values: Tensor, cap: float) -> Tensor:
    """Returns cap * tanh(values / cap), computed in fp32 and rounded once."""
    return ((values.float() / cap).tanh() * cap).to(values.dtype)


def _attend_by_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Computes attention by plain products. Queries are split so that at most SCORES_AT_ONCE scores exist at a time."""
    of_each = queries.shape[:-2].numel() * keys.size(-2)
    parts = queries.split(max(1, SCORES_AT_ONCE // max(of_each, 1)), -2)
    if len(parts) > 1:
        lengths, whole = [part.size(-2) for part in parts], queries.size(-2)
        of_rows = [
            [x] * len(parts) if x is None or x.size(-2) != whole else x.split(lengths, -2) for x in (bias, sinks)
        ]
        made = [
            _attend_by_scores(part, keys, values, *of_part, scale=scale, softcap=softcap)
            for part, *of_part in zip(parts, *of_rows, strict=True)
        ]
        return torch.cat(made, -2)
    group = queries.size(-3) // keys.size(-3)
    keys, values = (x.repeat_interleave(group, -3) for x in (keys, values))
    scores = (queries @ keys.mT).float() * scale
    scores = scores if softcap is None else soft_capped(scores, softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    shares = scores.softmax(-1)
    shares = shares if sinks is None else shares[..., :-1]
    return shares.to(values.dtype) @ values


def sees(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Returns whether queries at positions `queries` [..., n] attend to keys at positions `keys` [..., m], as [..., n,
    m]. A query attends to itself and earlier positions, with `window` only to the last `window` of them."""
    distance = queries[..., :, None] - keys[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attends_packed(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Returns whether `attend_packed` accepts these tensors. It needs a GPU, half precision, equal head sizes and a
    recent torch."""
    head_dim = queries.size(-1)
    return (
        queries.device.type == FLASH_DEVICE
        and queries.dtype in FLASH_DTYPES
        and keys.size(-1) == values.size(-1) == head_dim <= FLASH_LARGEST_HEAD
        and head_dim % FLASH_HEAD_MULTIPLE == 0
        and packed_kernel() is not None
    )


def attend_packed(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    boundaries: Tensor,
    longest: int,
    *,
    key_boundaries: Tensor | None = None,
    longest_keys: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Computes attention within each of several concatenated sequences, in one launch without padding.

    queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim].
    `boundaries` [sequences + 1] int32 has the start of each sequence and the end of the last one. `longest` is the
    largest length in tokens. If a sequence has more keys than queries, `key_boundaries` and `longest_keys` describe the
    keys. Its queries are then its last tokens, because the kernel aligns the ends. With `window` a token attends to so
    many tokens, including itself. With `causal` false and without `window` it attends to the whole sequence.
    """
    kernel = packed_kernel()
    assert kernel is not None
    attended = kernel(
        queries,
        keys,
        values,
        boundaries,
        boundaries if key_boundaries is None else key_boundaries,
        longest,
        longest if longest_keys is None else longest_keys,
        scale=scale,
        window_size=_window_size(window, causal=causal),
        enable_gqa=queries.size(1) != keys.size(1),
    )
    assert isinstance(attended, Tensor), "nothing else was asked for"
    return attended


def _window_size(window: int | None, *, causal: bool) -> tuple[int, int]:
    """Returns the numbers of earlier and of later tokens that a token attends to. -1 means all."""
    if window is None:
        return CAUSAL_WINDOW if causal else WHOLE_WINDOW
    return window - 1, 0


def attend_whole(
    queries: Tensor, keys: Tensor, values: Tensor, boundaries: Tensor, longest: int, *, scale: float
) -> Tensor:
    """Returns attention [tokens, heads, head_dim] of queries, keys and values [tokens, heads, head_dim]. Each token
    attends to all tokens of its sequence. `boundaries` and `longest` are those of attend_packed."""
    if attends_packed(queries, keys, values):
        return attend_packed(queries, keys, values, boundaries, longest, scale=scale, causal=False)
    lengths = boundaries.diff().tolist()
    places = torch.arange(len(queries), device=queries.device).split(lengths)
    groups = [torch.stack([place for place in places if len(place) == length]) for length in sorted({*lengths})]
    attended = [
        attend(*(x[rows].transpose(1, 2) for x in (queries, keys, values)), scale=scale).transpose(1, 2).flatten(0, 1)
        for rows in groups
    ]
    order = torch.cat([rows.flatten() for rows in groups])
    return torch.cat(attended).index_select(0, order.argsort())


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# Rotary frequencies and rotations, equal in training and engines.


class Turn(NamedTuple):
    """The norm and the rotation of heads, as kernels take them.

    The first `half` elements of rows of `cos` and `sin` belong to the first 2 * half elements of a head. Rows are those
    of the tokens, or `angle_rows` [tokens] has the row of each token. With `pairs` neighbouring elements are rotated
    together, and the results are written as halves. Without `norms` heads are only rotated; norms multiply by the
    weights of queries and of keys plus `offset`.
    """

    cos: Tensor
    sin: Tensor
    half: int
    pairs: bool = False
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0
    offset: float = 0.0
    angle_rows: Tensor | None = None


def inverse_frequencies(architecture: Architecture, *, sliding: bool = False) -> Tensor:
    """Returns the scaled fp32 angles per position, [rotated elements of a head / 2]. With `sliding` they are those of
    layers with a window. These are not scaled if they have another base."""
    if sliding and architecture.sliding_rope_theta is not None:
        return _scaled(None, architecture.sliding_rope_theta, architecture.rotated_size)
    return _scaled(architecture.rope_scaling, architecture.rope_theta, architecture.rotated_size)


def _scaled(scaling: Scaling | None, theta: float, rotated: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / theta**exponents
    match scaling:
        case None | DynamicScaling():
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case LongRopeScaling():
            return 1.0 / (torch.tensor(scaling.divisors) * theta**exponents)
        case YarnScaling():
            kept = _kept_by_yarn(scaling, theta, rotated)
        case RopeScaling():
            kept = _kept_by_llama3(scaling, frequencies)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def axis_of_frequency(architecture: Architecture) -> Tensor | None:
    """Returns which of a token's positions rotates each frequency, int64 [rotated elements of a head / 2]: 0 for
    frames, 1 for rows, 2 for columns. None: tokens have one position."""
    mrope = architecture.mrope
    if mrope is None:
        return None
    if not mrope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(mrope.sections))
    axes = torch.zeros(architecture.rotated_size // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * mrope.sections[axis] : 3] = axis
    return axes


def halves_of_pairs(heads: Tensor, size: int | None = None) -> Tensor:
    """Reorders heads [..., head_dim] for checkpoints that rotate neighbours. Elements 0, 2, 4, ... of the first `size`
    (None: all) come first, then 1, 3, 5, ..., then the rest. Scores do not change if queries and keys are reordered
    alike."""
    size = heads.size(-1) if size is None else size
    halves = heads[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if size == heads.size(-1) else torch.cat([halves, heads[..., size:]], dim=-1)


def _kept_by_llama3(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """Returns the unscaled fraction of each frequency, [rotated / 2]. It is 1 for wavelengths below
    original_max_positions / high_freq_factor, 0 above original_max_positions / low_freq_factor, and linear between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0, 1)


def _kept_by_yarn(scaling: YarnScaling, theta: float, rotated: int) -> Tensor:
    """Returns the unscaled fraction of each frequency, [rotated / 2]. It is 1 for more than `beta_fast` turns in the
    original context, 0 for fewer than `beta_slow`, and linear between."""

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rotated - 1)
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
