"""Attention layers, norms, rotary embeddings and the residual stream of the embedded engine."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import Turn, halves_of_pairs
from rltrain.models.delta_rule import DeltaHeads
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.rollout.embedded.kv_cache import AttentionShape, DecodeAttention, PrefillAttention, Written
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix, TensorParallel

# Kernels around products, and for the end of a step. Without them each is several operators of torch.


GATE_KERNELS = frozenset({"silu", "gelu_tanh", "sigmoid"})
"""Activations of LayerKernels.gate_rows."""


class LayerKernels(NamedTuple):
    """The functions of models.layer_kernels and triton_kernels with these names."""

    add_norm: Callable[..., Any]
    turn_heads: Callable[..., tuple[Tensor, Any]]
    gate_rows: Callable[..., Tensor]
    finish_step: Callable[..., None]


def layer_kernels() -> LayerKernels:
    """Returns the kernels. Raises ImportError without Triton."""
    from rltrain.models.layer_kernels import add_norm, gate_rows, turn_heads
    from rltrain.rollout.embedded.triton_kernels import finish_step

    return LayerKernels(add_norm, turn_heads, gate_rows, finish_step)


_HEADS_OF_PROGRAM = 4
"""Heads that a program rotates. Decode steps have few tokens, which are to keep all multiprocessors busy."""


def choose_kernels(device: torch.device, dtype: torch.dtype) -> tuple[LayerKernels | None, str]:
    """Returns (the kernels if they work on `device`, the reason against them on a GPU or an empty string)."""
    if device.type != "cuda":
        return None, ""
    try:
        kernels = layer_kernels()
        error = kernels_difference(kernels, device, dtype)
    except Exception as refusal:  # any failure of a version, GPU, compiler or driver
        return None, f"{type(refusal).__name__}: {refusal}".split("\n")[0]
    return (kernels, "") if error < 0.05 else (None, f"they are off by {error:.3g}")


@torch.inference_mode()
def kernels_difference(kernels: LayerKernels, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the largest difference between the kernels and torch on random input. Raises any error of a kernel."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    hidden, made, gain, gate_up = drawn(3, 96), drawn(3, 96), drawn(96), drawn(3, 160)
    (queries, keys, values), norms = drawn(3, 6, 16).split([4, 1, 1], 1), (drawn(16), drawn(16))
    positions, (gates, ups) = torch.tensor([1, 4, 6], device=device), gate_up.chunk(2, -1)
    rotation = RotaryEmbedding(torch.tensor([1.0, 0.3, 0.1, 0.03]), 1.0, 8, device).at(positions)
    heads = _normed_heads(torch.cat([queries, keys], 1), 4, norms, 1e-6, 0.0)
    stored = torch.zeros(2, 2, 4, 1, 16, device=device, dtype=dtype)
    table = torch.tensor([[0, 1]] * 3, device=device)
    summed = hidden + made
    normed_sum = kernels.add_norm(hidden, made, gain, eps=1e-6)
    written = Written(stored[0], stored[1], table, positions, 4, 16, 16)
    turned, _ = kernels.turn_heads(queries[:, :, None], keys, rotation.turn(norms=norms, eps=1e-6), values, written)
    taken = stored.flatten(1, 2)[:, positions]
    pairs = [
        (hidden, summed),
        (normed_sum, normed(summed, gain, 1e-6)),
        (torch.cat([turned, *taken], 1), torch.cat([rotate(heads, rotation), values], 1)),
        (kernels.gate_rows(gates, ups, "silu"), F.silu(gates).mul_(ups)),
    ]
    errors = [((found - expected).float().abs() / (1 + expected.float().abs())).max() for found, expected in pairs]
    return float(torch.stack(errors).max().nan_to_num(torch.inf))


# The residual stream [tokens, hidden]: reading and adding.


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of `hidden` times `weight`, rounded once to the weight's dtype even if `hidden` is wider."""
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps).to(weight.dtype)


class Norm:
    """A norm with a weight read on every call, plus the family's offset. With a bias it is a layer norm, else an RMS
    norm."""

    def __init__(self, weight: Tensor, architecture: Architecture, bias: Tensor | None = None) -> None:
        self.weight, self.eps, self.offset = weight, architecture.norm_eps, architecture.norm_offset
        self.bias = bias

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.bias is not None:
            gain, bias = self.weight.float() + self.offset, self.bias.float()
            return F.layer_norm(hidden.float(), gain.shape, gain, bias, self.eps).to(self.weight.dtype)
        if not self.offset:
            return normed(hidden, self.weight, self.eps)
        gain = self.weight.float() + self.offset
        return F.rms_norm(hidden.float(), gain.shape, gain, self.eps).to(self.weight.dtype)


