"""Gated delta nets (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", arXiv:2412.06464): a short causal
convolution and the gated delta rule, of whole samples that lie end to end, and of one token each. For training and for
engines alike. Apart from its siblings because it loads torch.

Of a sample a layer keeps a state S [key_dim, value_dim] for every value head and the last inputs of the convolution.
A token with key k, value v, query q, decay g <= 0 and weight b makes S' = exp(g) S, S = S' + k (b (v - k S'))^T, and
puts out q S. Keys and queries have unit length. Computed in float32 or what is wider.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rltrain.models.delta_net import CHUNK_TOKENS

LEAST_CHUNK_TOKENS = 16
UNIT_EPS = 1e-6
"""Beside the squares of a key's or a query's elements, when it is brought to unit length."""


class PackedStates(NamedTuple):
    """How samples that lie end to end are computed: in chunks of `chunk_tokens`, of which those come first that begin
    their samples, then the second ones of samples that have one, and so on, those of long samples always in front; and
    with a gap before each sample, for what the convolution reads of the tokens before it."""

    chunk_tokens: int
    token_of_place: Tensor
    """[chunks * chunk_tokens] the token at each place in the chunks; the number of tokens where that is padding."""
    place_of_token: Tensor
    """[tokens]"""
    num_samples: tuple[int, ...]
    """How many samples have a first chunk, a second one, ..."""
    by_length: Tensor
    """[samples] from the one that has most chunks."""
    order: Tensor
    """[samples] where each stands among those."""
    token_of_row: Tensor
    """[gaps and tokens] the token in each row of the convolution's input; the number of tokens in a gap."""
    row_of_token: Tensor
    """[tokens]"""
    gaps: Tensor
    """[samples, gap] the rows before each sample."""
    tails: Tensor
    """[samples, gap] the last rows of each sample, or of the gap before one that is shorter than that."""


def packed_states(lengths: Sequence[int], kernel: int, device: torch.device) -> PackedStates:
    """For samples of these lengths, each at least 1, and a convolution over `kernel` tokens."""
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
    """SiLU of each channel's causal convolution within its sample, rounded once to the type of `inputs`.

    inputs [tokens, channels]; weight [channels, kernel], the last of it for the token itself; before [samples, kernel -
    1, channels] are the inputs before each sample, None: zeros. -> the outputs [tokens, channels], and the last inputs
    of each sample, as the next call takes them before what follows.
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
    """As `convolve`, of one token of each sample [samples, channels]; `before` takes it in, in place."""
    wide = _wide(inputs)
    window = torch.cat([before, inputs[:, None].to(before.dtype)], dim=1)
    before.copy_(window[:, 1:])
    summed = (window.to(wide) * weight.to(wide).t()).sum(1)
    return F.silu(summed).to(inputs.dtype)


def gates(weights: Tensor, decays: Tensor, log_rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(how much of a token each head takes in, the logarithm of what it keeps of its state) [tokens, heads] in fp32,
    from what the token says of both, and each head's rate and bias [heads]."""
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
    """queries and keys [tokens, key_heads, key_dim], each for as many consecutive value heads; values [tokens, heads,
    value_dim]; weights and decays [tokens, heads] as `gates` gives them; initial [samples, heads, key_dim, value_dim]
    are the states before the samples, None: zeros.

    -> what heads put out [tokens, heads, value_dim], of the type of `values`, and the states behind the samples.

    Within a chunk the tokens' changes of the state, each of which depends on those before it, are the solution of a
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
    """As `gated_delta_rule`, of one token of each sample; `states` [samples, heads, key_dim, value_dim] take it in, in
    place."""
    shared = values.size(1) // keys.size(1)
    q, k = (_unit(x.to(states.dtype)).repeat_interleave(shared, 1) for x in (queries, keys))
    states.mul_(decays.to(states.dtype).exp()[..., None, None])
    known = (k[:, :, None] @ states)[:, :, 0]
    change = (values.to(states.dtype) - known) * weights.to(states.dtype)[..., None]
    states.addcmul_(k[..., None], change[:, :, None])
    return ((q * q.size(-1) ** -0.5)[:, :, None] @ states)[:, :, 0].to(values.dtype)


def gated_norm(heads: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head [..., value_dim] times SiLU of its gate, in fp32, rounded once to the type of `gate`."""
    wide = _wide(heads)
    normed = F.rms_norm(heads.to(wide), heads.shape[-1:], weight.to(wide), eps)
    return (normed * F.silu(gate.to(wide))).to(gate.dtype)


class _Chunks(NamedTuple):
    """What the scan over chunks reads of each, [chunks, heads, tokens, ...]."""

    queries: Tensor
    """Of the state before the chunk."""
    scores: Tensor
    """Of the chunk's own changes."""
    new: Tensor
    """The changes, were there no state before the chunk."""
    of_state: Tensor
    """Keys by which that state is taken off them."""
    keys: Tensor
    """By which changes come into the state behind the chunk."""
    kept: Tensor
    """[chunks, heads, 1, 1] of the state before it."""


def _scanned(chunks: _Chunks, state: Tensor, num_samples: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(outputs [chunks, heads, tokens, value_dim], states behind the samples), samples from long to short."""
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
    """[tokens, heads, ...] -> [chunks, heads, chunk_tokens, ...], zeros where there is no token."""
    rows: Tensor = _Rows.apply(x, packed.token_of_place, packed.place_of_token)
    return rows.view(-1, packed.chunk_tokens, *x.shape[1:]).transpose(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    """What is computed in. Without torch's own rule, which a step that is recorded would have to repeat."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


class _Rows(torch.autograd.Function):
    """Rows of `x` by `index`, zeros where that is the number of its rows. `inverse` is as much for the other way: so
    the gradient, too, is read by an index rather than added up."""

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
