"""Multi-head latent attention (DeepSeek-V3, Moonlight) over packed sequences, without Transformer Engine."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.attention import inverse_frequencies
from rltrain.models.families import LATENT_NORM_EPS
from rltrain.training.megatron.attention import PositionRotaryEmbedding
from rltrain.training.megatron.versions import ModulesOfSpec


class ExplicitLatentAttention(ModulesOfSpec, MLASelfAttention):
    """Megatron's latent attention on explicit process groups.

    Megatron's own asks the global parallel state for the group over which queries are split that are made from the
    hidden state.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        **settings: Any,
    ) -> None:
        with_group = ModuleSpec(module=submodules.linear_q_proj, params={"tp_group": pg_collection.tp})
        super().__init__(config, replace(submodules, linear_q_proj=with_group), pg_collection=pg_collection, **settings)
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):
            projection: Any = getattr(self, name, None)
            if hasattr(projection, "eps"):  # Transformer Engine's, which has the latent's norm inside
                projection.eps = LATENT_NORM_EPS


class LatentSelfAttention(ExplicitLatentAttention):
    """The same of Megatron's own layers, of which those that make the latents are split as well, and ask the global
    parallel state when they are to be put together."""

    def __init__(self, config: MLATransformerConfig, *arguments: Any, **settings: Any) -> None:
        super().__init__(config, *arguments, **settings)
        self.linear_kv_down_proj.register_forward_hook(_whole_latent)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj.register_forward_hook(_whole_latent)


def _whole_latent(projection: ColumnParallelLinear, _: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """(all elements of the latents of this rank's tokens, the projection's bias), from a share of all tokens' latents.

    Collective over: the tensor-parallel group.
    """
    whole = gather_from_tensor_model_parallel_region(output[0], group=projection.tp_group)
    if projection.sequence_parallel:
        whole = scatter_to_sequence_parallel_region(whole, group=projection.tp_group)
    return whole, output[1]


class LatentRotaryEmbedding(PositionRotaryEmbedding):
    """The rotary embedding of MLASelfAttention for the positions in packed sequences."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        super().__init__(inverse_frequencies(architecture).to(device))
        self.magnitude = architecture.rotation_magnitude

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles [tokens, 1, rotated elements], as all heads of packed tokens take them, and `magnitude` unless it
        is 1."""
        return _beside(self.magnitude, super().forward(positions)[:, 0])


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, which Transformer Engine's layers take, with the model's own frequencies."""

    def __init__(
        self, architecture: Architecture, config: MLATransformerConfig, device: torch.device, like: Any
    ) -> None:
        super().__init__(
            architecture.rotated_size,
            rotary_percent=1.0,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=like.cp_group,
        )
        self.inv_freq = inverse_frequencies(architecture).to(device)
        self.magnitude = architecture.rotation_magnitude

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        """As Megatron's, and `magnitude` unless it is 1."""
        return _beside(self.magnitude, super().forward(*arguments, **settings))


def _beside(magnitude: float, angles: Tensor) -> Tensor | tuple[Tensor, float]:
    """What Megatron expects of a rotary embedding, as attention_settings tells it: angles, or both."""
    return angles if magnitude == 1 else (angles, magnitude)


def rotate_by_position(model: torch.nn.Module, architecture: Architecture, device: torch.device) -> None:
    """Give all latent attention in `model` one rotary embedding, of the model's frequencies."""
    packed = LatentRotaryEmbedding(architecture, device)
    for module in model.modules():
        if isinstance(module, LatentSelfAttention):
            module.rotary_pos_emb = packed
        elif isinstance(module, ExplicitLatentAttention):
            module.rotary_pos_emb = ScaledRotaryEmbedding(architecture, module.config, device, module.rotary_pos_emb)
