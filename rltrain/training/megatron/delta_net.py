"""Gated delta nets in attention's place, over packed sequences, by torch alone.

megatron-core has such a module, which needs the kernels of flash-linear-attention and takes no packed sequences.
Parameters have its names and shapes but for the norm, which multiplies by its weight here as in checkpoints.

Of what lies between the projections nothing is kept for backward, where it is computed again: it is many times what
attention keeps, since every head has a state for every chunk, in float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes as set_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.models import DeltaNet
from rltrain.models.delta_rule import PackedStates, convolve, gated_delta_rule, gated_norm, gates, packed_states
from rltrain.training.megatron.attention import PackedSequences
from rltrain.training.megatron.context_parallel import (
    SlicedSequences,
    SpreadHeads,
    WholeSequences,
    back_from_heads,
    spread_over_heads,
)
from rltrain.training.megatron.norms import parameter_device

PACKED = "delta net"
"""What layers make once of sequences."""


@dataclass
class DeltaSubmodules:
    """The projections into a delta net and out of it."""

    in_proj: Any
    out_proj: Any


class DepthwiseConvolution(torch.nn.Module):
    """Holds the weight [channels, kernel] of a convolution of each channel by itself."""

    def __init__(self, config: TransformerConfig, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = _parameter(config, channels, kernel)


class HeadNorm(torch.nn.Module):
    """Holds the weight [value_dim] of the norm of all heads, which every tensor-parallel rank has."""

    def __init__(self, config: TransformerConfig, value_dim: int) -> None:
        super().__init__()
        self.weight = _parameter(config, value_dim)


class PackedDeltaNet(MegatronModule):
    """The gated delta net of one layer; each tensor-parallel rank has some key heads with their value heads, which
    context-parallel ones share out for all tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        *,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.delta = delta.shared_by(self.tp_group.size())
        linear: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(_sizes(delta)),
            init_method=config.init_method,
            gather_output=False,
            **linear,
        )
        self.conv1d = DepthwiseConvolution(config, self.delta.channels, delta.kernel)
        self.A_log, self.dt_bias = (_parameter(config, self.delta.num_heads) for _ in range(2))
        self.gated_norm = HeadNorm(config, delta.value_dim)
        self.out_proj = build_module(
            submodules.out_proj,
            delta.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        for shard in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_parallel_attributes(shard, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences | SlicedSequences | SpreadHeads,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[tokens (of this rank), 1, hidden] -> as much, and no bias.

        Collective over: the tensor-parallel group, as Megatron's linear layers are, and in backward for the norm; the
        context-parallel one, whose ranks have all tokens of some heads each.
        """
        projected, _ = self.in_proj(hidden_states)
        if isinstance(packed_seq_params, PackedSequences):
            heads = self._core(projected[:, 0], packed_seq_params, packed_seq_params.derived)
        else:
            whole, num_ranks = packed_seq_params.of_all, self.cp_group.size()
            kinds = [kind.unflatten(-1, (num_ranks, -1)) for kind in projected[:, 0].split(_sizes(self.delta), -1)]
            of_heads = spread_over_heads(torch.cat(kinds, dim=-1), whole, self.cp_group)
            heads = back_from_heads(self._core(of_heads, whole, whole.derived), whole, self.cp_group).flatten(1)
        output: tuple[Tensor, Tensor | None] = self.out_proj(heads[:, None])
        return output

    def _core(self, projected: Tensor, sequences: PackedSequences | WholeSequences, derived: dict[str, Any]) -> Tensor:
        """[tokens of whole sequences, this rank's rows of in_proj] -> [tokens, this rank's values]."""
        if PACKED not in derived:
            derived[PACKED] = packed_states(sequences.lengths, self.delta.kernel, projected.device)

        def made(projected: Tensor) -> Tensor:
            return self._heads(projected, derived[PACKED])

        if self.training:
            repeated: Tensor = checkpoint(made, False, projected)
            return repeated
        return made(projected)

    def _heads(self, projected: Tensor, packed: PackedStates) -> Tensor:
        num_ranks, rank = self.cp_group.size(), self.cp_group.rank()
        delta = self.delta.shared_by(num_ranks)
        sections = self.conv1d.weight.split([self.delta.keys, self.delta.keys, self.delta.values])
        convolution = torch.cat([section.chunk(num_ranks)[rank] for section in sections])
        log_rate, bias = (weight.chunk(num_ranks)[rank] for weight in (self.A_log, self.dt_bias))
        *mixed, gate, weights, decays = projected.split(_sizes(delta), dim=-1)
        convolved, _ = convolve(torch.cat(mixed, dim=-1), convolution, packed)
        queries, keys, values = convolved.split([delta.keys, delta.keys, delta.values], dim=-1)
        queries, keys = (part.unflatten(-1, (-1, delta.key_dim)) for part in (queries, keys))
        values = values.unflatten(-1, (-1, delta.value_dim))
        heads, _ = gated_delta_rule(queries, keys, values, *gates(weights, decays, log_rate, bias), packed)
        # Every rank norms heads of its own by the same weight, whose gradient is that of all heads.
        weight = copy_to_tensor_model_parallel_region(self.gated_norm.weight, group=self.tp_group)
        return gated_norm(heads, gate.reshape(heads.shape), weight, self.config.layernorm_epsilon).flatten(1)


def _sizes(delta: DeltaNet) -> list[int]:
    """Of what is projected: queries, keys, values, their gates, weights, decays."""
    return [delta.keys, delta.keys, delta.values, delta.values, delta.num_heads, delta.num_heads]


def _parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, device=parameter_device(config), dtype=config.params_dtype))
