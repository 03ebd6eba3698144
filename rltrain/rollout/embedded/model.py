"""The decoder on this rank's shard, reading parameters where the weight sync writes them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import inverse_frequencies, soft_capped
from rltrain.models.products import wide_product
from rltrain.models.routing_shape import RoutingShape
from rltrain.models.table import EMBEDDING, FINAL_NORM, stages_of_layer
from rltrain.rollout.embedded.attention_layer import Attention, AttentionLayer, GroupedAttention
from rltrain.rollout.embedded.delta_layer import DeltaLayer
from rltrain.rollout.embedded.experts import Experts
from rltrain.rollout.embedded.feed_forward import DenseFeedForward, FeedForward
from rltrain.rollout.embedded.kv_cache import DecodeAttention, PrefillAttention
from rltrain.rollout.embedded.latent_attention import LatentAttention
from rltrain.rollout.embedded.parallel import TensorParallel, local_token_ids
from rltrain.rollout.embedded.parameters import LayerParameters, Matrix
from rltrain.rollout.embedded.residual import Norm
from rltrain.rollout.embedded.rotary import RotaryEmbedding, Rotation
from rltrain.rollout.embedded.sample_states import StateShape


class _Layer(NamedTuple):
    number: int
    """Among those of one kind: with attention, or with states."""
    attention: AttentionLayer
    feed_forward: FeedForward
    stages: tuple[str, str]


class EngineModel:
    """Tensors are held by reference and read on every call: an in-place update takes effect at the next token.

    With `record_routing` layers with experts keep the tokens' routing beside keys and values.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        matrices: Mapping[str, Matrix],
        tensor_parallel: TensorParallel,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        residual_dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        record_routing: bool = False,
    ) -> None:
        self._tp = tensor_parallel
        self._residual_dtype, self._wide_head = residual_dtype or dtype, head_dtype == torch.float32
        self._embedding_scale = float(torch.tensor(architecture.embedding_scale, dtype=dtype))
        self._vocab_size, self._logits_softcap = architecture.vocab_size, architecture.logits_softcap
        self.num_layers, self.num_attention_layers = architecture.num_layers, architecture.num_attention_layers
        attention = LatentAttention if architecture.mla else GroupedAttention
        self.attention_shape = attention.shape(architecture, tensor_parallel.size)
        """What of a token each layer with attention keeps, and attends to."""
        self.state_shape = StateShape.of(architecture, tensor_parallel.size)
        """What others keep of a sample."""
        self._parameters = tuple(parameters.values())
        self._embedding = parameters["model.embed_tokens.weight"]
        magnitude = architecture.rotation_magnitude
        self.routing_shape = RoutingShape.of(architecture) if record_routing else None
        layers: list[_Layer] = []
        num_sparse, num_of_kind = 0, [0, 0]
        for index, kind in enumerate(architecture.layer_kinds):
            own = LayerParameters(parameters, matrices, index)
            feed_forward: FeedForward
            if kind.sparse:
                feed_forward = Experts(own, architecture, tensor_parallel, num_sparse if record_routing else None)
                num_sparse += 1
            else:
                feed_forward = DenseFeedForward(own, architecture, tensor_parallel)
            mixer: AttentionLayer
            if kind.delta:
                mixer = DeltaLayer(own, architecture, tensor_parallel)
            else:
                mixer = attention(own, architecture, tensor_parallel)
            layers.append(_Layer(num_of_kind[kind.delta], mixer, feed_forward, stages_of_layer(index)))
            num_of_kind[kind.delta] += 1
        self._layers = tuple(layers)
        self._final_norm = Norm(parameters["model.norm.weight"], architecture, parameters.get("model.norm.bias"))
        self._head = parameters.get("lm_head.weight", self._embedding)
        self._rotaries = [RotaryEmbedding(inverse_frequencies(architecture), magnitude, max_positions, device)]
        own_base = architecture.sliding_rope_theta is not None
        if own_base:
            frequencies = inverse_frequencies(architecture, sliding=True)
            self._rotaries.append(RotaryEmbedding(frequencies, magnitude, max_positions, device))
        windows = (architecture.window_of(layer) for layer in range(self.num_layers))
        self._rotary_of = tuple(int(own_base and window is not None) for window in windows)
        """Of each layer, which of them."""
        self.observe: Callable[[str, Tensor], None] = lambda stage, values: None
        """Called with what `forward` and `logits` have come to at each stage, as tools/parity.py names them."""

    @property
    def needs_host(self) -> bool:
        """Whether a step waits for the host to read something, so that it cannot be recorded."""
        experts = (layer.feed_forward for layer in self._layers if isinstance(layer.feed_forward, Experts))
        return any(layer.needs_host for layer in experts)

    def addresses(self) -> tuple[int, ...]:
        """Where each parameter lies now: memory that is offloaded comes back elsewhere."""
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def forward(self, tokens: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Hidden states [tokens, hidden] before the final norm, of `tokens` [tokens] standing at `positions` [tokens].

        Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens)
        self.observe(EMBEDDING, hidden)
        rotations = self._rotations(positions)
        for index in range(self.num_layers):
            self._add_layer(index, hidden, rotations[index], attention)
        return hidden

    def fill_cache(self, tokens: Tensor, positions: Tensor, attention: PrefillAttention) -> None:
        """Cache the keys and values of prompt tokens [tokens]: `forward` without what only its result would need.

        Collective over: the engine's tensor-parallel group.
        """
        hidden = self._embed(tokens)
        rotations = self._rotations(positions)
        last, rotation = self._layers[-1], rotations[-1]
        for index in range(self.num_layers - 1):
            self._add_layer(index, hidden, rotations[index], attention)
        if last.feed_forward.stores:
            last.attention.add(last.number, hidden, rotation, attention)
            last.feed_forward.store(hidden, attention)
        else:
            last.attention.store(last.number, hidden, rotation, attention)

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        """Of every layer."""
        rotations = [rotary.at(positions) for rotary in self._rotaries]
        return [rotations[base] for base in self._rotary_of]

    def _add_layer(self, index: int, hidden: Tensor, rotation: Rotation, attention: Attention) -> None:
        """Add one layer's attention and MLP to `hidden`, in place."""
        layer = self._layers[index]
        layer.attention.add(layer.number, hidden, rotation, attention)
        self.observe(layer.stages[0], hidden)
        layer.feed_forward.add(hidden, attention)
        self.observe(layer.stages[1], hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, padded vocab_size] float32, -inf in the padded columns, equal on every rank.

        Collective over: the engine's tensor-parallel group.
        """
        final = self._final_norm(hidden)
        self.observe(FINAL_NORM, final)
        shard = wide_product(final, self._head) if self._wide_head else F.linear(final, self._head)
        shard = shard if self._logits_softcap is None else soft_capped(shard, self._logits_softcap)
        logits = self._tp.all_gather_columns(shard).float()
        logits[:, self._vocab_size :].fill_(float("-inf"))
        return logits

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded = self._embedded(tokens).to(self._residual_dtype)
        return embedded if self._embedding_scale == 1 else embedded * self._embedding_scale

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(tokens, self._embedding)
        num_rows = len(self._embedding)
        local, outside = local_token_ids(tokens, self._tp.rank * num_rows, num_rows)
        return self._tp.all_reduce(F.embedding(local, self._embedding).masked_fill_(outside[:, None], 0))