class Residual:
    """The residual stream of a pass. Layers read it through norms and add their outputs in place."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def __len__(self) -> int:
        return len(self._hidden)

    def normed(self, norm: Norm) -> Tensor:
        return norm(self._hidden)

    def settled(self) -> Tensor:
        """Returns the stream with everything added."""
        return self._hidden

    def add(self, made: Tensor) -> None:
        self._hidden.add_(made)

    def add_product(
        self,
        inner: Tensor,
        matrix: Matrix,
        group: TensorParallel,
        *,
        bias: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Adds inner @ matrix.T and `bias`, with `inner` and `matrix` split by columns over `group`.

        The product passes through `norm` first if there is one. Collective over: `group`.
        """
        hidden = self._hidden
        if norm is not None:
            hidden.add_(norm(group.all_reduce(matrix.product(inner))))
        elif group.size == 1 and hidden.dtype == inner.dtype:
            matrix.add_product(hidden, inner)
        else:
            hidden.add_(group.all_reduce(matrix.product(inner)))
        if bias is not None:
            hidden.add_(bias)


class FusedResidual(Residual):
    """A stream on which one kernel adds an output, with its bias and norm, and computes the next norm."""

    def __init__(self, hidden: Tensor, kernels: LayerKernels) -> None:
        super().__init__(hidden)
        self._add_norm = kernels.add_norm
        self._made: Tensor | None = None
        """The output to be added with the next norm."""
        self._made_bias: Tensor | None = None
        self._post_norm: Norm | None = None

    def normed(self, norm: Norm) -> Tensor:
        result: Tensor = self._add_pending(norm)
        return result

    def settled(self) -> Tensor:
        if self._made is not None:
            self._add_pending(None)
        return self._hidden

    def add(self, made: Tensor) -> None:
        self.settled()
        self._made = made

    def add_product(
        self,
        inner: Tensor,
        matrix: Matrix,
        group: TensorParallel,
        *,
        bias: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        if bias is None and norm is None and group.size == 1 and self._hidden.dtype == inner.dtype:
            matrix.add_product(self.settled(), inner)  # the product's kernel adds
            return
        self.add(group.all_reduce(matrix.product(inner)))
        self._made_bias, self._post_norm = bias, norm

    def _add_pending(self, norm: Norm | None) -> Any:
        post, read = self._post_norm, norm or self._post_norm
        made, bias = self._made, self._made_bias
        self._made = self._made_bias = self._post_norm = None
        return self._add_norm(
            self._hidden,
            made,
            norm.weight if norm else None,
            eps=read.eps if read else 0.0,
            offset=read.offset if read else 0.0,
            bias=norm.bias if norm else None,
            added_bias=bias,
            post_weight=post.weight if post else None,
        )


# Norms of queries and keys, per head or over all heads of a token.


class HeadNorms(Protocol):
    """A function on this rank's query heads followed by its key heads, shape [tokens, heads, head_dim].

    It rounds once, like the trainer. Collective over: the engine's tensor-parallel group.
    """

    @property
    def of_heads(self) -> tuple[Tensor, Tensor] | None:
        """The weights for queries and keys if heads are normed one by one, else None."""
        ...

    def __call__(self, heads: Tensor) -> Tensor: ...


def head_norms(parameters: LayerParameters, architecture: Architecture, group: TensorParallel) -> HeadNorms | None:
    """Returns the norms of a layer's queries and keys, or None if it has none."""
    weights = parameters.get("self_attn.q_norm.weight"), parameters.get("self_attn.k_norm.weight")
    if weights[0] is None or weights[1] is None:
        return None
    if architecture.norms_projections:
        return _OfProjections(weights[0], weights[1], architecture, group)
    return _OfHeads(weights[0], weights[1], architecture, group)


def _normed_heads(heads: Tensor, num_queries: int, weights: tuple[Tensor, Tensor], eps: float, offset: float) -> Tensor:
    wide = F.rms_norm(heads.float(), heads.shape[-1:], None, eps)
    wide[:, :num_queries].mul_(weights[0] + offset)
    wide[:, num_queries:].mul_(weights[1] + offset)
    return wide.to(heads.dtype)


class _OfHeads:
    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self.of_heads = queries, keys
        self._num_queries = architecture.num_heads // group.size
        self._eps, self._offset = architecture.norm_eps, architecture.norm_offset

    def __call__(self, heads: Tensor) -> Tensor:
        return _normed_heads(heads, self._num_queries, self.of_heads, self._eps, self._offset)


class _OfProjections:
    """Norms over all heads of a token. Every rank has the whole weights. Several ranks may have the same key head."""

    of_heads = None

    def __init__(self, queries: Tensor, keys: Tensor, architecture: Architecture, group: TensorParallel) -> None:
        self._group, self._eps, self._weights = group, architecture.norm_eps, (queries, keys)
        totals = architecture.num_heads, architecture.num_kv_heads
        self._firsts = [group.rank * total // group.size * architecture.head_dim for total in totals]
        self._counts = [max(1, total // group.size) for total in totals]

    def __call__(self, heads: Tensor) -> Tensor:
        parts = [part.flatten(1).float() for part in heads.split(self._counts, 1)]
        means = self._group.all_reduce(torch.stack([part.square().mean(1) for part in parts])) / self._group.size
        normed = []
        for part, mean, weight, first in zip(parts, means, self._weights, self._firsts, strict=True):
            gain = weight[first : first + part.shape[1]]
            normed.append(part * torch.rsqrt(mean + self._eps)[:, None] * gain)
        return torch.cat(normed, 1).view(heads.shape).to(heads.dtype)


# Rotary position embedding in the rotate-half convention of Hugging Face checkpoints.


class Rotation:
    """The rotation of tokens by rows of cosines and signed sines, fp32 [rows, rotated elements of a head] each.

    The row of a token is its position. Without positions every token has its own row.
    """

    def __init__(self, cos: Tensor, signed_sin: Tensor, positions: Tensor | None = None) -> None:
        self._cos, self._signed_sin, self.positions = cos, signed_sin, positions
        self.size = cos.size(-1)
        """Rotated elements of a head."""

    @cached_property
    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """The rows of the tokens, [tokens, 1, rotated elements] each. Kernels read the table by themselves."""
        rows = self._cos, self._signed_sin
        if self.positions is not None:
            rows = self._cos.index_select(0, self.positions), self._signed_sin.index_select(0, self.positions)
        return rows[0][:, None], rows[1][:, None]

    def turn(self, **terms: Any) -> Turn:
        """Returns the rotation for kernels, with the other `terms`. The second halves of the sines have their sign."""
        half = self.size // 2
        return Turn(self._cos, self._signed_sin[:, half:], half, angle_rows=self.positions, **terms)


class RotaryEmbedding:
    """Cosines and sines of every position below `num_positions`, times `magnitude`. They do not depend on weights.

    With `axes` [frequencies] a token has three positions, and each frequency rotates by the one of its axis.
    """

    def __init__(
        self,
        frequencies: Tensor,
        magnitude: float,
        num_positions: int,
        device: torch.device,
        axes: Tensor | None = None,
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._cos = torch.cat([cos, cos], -1).to(device)
        self._signed_sin = torch.cat([-sin, sin], -1).to(device)
        self._axes = None if axes is None else torch.cat([axes, axes]).to(device)

    def at(self, positions: Tensor) -> Rotation:
        """Returns the rotation for `positions` [tokens], or [3, tokens] with one row for each axis."""
        if positions.dim() > 1:
            assert self._axes is not None, "only models with images have three positions of a token"
            of_frequencies = positions.index_select(0, self._axes).t()
            return Rotation(self._cos.gather(0, of_frequencies), self._signed_sin.gather(0, of_frequencies))
        return Rotation(self._cos, self._signed_sin, positions)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first elements of `heads` [tokens, heads, head_dim], as many as `rotation` has.

    Rolling by half the size swaps the halves, and the sines carry the sign. Computed in fp32 and rounded once to the
    dtype of `heads`, as in training.
    """
    (cos, signed_sin), size = rotation.of_tokens, rotation.size
    wide = heads[..., :size].float()
    turned = (wide * cos).addcmul_(wide.roll(size // 2, -1), signed_sin).to(heads.dtype)
    return turned if size == heads.shape[-1] else torch.cat([turned, heads[..., size:]], -1)


# Attention with separate keys and values for each head or group of heads.

Attention = DecodeAttention | PrefillAttention
_POST_NORMS = ("post_self_attn_layernorm.weight", "post_attention_layernorm.weight")
"""Names of a norm after attention. The first existing one is used. In other families the second name is the MLP's
norm."""


class AttentionLayer(Protocol):
    """The attention of one layer on this rank. `layer` counts the layers of its kind."""

    def add(self, layer: int, hidden: Residual, rotation: Rotation, attention: Attention) -> None:
        """Adds the output for `hidden` to it. Also stores the tokens' cached data.

        Collective over: the engine's tensor-parallel group.
        """
        ...

    def store(self, layer: int, hidden: Residual, rotation: Rotation, attention: PrefillAttention) -> None:
        """Only stores the tokens' cached data."""
        ...


class GroupedAttention:
    """Implements `AttentionLayer` for multi-head and grouped-query attention."""

    def __init__(
        self,
        parameters: LayerParameters,
        architecture: Architecture,
        group: TensorParallel,
        kernels: LayerKernels | None = None,
    ) -> None:
        self._group = group
        shape = self.shape(architecture, group.size)
        self._num_heads, self._num_kv_heads = shape.num_heads, shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._norm = Norm(parameters["input_layernorm.weight"], architecture, parameters.get("input_layernorm.bias"))
        self._qkv = parameters.matrix("self_attn.qkv_proj.weight")
        self._qkv_bias = parameters.get("self_attn.qkv_proj.bias")
        self._head_norms = head_norms(parameters, architecture, group)
        self._output = parameters.matrix("self_attn.o_proj.weight")
        self._output_bias = parameters.get("self_attn.o_proj.bias")
        self._sinks = parameters.get("self_attn.sinks")
        self._post_norm = None
        if architecture.post_norms:
            self._post_norm = Norm(parameters.first(*_POST_NORMS), architecture)
        self._rotates_pairs, self._is_gated = architecture.rotates_pairs, architecture.gated_attention
        self._norm_terms = (architecture.norm_eps, architecture.norm_offset)
        takes_norms = self._head_norms is None or self._head_norms.of_heads is not None
        self._kernels = kernels if takes_norms else None

    @staticmethod
    def shape(architecture: Architecture, tp: int) -> AttentionShape:
        """Returns the attention shape on one of `tp` ranks."""
        num_kv_heads, head_dim = max(1, architecture.num_kv_heads // tp), architecture.head_dim
        return AttentionShape(
            architecture.num_heads // tp,
            num_kv_heads,
            head_dim,
            head_dim,
            architecture.score_scale,
            windows=architecture.windows,
            softcap=architecture.attention_softcap,
            sinks=architecture.attention_sinks,
        )

    def add(self, layer: int, hidden: Residual, rotation: Rotation, attention: Attention) -> None:
        if self._kernels is not None and not isinstance(attention, PrefillAttention):
            written = attention.written(layer)
            queries, _, _, gate = self._fused(self._kernels, hidden, rotation, written)
            attended = attention.attend(layer, queries, self._sinks)
        else:
            queries, keys, values, gate = self._project(hidden, rotation)
            attended = attention(layer, queries, keys, values, self._sinks)
        if gate is not None:
            if self._kernels is not None:
                attended = self._kernels.gate_rows(gate, attended, "sigmoid")
            else:
                attended = (attended * gate.reshape(attended.shape).float().sigmoid()).to(attended.dtype)
        hidden.add_product(attended, self._output, self._group, bias=self._output_bias, norm=self._post_norm)

    def store(self, layer: int, hidden: Residual, rotation: Rotation, attention: PrefillAttention) -> None:
        _, keys, values, _ = self._project(hidden, rotation)
        attention.store(layer, keys, values)

    def _project(self, hidden: Residual, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns (queries, keys, values, gates). Queries and keys are rotated. The gates are None without gated
        attention.

        Queries have shape [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim].
        """
        if self._kernels is not None:
            return self._fused(self._kernels, hidden, rotation)
        projected = self._qkv.product(hidden.normed(self._norm), self._qkv_bias)
        fused, gate = projected.view(len(hidden), -1, self._head_dim), None
        if self._is_gated:
            fused, gate = self._without_gates(fused)
        num_rotated = self._num_heads + self._num_kv_heads
        rotated = fused[:, :num_rotated]
        if self._head_norms is not None:
            rotated = self._head_norms(rotated)
        if self._rotates_pairs:
            rotated = halves_of_pairs(rotated, rotation.size)
        rotated = rotate(rotated, rotation)
        return rotated[:, : self._num_heads], rotated[:, self._num_heads :], fused[:, num_rotated:], gate

    def _fused(
        self, kernels: LayerKernels, hidden: Residual, rotation: Rotation, written: Written | None = None
    ) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """Returns the result of `_project`. With `written` keys and values are in the cache, and keys are None."""
        fused = self._qkv.product(hidden.normed(self._norm), self._qkv_bias)
        heads, gate = fused.view(len(hidden), -1, self._head_dim), None
        queries, keys, values = heads.split([heads.size(1) - 2 * self._num_kv_heads, *[self._num_kv_heads] * 2], 1)
        if self._is_gated:
            queries, gate = queries[:, ::2], queries[:, 1::2]
        norms = None if self._head_norms is None else self._head_norms.of_heads
        eps, offset = self._norm_terms
        turn = rotation.turn(pairs=self._rotates_pairs, norms=norms, eps=eps, offset=offset)
        made = kernels.turn_heads(queries[:, :, None], keys, turn, values, written, rows=_HEADS_OF_PROGRAM)
        return *made, values, gate

    def _without_gates(self, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Splits off the gates. Returns (queries, keys and values; gates). In `fused` each gate follows its query."""
        queries, rest = fused.split([2 * self._num_heads, fused.size(1) - 2 * self._num_heads], dim=1)
        queries, gate = queries.unflatten(1, (self._num_heads, 2)).unbind(2)
        return torch.cat([queries, rest], dim=1), gate


# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). The cache holds latents.


class LatentAttention:
    """Implements `AttentionLayer` for multi-head latent attention.

    The cache holds a latent and the rotated part of the key for each token, [kv_rank + rope]. They are shared by all
    heads and whole on every rank.

    If tokens attend only to each other, each head's keys and values are computed from the latents. If they attend to
    cached tokens, the key and value matrices are applied to queries and outputs instead. Queries then have the width of
    the cached vectors, attention returns latents, and each head computes its value from them.
    """

    def __init__(
        self,
        parameters: LayerParameters,
        architecture: Architecture,
        group: TensorParallel,
        kernels: LayerKernels | None = None,
    ) -> None:
        mla = architecture.mla
        assert mla is not None
        self._group, self._mla = group, mla
        self._num_heads = architecture.num_heads // group.size
        self._norm = Norm(parameters["input_layernorm.weight"], architecture)
        self._latent_norm = parameters["self_attn.kv_a_layernorm.weight"]
        self._from_latent = parameters.matrix("self_attn.kv_b_proj.weight")
        self._output = parameters.matrix("self_attn.o_proj.weight")
        self._query_norm: Tensor | None = None
        if mla.q_rank is None:
            self._to_latents = parameters.matrix("self_attn.kv_a_proj_with_mqa.weight")
            self._queries = parameters.matrix("self_attn.q_proj.weight")
        else:
            self._to_latents = parameters.matrix("self_attn.fused_qkv_a_proj_with_mqa.weight")
            self._query_norm = parameters["self_attn.q_a_layernorm.weight"]
            self._queries = parameters.matrix("self_attn.q_b_proj.weight")

    @staticmethod
    def shape(architecture: Architecture, tp: int) -> AttentionShape:
        """Returns the attention shape on one of `tp` ranks."""
        mla = architecture.mla
        assert mla is not None
        kept = mla.kv_rank + mla.rope_head_dim
        return AttentionShape(architecture.num_heads // tp, 1, kept, mla.kv_rank, architecture.score_scale, latent=True)

    def add(self, layer: int, hidden: Residual, rotation: Rotation, attention: Attention) -> None:
        inner = hidden.normed(self._norm)
        kept, query_input = self._kept(inner, rotation)
        queries = self._queries.product(query_input).view(len(hidden), self._num_heads, -1)
        plain, rotated = queries.split([self._mla.plain_head_dim, self._mla.rope_head_dim], -1)
        rotated = rotate(halves_of_pairs(rotated), rotation)
        if isinstance(attention, PrefillAttention) and not attention.reads_cache:
            attention.store(layer, kept, kept)
            attended = self._attend_to_each_other(plain, rotated, kept, attention)
        else:
            attended = self._attend_to_cached(layer, plain, rotated, kept, attention)
        hidden.add_product(attended, self._output, self._group)

    def store(self, layer: int, hidden: Residual, rotation: Rotation, attention: PrefillAttention) -> None:
        kept, _ = self._kept(hidden.normed(self._norm), rotation)
        attention.store(layer, kept, kept)

    def _kept(self, inner: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns (cached data of the tokens [tokens, 1, kv_rank + rope], input of the query projection)."""
        mla = self._mla
        latents = self._to_latents.product(inner)
        if self._query_norm is not None:
            query_latent, latents = latents.split([len(self._query_norm), mla.kv_rank + mla.rope_head_dim], -1)
            inner = normed(query_latent, self._query_norm, LATENT_NORM_EPS)
        latent, key = latents[:, None].split([mla.kv_rank, mla.rope_head_dim], -1)
        key = rotate(halves_of_pairs(key), rotation)
        return torch.cat([normed(latent, self._latent_norm, LATENT_NORM_EPS), key], -1), inner

    def _attend_to_each_other(
        self, plain: Tensor, rotated: Tensor, kept: Tensor, attention: PrefillAttention
    ) -> Tensor:
        """Attends with explicit keys and values of every head. Returns [tokens, heads * value_head_dim]."""
        mla = self._mla
        latent, key = kept.split([mla.kv_rank, mla.rope_head_dim], -1)
        made = self._from_latent.product(latent).view(len(kept), self._num_heads, -1)
        keys, values = made.split([mla.plain_head_dim, mla.value_head_dim], -1)
        keys = torch.cat([keys, key.expand(-1, self._num_heads, -1)], -1)
        return attention.among(torch.cat([plain, rotated], -1), keys, values)

    def _attend_to_cached(
        self, layer: int, plain: Tensor, rotated: Tensor, kept: Tensor, attention: Attention
    ) -> Tensor:
        """Attends to cached latents. Returns [tokens, heads * value_head_dim]."""
        mla, adapter = self._mla, self._from_latent.adapter
        of_keys, of_values = self._by_head(self._from_latent.read())
        queries = plain.transpose(0, 1)
        wide = torch.bmm(queries, of_keys)
        if adapter is not None:
            a, b = adapter.factors()
            b_of_keys, b_of_values = self._by_head(b)
            wide += torch.bmm(queries, b_of_keys) * adapter.scale @ a
        latents = attention(layer, torch.cat([wide.transpose(0, 1), rotated], -1), kept, kept[..., : mla.kv_rank])
        by_head = latents.view(len(kept), self._num_heads, mla.kv_rank).transpose(0, 1)
        values = torch.bmm(by_head, of_values.transpose(1, 2))
        if adapter is not None:
            values += torch.bmm(by_head @ a.t() * adapter.scale, b_of_values.transpose(1, 2))
        return values.transpose(0, 1).reshape(len(kept), -1)

    def _by_head(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the matrices for keys and for values, each of shape [heads, rows of a head, columns]."""
        by_head = matrix.unflatten(0, (self._num_heads, -1))
        of_keys, of_values = by_head.split([self._mla.plain_head_dim, self._mla.value_head_dim], 1)
        return of_keys, of_values


# Gated delta nets in place of attention.


class DeltaLayer:
    """Implements `AttentionLayer` for a rank's share of the heads.

    It caches a state per sample and nothing per token.
    """

    def __init__(
        self,
        parameters: LayerParameters,
        architecture: Architecture,
        group: TensorParallel,
        kernels: LayerKernels | None = None,
    ) -> None:
        assert architecture.delta is not None
        self._group = group
        self._norm = Norm(parameters["input_layernorm.weight"], architecture)
        self._projection = parameters.matrix("linear_attn.in_proj.weight")
        self._heads = DeltaHeads(
            architecture.delta.shared_by(group.size),
            convolution=parameters["linear_attn.conv1d.weight"],
            log_rate=parameters["linear_attn.A_log"],
            bias=parameters["linear_attn.dt_bias"],
            norm=parameters["linear_attn.norm.weight"],
            eps=architecture.norm_eps,
        )
        self._output = parameters.matrix("linear_attn.out_proj.weight")

    def add(self, layer: int, hidden: Residual, rotation: Rotation, attention: Attention) -> None:
        hidden.add_product(self._made(layer, hidden, attention), self._output, self._group)

    def store(self, layer: int, hidden: Residual, rotation: Rotation, attention: PrefillAttention) -> None:
        self._made(layer, hidden, attention)

    def _made(self, layer: int, hidden: Residual, attention: Attention) -> Tensor:
        assert attention.states is not None, "the cache of this model must keep states"
        return attention.states.run(layer, self._heads, self._projection.product(hidden.normed(self._norm)))
