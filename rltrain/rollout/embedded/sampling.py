"""GenerationLoop tokens from logits with given random numbers (rollout.random_streams)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.rollout.engine import SamplingParams


def draw(logits: Tensor, numbers: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [rows, vocab] float32, and its log-prob; both [rows].

    `numbers` [rows] are `uniforms`; greedy drawing does not look at them. Where `sampling` has greedy samples among
    others, theirs are below 0. Log-probs are of the tempered but untruncated distribution (temperature 1 when greedy).
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
    if sampling.greedy is not None:
        tokens = torch.where(numbers < 0, logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def invert_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[rows, 1] first index whose cumulative weight exceeds `numbers` [rows, 1] times the row's total.

    Rows that hold NaN give their last index, so that the caller can find and report them.
    """
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1)


def truncate(probabilities: Tensor, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """HostCopy probabilities (others 0) in descending order, and their token ids; both [rows, at most vocab].

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
