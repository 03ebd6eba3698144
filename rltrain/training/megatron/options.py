"""What a model is built by, beside its architecture and its grid."""

from dataclasses import dataclass

import torch

from rltrain.config import schema


@dataclass(frozen=True)
class ModelOptions:
    """What a config says of a model and of its role's parallel sizes, on `device`, of Transformer Engine's modules or
    Megatron's own."""

    model: schema.Model
    parallel: schema.Parallel
    device: torch.device
    transformer_engine: bool

    @property
    def has_wide_head(self) -> bool:
        """Whether logits have another type than weights."""
        return self.model.head != self.model.dtype
