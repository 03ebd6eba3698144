"""The decoder (Llama, Qwen2, Qwen3) on this rank's shard, reading parameters where the weight sync writes them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.rotary import inverse_frequencies
from rltrain.rollout.embedded.kv_cache import DecodeAttention, PrefillAttention
from rltrain.rollout.embedded.parallel import TensorParallel, local_token_ids
from rltrain.rollout.embedded.parameters import Matrix, PlainMatrix
from rltrain.rollout.embedded.rotary import RotaryEmbedding, Rotation, rotate


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


def _layer(parameters: Mapping[str, Tensor], matrices: Mapping[str, Matrix], index: int) -> _Layer:
    prefix = f"model.layers.{index}"

    def matrix(name: str) -> Matrix:
        name = f"{prefix}.{name}.weight"
        return matrices.get(name) or PlainMatrix(parameters[name])

    return _Layer(
        input_norm=parameters[f"{prefix}.input_layernorm.weight"],
        qkv=matrix("self_attn.qkv_proj"),
        qkv_bias=parameters.get(f"{prefix}.self_attn.qkv_proj.bias"),
        q_norm=parameters.get(f"{prefix}.self_attn.q_norm.weight"),
        k_norm=parameters.get(f"{prefix}.self_attn.k_norm.weight"),
        output=matrix("self_attn.o_proj"),
        output_bias=parameters.get(f"{prefix}.self_attn.o_proj.bias"),
        mlp_norm=parameters[f"{prefix}.post_attention_layernorm.weight"],
        gate_up=matrix("mlp.gate_up_proj"),
        down=matrix("mlp.down_proj"),
    )


class EngineModel:
    """Tensors are held by reference and read on every call: an in-place update takes effect at the next token."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        matrices: Mapping[str, Matrix],
        tensor_parallel: TensorParallel,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tp = tensor_parallel
        self._eps = architecture.norm_eps
        self._vocab_size = architecture.vocab_size
        self.head_dim = architecture.head_dim
        self.num_heads = architecture.num_heads // tensor_parallel.size
        self.num_kv_heads = max(1, architecture.num_kv_heads // tensor_parallel.size)
        self.num_layers = architecture.num_layers
        self._parameters = tuple(parameters.values())
        self._embedding = parameters["model.embed_tokens.weight"]
        self._layers = tuple(_layer(parameters, matrices, index) for index in range(self.num_layers))
        self._final_norm = parameters["model.norm.weight"]
        self._head = parameters.get("lm_head.weight", self._embedding)
        frequencies = inverse_frequencies(architecture)
        self._rotary = RotaryEmbedding(frequencies, max_positions, dtype, device)

    def addresses(self) -> tuple[int, ...]:
        """Where each parameter lies now: memory that is offloaded comes back elsewhere."""
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def forward(self, tokens: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Hidden states [tokens, hidden] before the final norm, of `tokens` [tokens] standing at `positions` [tokens].

        Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens)
        rotation = self._rotary.at(positions)
        for index in range(self.num_layers):
            self._apply_layer(index, hidden, rotation, attention)
        return hidden

    def fill_cache(self, tokens: Tensor, positions: Tensor, attention: PrefillAttention) -> None:
        """Cache the keys and values of prompt tokens [tokens]: `forward` without what only its result would need.

        Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens)
        rotation = self._rotary.at(positions)
        last = self.num_layers - 1
        for index in range(last):
            self._apply_layer(index, hidden, rotation, attention)
        _, keys, values = self._project(self._layers[last], hidden, rotation)
        attention.store(last, keys, values)

    def _apply_layer(
        self, index: int, hidden: Tensor, rotation: Rotation, attention: DecodeAttention | PrefillAttention
    ) -> None:
        """Add one layer's attention and MLP to `hidden`, in place."""
        layer = self._layers[index]
        queries, keys, values = self._project(layer, hidden, rotation)
        self._add_projected(hidden, attention(index, queries, keys, values), layer.output)
        if layer.output_bias is not None:
            hidden.add_(layer.output_bias)
        gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up.read()).chunk(2, dim=-1)
        self._add_projected(hidden, F.silu(gate).mul_(up), layer.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, padded vocab_size] float32, -inf in the padded columns, equal on every rank.

        Collective over: the engine's tensor-parallel group.
        """
        shard = F.linear(self._norm(hidden, self._final_norm), self._head)
        logits = self._tp.all_gather_columns(shard).float()
        logits[:, self._vocab_size :].fill_(float("-inf"))
        return logits

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(tokens, self._embedding)
        num_rows = len(self._embedding)
        local, outside = local_token_ids(tokens, self._tp.rank * num_rows, num_rows)
        return self._tp.all_reduce(F.embedding(local, self._embedding).masked_fill_(outside[:, None], 0))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._eps)

    def _project(self, layer: _Layer, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [tokens, heads, head_dim] and keys, and values, both [tokens, kv_heads, head_dim]."""
        fused = F.linear(self._norm(hidden, layer.input_norm), layer.qkv.read(), layer.qkv_bias).view(
            len(hidden), -1, self.head_dim
        )
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = fused[:, :num_rotated]
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated = F.rms_norm(rotated, (self.head_dim,), None, self._eps)
            rotated[:, : self.num_heads].mul_(layer.q_norm)
            rotated[:, self.num_heads :].mul_(layer.k_norm)
        rotated = rotate(rotated, rotation)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], fused[:, num_rotated:]

    def _add_projected(self, hidden: Tensor, inner: Tensor, matrix: Matrix) -> None:
        """hidden += inner @ matrix.T, where `inner` and `matrix` are split by columns over the group."""
        if self._tp.size == 1:
            hidden.addmm_(inner, matrix.read().t())
        else:
            hidden.add_(self._tp.all_reduce(F.linear(inner, matrix.read())))
