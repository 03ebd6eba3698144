"""Gated delta nets (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", arXiv:2412.06464): a short causal
convolution and the gated delta rule. For concatenated whole samples and for one token per sample, in training and
engines. Loads torch.

For each sample, a layer keeps a state S [key_dim, value_dim] per value head and the last inputs of the convolution. A
token has a key k, value v, query q, decay g <= 0 and weight b. It computes S' = exp(g) S, then S = S' + k (b (v - k
S'))^T, and outputs q S. Keys and queries have unit length. The arithmetic is fp32 or wider.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.delta_net import CHUNK_TOKENS, DeltaNet

LEAST_CHUNK_TOKENS = 16
UNIT_EPS = 1e-6
"""Added to the sum of squares when a key or query is normalised to unit length."""


class PackedStates(NamedTuple):
    """The order of computation for concatenated samples.

    Samples are cut into chunks of `chunk_tokens`. The first chunks of all samples come first, then all second chunks,
    and so on. Longer samples come first among them. For the convolution, each sample has a gap before it for earlier
    tokens.
    """

    chunk_tokens: int
    token_of_place: Tensor
    """[chunks * chunk_tokens]: the token at each place in the chunks. Padding has the number of tokens."""
    place_of_token: Tensor
    """[tokens]: the place of each token in the chunks."""
    num_samples: tuple[int, ...]
    """Number of samples with a first chunk, with a second one, ..."""
    by_length: Tensor
    """[samples]: samples in order of decreasing number of chunks."""
    order: Tensor
    """[samples]: position of each sample in `by_length`."""
    token_of_row: Tensor
    """[gaps and tokens]: the token in each row of the convolution's input. Gaps have the number of tokens."""
    row_of_token: Tensor
    """[tokens]: the row of each token."""
    gaps: Tensor
    """[samples, gap]: the rows before each sample."""
    tails: Tensor
    """[samples, gap]: the last rows of each sample. A short sample includes rows of its gap."""


