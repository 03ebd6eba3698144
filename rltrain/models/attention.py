"""Attention by torch's kernels, for training and for engines. Apart from its siblings because it loads torch.

cuDNN's is left out: torch prefers it on Hopper and newer GPUs, where it builds a plan for every new shape, which takes
tens of milliseconds of the host's time, and packed batches have a new shape nearly every time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature

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

CAUSAL_WINDOW = (-1, 0)
FLASH_DEVICE = "cuda"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_MULTIPLE, FLASH_LARGEST_HEAD = 8, 256
"""Elements of a head that the flash kernels take."""


@cache
def packed_kernel() -> Callable[..., object] | None:
    """Returns torch's attention over packed rows, of 2.11 and later; earlier ones lack what a model needs of it.

    Loads torch's compiler, which takes a second, so it is asked for only where there are kernels for it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return _with_grouped_heads(varlen_attn)


def _with_grouped_heads(kernel: Callable[..., object]) -> Callable[..., object] | None:
    """Returns `kernel` as torch 2.12 has it: with a scale, a window and `enable_gqa`; None where it has no window.

    torch 2.11's takes fewer heads of keys than of queries without being told.
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
    """queries [..., heads, n, head_dim], keys and values [..., kv_heads, m, head_dim] -> [..., heads, n, head_dim of
    values]. `bias` is added to the scores; their `scale` is 1 / sqrt(head_dim) unless given. With `softcap` they are
    bent first; `sinks` [..., heads, n or 1, 1] are scores that take their share and give nothing (Xiao et al. 2023,
    arXiv:2309.17453, as gpt-oss learns them). No fused kernel has either."""
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
    """cap * tanh(values / cap), computed in fp32 and rounded once."""
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
    """By plain products, of so many queries at a time that their scores are no more than SCORES_AT_ONCE."""
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
    """Whether a query at each of the positions `queries` [..., n] attends to keys at the positions `keys` [..., m]:
    [..., n, m], to itself and those before it, with `window` to the last so many of them."""
    distance = queries[..., :, None] - keys[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attends_packed(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_packed` takes these: on a GPU, in half precision, all heads of one size, a recent torch."""
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
) -> Tensor:
    """Causal attention within each of several sequences that lie end to end, in one launch without any padding.

    queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] -> [tokens, heads, head_dim].
    `boundaries` [sequences + 1] int32 are where sequences start and the last one ends; `longest` of them in tokens.
    Where a sequence has more keys than queries, `key_boundaries` and `longest_keys` are those of keys, and its queries
    are the last of its tokens: the kernel's causality is aligned with the ends. With `window` a token attends to so
    many, itself among them.
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
        window_size=CAUSAL_WINDOW if window is None else (window - 1, 0),
        enable_gqa=queries.size(1) != keys.size(1),
    )
    assert isinstance(attended, Tensor), "nothing else was asked for"
    return attended


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# Rotary frequencies, which training and engines must compute alike. Apart from its siblings because it loads torch.


def inverse_frequencies(architecture: Architecture, *, sliding: bool = False) -> Tensor:
    """[rotated elements of a head / 2] fp32 angles per position, scaled as the model's are; with `sliding` those of
    layers with a window, which are not scaled where they have a base of their own."""
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


def halves_of_pairs(heads: Tensor, size: int | None = None) -> Tensor:
    """Elements 0, 2, 4, ... of the first `size` (None: all) of `heads` [..., head_dim], then 1, 3, 5, ... of them, then
    the rest: some checkpoints have those side by side that are rotated together. Of queries and of keys alike, this
    changes no score."""
    size = heads.size(-1) if size is None else size
    halves = heads[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves if size == heads.size(-1) else torch.cat([halves, heads[..., size:]], dim=-1)


def _kept_by_llama3(scaling: RopeScaling, frequencies: Tensor) -> Tensor:
    """[rotated / 2] how much of each frequency stays: all of wavelengths below original_max_positions /
    high_freq_factor, nothing of those above original_max_positions / low_freq_factor, a linear part of those
    between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0, 1)


def _kept_by_yarn(scaling: YarnScaling, theta: float, rotated: int) -> Tensor:
    """[rotated / 2] how much of each frequency stays: all of those that turn more than `beta_fast` times in the
    original context, nothing of those that turn less than `beta_slow` times, a linear part of those between."""

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    first, last = max(low, 0), min(high, rotated - 1)
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
