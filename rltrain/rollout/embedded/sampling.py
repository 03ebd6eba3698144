"""Drawing tokens from logits with random numbers that depend only on the request's seed and the position."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.engine import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 23
"""A float32 holds (k + 1/2) / 2**23 exactly for every k below 2**23: never 0, never 1."""


def mix64(values: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors (wrapping arithmetic, shifts made logical by masks)."""
    values = (values ^ _shift_right(values, 30)) * _MULTIPLIER_1
    values = (values ^ _shift_right(values, 27)) * _MULTIPLIER_2
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_streams(seeds: list[int], device: torch.device) -> Tensor:
    """[len(seeds)] int64: where each request's sequence of random numbers starts."""
    signed = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return mix64(torch.tensor(signed, dtype=torch.int64, device=device))


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """Float32 numbers in (0, 1), one per element: number `positions` of each stream."""
    bits = _shift_right(mix64(torch.add(streams, positions, alpha=_GOLDEN)), 64 - _UNIFORM_BITS)
    return (bits + 0.5) * 2.0**-_UNIFORM_BITS


def draw(logits: Tensor, numbers: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [rows, vocab] float32, and its log-prob; both [rows].

    `numbers` [rows] are `uniforms`; greedy drawing does not look at them. Log-probs are of the tempered but untruncated
    distribution (temperature 1 when greedy).
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], torch.log_softmax(logits, -1).gather(-1, tokens)[:, 0]
    tempered = logits if sampling.temperature == 1 else logits / sampling.temperature
    probabilities = torch.softmax(tempered, -1)
    numbers = numbers[:, None]
    if sampling.top_k or sampling.top_p < 1:
        kept, ids = truncate(probabilities, sampling.top_p, sampling.top_k)
        tokens = ids.gather(-1, invert_cdf(kept, numbers))
    else:
        tokens = invert_cdf(probabilities, numbers)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def invert_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[rows, 1] first index whose cumulative weight exceeds `numbers` [rows, 1] times the row's total.

    Rows that hold NaN give their last index, so that the caller can find and report them.
    """
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1)


def truncate(probabilities: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Kept probabilities (others 0) in descending order, and their token ids; both [rows, at most vocab].

    The `top_k` most likely tokens stay (0: all), then the fewest of these that reach `top_p` of their joint mass.
    """
    num_kept = min(top_k, probabilities.shape[-1]) if top_k else probabilities.shape[-1]
    if top_k:
        ordered, ids = torch.topk(probabilities, num_kept, dim=-1)
    else:
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    if top_p < 1:
        cumulative = ordered.cumsum(-1)
        before = F.pad(cumulative[:, :-1], (1, 0))
        ordered = ordered.masked_fill(before >= top_p * cumulative[:, -1:], 0)
    return ordered, ids
