"""Images in Megatron's modules: a tower beside the first stage, and its features in the rows of images."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.models.vision_tower import build_tower, encode
from rltrain.training.tower_pass import Shown, Sight, Tower

NAME = "vision"
"""Name of the tower among the parameters of the chunk with the embedding."""
IMAGES, ROPE_POSITIONS = "images", "rope_positions"
"""Attributes of packed sequences: a Shown, and positions [3, rows of this rank]. They belong to the sequences because
layers are recomputed in backward, when the next micro-batch may have started."""


class SeeingTower(torch.nn.Module):
    """The vision tower of a rank with the embedding. All these ranks of a role have it whole.

    It runs outside of Megatron's schedules, in a TowerPass, so it is no part of a chunk. In data parallelism it has
    buckets of its own.
    """

    def __init__(
        self, architecture: Architecture, config: TransformerConfig, sight: Sight, device: torch.device
    ) -> None:
        """Builds the tower without its weights. It is frozen unless model.vision.train is true."""
        super().__init__()
        assert architecture.vision is not None, "the model must have a tower"
        self.module = build_tower(architecture.vision, sight.folder, config.params_dtype, device)
        self.module.requires_grad_(sight.settings.train)
        for parameter in self.module.parameters():
            # With sequence parallelism each tensor-parallel rank has the gradients of its own rows.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.store = sight.images
        self.tower = Tower.of(architecture.vision, partial(encode, self.module), sight, device)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def named_weights(self, prefix: str) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Yields the parameters with their names in a layout. `prefix` is that of the chunk with the embedding."""
        return self.module.named_parameters(prefix=prefix + NAME)


def with_images(embedded: Tensor, sequences: PackedSeqParams) -> Tensor:
    """Returns the embeddings [rows of this rank, 1, hidden] with the features of images in their rows."""
    shown: Shown | None = vars(sequences).get(IMAGES)
    if shown is None:
        return embedded
    return embedded.index_copy(0, shown.rows, shown.features[:, None].to(embedded.dtype))


def add_deepstack(layers: torch.nn.ModuleList, count: int) -> None:
    """Makes each of the first `count` layers add its own features to the rows of images. Raises ConfigError if there
    are fewer `layers`."""
    if len(layers) < count:
        raise ConfigError(
            f"the vision tower has features for the first {count} layers, but the first pipeline stage has "
            f"{len(layers)} (its first chunk, with vpp); expected at least {count}. Set layers_per_stage, or a "
            "smaller pp or vpp"
        )
    for depth, layer in enumerate(layers[:count]):
        layer.register_forward_hook(partial(_add_features, depth), with_kwargs=True)


def _add_features(
    depth: int, layer: torch.nn.Module, inputs: Any, settings: Mapping[str, Any], outputs: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    shown: Shown | None = vars(settings["packed_seq_params"]).get(IMAGES)
    if shown is None:
        return outputs
    hidden, context = outputs
    return hidden.index_add(0, shown.rows, shown.deepstack[depth][:, None].to(hidden.dtype)), context