def packed_states(lengths: Sequence[int], kernel: int, device: torch.device) -> PackedStates:
    """Returns the order for samples of these lengths (at least 1 each) and a convolution over `kernel` tokens."""
    sizes, gap = torch.tensor(lengths), kernel - 1
    longest = int(sizes.max())
    chunk = min(CHUNK_TOKENS, max(LEAST_CHUNK_TOKENS, 1 << (longest - 1).bit_length()))
    num_chunks = -(-sizes // chunk)
    by_length = num_chunks.argsort(descending=True, stable=True)
    order = torch.empty_like(by_length)
    order[by_length] = torch.arange(len(sizes))
    num_samples = (num_chunks > torch.arange(int(num_chunks.max()))[:, None]).sum(1)
    first_chunks = num_samples.cumsum(0) - num_samples
    ends, sample = sizes.cumsum(0), torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    num_tokens = int(ends[-1])
    positions = torch.arange(num_tokens) - (ends - sizes)[sample]
    places = (first_chunks[positions // chunk] + order[sample]) * chunk + positions % chunk
    token_of_place = torch.full((int(num_samples.sum()) * chunk,), num_tokens)
    token_of_place[places] = torch.arange(num_tokens)
    rows = torch.arange(num_tokens) + (sample + 1) * gap
    token_of_row = torch.full((num_tokens + len(sizes) * gap,), num_tokens)
    token_of_row[rows] = torch.arange(num_tokens)
    first_rows, within = ends - sizes + torch.arange(len(sizes)) * gap, torch.arange(gap)
    return PackedStates(
        chunk_tokens=chunk,
        token_of_place=token_of_place.to(device),
        place_of_token=places.to(device),
        num_samples=tuple(num_samples.tolist()),
        by_length=by_length.to(device),
        order=order.to(device),
        token_of_row=token_of_row.to(device),
        row_of_token=rows.to(device),
        gaps=(first_rows[:, None] + within).to(device),
        tails=((first_rows + sizes)[:, None] + within).to(device),
    )


def convolve(
    inputs: Tensor, weight: Tensor, packed: PackedStates, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes SiLU of each channel's causal convolution within its sample, rounded once to the dtype of `inputs`.

    inputs [tokens, channels]. weight [channels, kernel], with the token itself last. before [samples, kernel - 1,
    channels] are the inputs before each sample (None: zeros). Returns the outputs [tokens, channels] and the last
    inputs of each sample, the `before` of the next call.
    """
    rows: Tensor = _Rows.apply(inputs, packed.token_of_row, packed.row_of_token)
    if before is not None:
        rows = rows.index_copy(0, packed.gaps.flatten(), before.flatten(0, 1).to(rows.dtype))
    kernel = weight.size(1)
    wide = _wide(inputs)
    count, taps = len(rows) - kernel + 1, weight.to(wide).t()
    summed = rows[:count] * taps[0]
    for shift in range(1, kernel):
        summed = torch.addcmul(summed, rows[shift : shift + count].to(wide), taps[shift])
    outputs: Tensor = _Rows.apply(summed, packed.row_of_token - kernel + 1, packed.token_of_row[kernel - 1 :])
    last = rows[packed.tails.flatten()].view(*packed.tails.shape, -1)
    return F.silu(outputs).to(inputs.dtype), last


def convolve_step(inputs: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Computes one step of `convolve` for one new token per sample.

    inputs [samples, channels] are the new tokens. weight [channels, kernel] has the weight of the new token last.
    before [samples, kernel - 1, channels] are the previous inputs, oldest first. They are updated in place: the oldest
    leaves and the new token is added. Returns SiLU of the convolution, [samples, channels], in the dtype of `inputs`.
    """
    wide = _wide(inputs)
    window = torch.cat([before, inputs[:, None].to(before.dtype)], dim=1)
    before.copy_(window[:, 1:])
    summed = (window.to(wide) * weight.to(wide).t()).sum(1)
    return F.silu(summed).to(inputs.dtype)


def gates(weights: Tensor, decays: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (weights, log decays), [tokens, heads] in fp32: the share of a token that each head takes, and the log of
    the kept share of its state. The inputs are a token's projections, and each head's rate and bias [heads]."""
    wide = _wide(weights)
    rates = log_rate.to(wide).exp()
    return weights.to(wide).sigmoid(), -rates * F.softplus(decays.to(wide) + bias.to(wide))


def gated_delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor,
    decays: Tensor,
    packed: PackedStates,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the gated delta rule for concatenated samples.

    - queries and keys: [tokens, key_heads, key_dim], each for several consecutive value heads
    - values: [tokens, heads, value_dim]
    - weights and decays: [tokens, heads], as returned by `gates`
    - initial: [samples, heads, key_dim, value_dim], the states before the samples (None: zeros)

    Returns the outputs [tokens, heads, value_dim] in the dtype of `values`, and the states after the samples.

    Within a chunk, each token's change of the state depends on the earlier ones. The changes are the solution of a
    triangular system (section 3.3 of the paper, and Yang et al. 2024, arXiv:2406.06484).
    """
    wide, shared = _wide(values), values.size(1) // keys.size(1)
    q, k, v = (_in_chunks(x, packed).to(wide) for x in (queries, keys, values))
    q, k = _unit(q) * q.size(-1) ** -0.5, _unit(k)
    weight, decay = (_in_chunks(x[..., None].to(wide), packed) for x in (weights, decays))
    kept = decay.squeeze(-1).cumsum(-1)
    later = torch.ones(packed.chunk_tokens, packed.chunk_tokens, dtype=torch.bool, device=v.device).triu(1)
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(later, -torch.inf).exp()
    of_keys, of_queries = ((x @ k.mT).repeat_interleave(shared, 1) * between for x in (k, q))
    q, k = (x.repeat_interleave(shared, 1) for x in (q, k))
    since, until = kept.exp()[..., None], (kept[..., -1:] - kept).exp()[..., None]
    changes = torch.cat([v * weight, k * (weight * since)], dim=-1)
    solved = torch.linalg.solve_triangular(of_keys * weight, changes, upper=False, unitriangular=True)
    new, of_state = solved.split([v.size(-1), k.size(-1)], dim=-1)
    scan = _Chunks(q * since, of_queries, new, of_state, k * until, since[:, :, -1:])
    if initial is None:
        state = v.new_zeros(len(packed.by_length), v.size(1), k.size(-1), v.size(-1))
    else:
        state = initial.index_select(0, packed.by_length).to(wide)
    outputs, final = _scanned(scan, state, packed.num_samples)
    flat = outputs.transpose(1, 2).flatten(0, 1)
    in_order: Tensor = _Rows.apply(flat, packed.place_of_token, packed.token_of_place)
    return in_order.to(values.dtype), final.index_select(0, packed.order)


def delta_rule_step(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, decays: Tensor, states: Tensor
) -> Tensor:
    """Computes `gated_delta_rule` for one token per sample. Updates `states` [samples, heads, key_dim, value_dim] in
    place."""
    shared = values.size(1) // keys.size(1)
    q, k = (_unit(x.to(states.dtype)).repeat_interleave(shared, 1) for x in (queries, keys))
    states.mul_(decays.to(states.dtype).exp()[..., None, None])
    known = (k[:, :, None] @ states)[:, :, 0]
    change = (values.to(states.dtype) - known) * weights.to(states.dtype)[..., None]
    states.addcmul_(k[..., None], change[:, :, None])
    return ((q * q.size(-1) ** -0.5)[:, :, None] @ states)[:, :, 0].to(values.dtype)


def gated_norm(heads: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns RMSNorm of each head [..., value_dim] times SiLU of its gate. Computed in fp32 and rounded once to the
    dtype of `gate`."""
    wide = _wide(heads)
    normed = F.rms_norm(heads.to(wide), heads.shape[-1:], weight.to(wide), eps)
    return (normed * F.silu(gate.to(wide))).to(gate.dtype)


class DeltaHeads:
    """The heads of a layer with its weights. They compute outputs [tokens, values] from projected inputs [tokens, ...].

    `norm` [value_dim] is the weight of the heads' norm.
    """

    def __init__(
        self, delta: DeltaNet, *, convolution: Tensor, log_rate: Tensor, bias: Tensor, norm: Tensor, eps: float
    ) -> None:
        self._delta, self._convolution, self._log_rate, self._bias = delta, convolution, log_rate, bias
        self._head_norm, self._eps = norm, eps

    def whole(
        self, projected: Tensor, packed: PackedStates, before: Tensor | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Processes whole samples, or their continuations after `before` and `initial`.

        Returns (outputs, last inputs of the convolution, states after the samples).
        """
        mixed, gate, taken, kept = self._split(projected)
        mixed, last = convolve(mixed, self._convolution, packed, before)
        heads, final = gated_delta_rule(*self._heads(mixed), taken, kept, packed, initial)
        return self._normed(heads, gate), last, final

    def step(self, projected: Tensor, before: Tensor, states: Tensor) -> Tensor:
        """Processes one token of each sample. Returns the outputs and updates `before` and `states` in place."""
        mixed, gate, taken, kept = self._split(projected)
        mixed = convolve_step(mixed, self._convolution, before)
        return self._normed(delta_rule_step(*self._heads(mixed), taken, kept, states), gate)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits into the input of the convolution, the gates of heads, and how much they take in and keep of a
        token."""
        delta = self._delta
        sizes = [delta.channels, delta.values, delta.num_heads, delta.num_heads]
        mixed, gate, weights, decays = projected.split(sizes, dim=-1)
        return mixed, gate, *gates(weights, decays, self._log_rate, self._bias)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values, each of shape [tokens, heads, elements]."""
        delta = self._delta
        queries, keys, values = mixed.split([delta.keys, delta.keys, delta.values], dim=-1)
        q, k = (part.unflatten(-1, (-1, delta.key_dim)) for part in (queries, keys))
        return q, k, values.unflatten(-1, (-1, delta.value_dim))

    def _normed(self, heads: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(heads, gate.reshape(heads.shape), self._head_norm, self._eps).flatten(1)


class _Chunks(NamedTuple):
    """The inputs of the scan over chunks, [chunks, heads, tokens, ...]."""

    queries: Tensor
    """Queries of the state before the chunk."""
    scores: Tensor
    """Scores of the chunk's own changes."""
    new: Tensor
    """The changes for a zero state before the chunk."""
    of_state: Tensor
    """Keys for subtracting the state before the chunk from the changes."""
    keys: Tensor
    """Keys for adding the changes to the state after the chunk."""
    kept: Tensor
    """The kept share of the state before the chunk, [chunks, heads, 1, 1]."""


def _scanned(chunks: _Chunks, state: Tensor, num_samples: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns (outputs [chunks, heads, tokens, value_dim], states after the samples), with samples from long to
    short."""
    outputs, ended, first = [], [], 0
    for count in num_samples:
        ended.append(state[count:])
        state = state[:count]
        queries, scores, new, of_state, keys, kept = (part[first : first + count] for part in chunks)
        changes = new - of_state @ state
        outputs.append(queries @ state + scores @ changes)
        state = state * kept + keys.mT @ changes
        first += count
    return torch.cat(outputs), torch.cat([state, *reversed(ended)])


def _in_chunks(x: Tensor, packed: PackedStates) -> Tensor:
    """Reorders [tokens, heads, ...] to [chunks, heads, chunk_tokens, ...], with zeros for padding."""
    rows: Tensor = _Rows.apply(x, packed.token_of_place, packed.place_of_token)
    return rows.view(-1, packed.chunk_tokens, *x.shape[1:]).transpose(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    """Returns the dtype of the arithmetic. It avoids torch's type promotion, because a recorded step would repeat
    it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


class _Rows(torch.autograd.Function):
    """Selects rows of `x` by `index`. The index len(x) selects zeros. `inverse` is the index of the other direction, so
    the gradient is also a selection instead of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _rows(gradients[0], inverse), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, index)
