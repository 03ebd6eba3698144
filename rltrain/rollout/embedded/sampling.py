"""Draws tokens from logits by the Gumbel maximum, with the random numbers of random_streams.

Each token has a uniform number of its own. The token whose log(number) / weight is largest is drawn: each token with
the probability that its weight has of the total. Rounding changes the token at a near tie alone, while the edges of a
cumulative sum move with it. The largest is taken of blocks of tokens first, then of the tokens in that block: so a draw
makes a number per block, not one per token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.embedded.random_streams import NO_STREAM, log_uniforms, random_streams
from rltrain.rollout.engine import SamplingParams

BLOCK_TOKENS = 128
FIRST_BLOCK = 1 << 32
"""The counter of the first block's number. Those of tokens are below."""

Draw = Callable[[Tensor, Tensor, Tensor, SamplingParams], tuple[Tensor, Tensor]]
"""Has the arguments and the results of `draw`."""


def draw(logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Returns one token per row of `logits` [rows, vocab] float32, and its log-prob; both [rows].

    `streams` and `positions` [rows] int64 name the random numbers. A row is greedy where its stream is NO_STREAM and
    `sampling` has greedy samples among others. Log-probs are those of the tempered distribution before truncation, of
    temperature 1 where it is 0. A row that is not finite gives some token, and a log-prob that is not finite.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], torch.log_softmax(logits, -1).gather(-1, tokens)[:, 0]
    probabilities = torch.softmax(logits if sampling.temperature == 1 else logits / sampling.temperature, -1)
    of_rows = streams[:, None], positions[:, None]
    if not truncates(sampling):
        tokens = race(probabilities, *of_rows)
    else:
        kept, ids = truncate(probabilities, sampling.top_p, sampling.top_k)
        if kept.shape[1] <= BLOCK_TOKENS:
            tokens = ids.gather(-1, _largest(kept, *of_rows, ids))
        else:
            tokens = race(torch.zeros_like(probabilities).scatter_(-1, ids, kept), *of_rows)
    if sampling.greedy is not None:
        tokens = torch.where(streams[:, None] == NO_STREAM, logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def race(weights: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """Returns [rows, 1] tokens, each with a probability proportional to its row of `weights` [rows, vocab].

    `streams` and `positions` are [rows, 1]. A row that holds NaN gives a place of one.
    """
    rows, vocab = weights.shape
    if vocab <= BLOCK_TOKENS:
        return _largest(weights, streams, positions, torch.arange(vocab, device=weights.device))
    blocks = F.pad(weights, (0, -vocab % BLOCK_TOKENS)) if vocab % BLOCK_TOKENS else weights
    blocks = blocks.view(rows, -1, BLOCK_TOKENS)
    numbers = torch.arange(blocks.shape[1], device=weights.device)
    block = _largest(blocks.sum(-1), streams, positions, numbers + FIRST_BLOCK)
    tokens = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=weights.device)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS))[:, 0]
    return tokens.gather(-1, _largest(within, streams, positions, tokens))


def _largest(weights: Tensor, streams: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Returns [rows, 1] places of the largest log(number) / weight."""
    return log_uniforms(streams, positions, counters).div_(weights).argmax(-1, keepdim=True)


def truncates(sampling: SamplingParams) -> bool:
    """Returns whether tokens are left out of the draw."""
    return bool(sampling.top_k) or sampling.top_p < 1


def truncate(probabilities: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns kept probabilities (others 0) in descending order, and their token ids; both [rows, at most vocab].

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


def draw_by_kernel(
    logits: Tensor, streams: Tensor, positions: Tensor, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Returns what `draw` returns. A Triton kernel reads the logits once where all tokens take part."""
    if truncates(sampling) and sampling.temperature > 0:
        return draw(logits, streams, positions, sampling)
    from rltrain.rollout.embedded.sampling_kernel import draw_rows  # not without Triton

    return draw_rows(logits, streams, positions, sampling.temperature)


def choose_draw(device: torch.device) -> tuple[Draw, str]:
    """Returns the fastest draw that works on `device`, and why the kernel is not used where a GPU could have it."""
    if device.type != "cuda":
        return draw, ""
    try:
        wrong = num_differences(device)
    except Exception as refusal:  # whatever a version, a GPU, a compiler or a driver has against it
        return draw, f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return (draw, f"it draws {wrong} of 64 tokens otherwise") if wrong else (draw_by_kernel, "")


@torch.inference_mode()
def num_differences(device: torch.device) -> int:
    """Returns how many of 64 draws the kernel makes otherwise than `draw`. Raises whatever the kernel does."""
    rows, sampling = 64, SamplingParams(0.7, 1.0, 0, 1, ())
    logits = torch.randn(rows, 3000, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    streams, positions = random_streams([*range(rows)], device), torch.arange(rows, device=device)
    found, expected = (function(logits, streams, positions, sampling) for function in (draw_by_kernel, draw))
    differ = (found[0] != expected[0]) | ((found[1] - expected[1]).abs() < 1e-3).logical_not_()
    return int(differ.sum())
