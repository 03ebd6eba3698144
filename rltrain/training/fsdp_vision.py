"""Images in transformers' models under fully_shard: a tower with shards of its own, and its features in the rows of
images."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rltrain.models.table import NESTED_TOWER_PREFIX
from rltrain.models.vision import Vision
from rltrain.models.vision_tower import encode
from rltrain.training.fsdp_attention import NAME
from rltrain.training.packing import ContextShare, MicroBatch
from rltrain.training.tower_pass import Shown, Sight, Tower, TowerPass

ATTENTIONS = {"text_config": NAME, "vision_config": "sdpa"}
"""transformers' names of the attention in the parts of a vision-language model."""


class ShardedTower:
    """The vision tower of a sharded model.

    It runs outside of the language model's forward, in a TowerPass. So fully_shard treats it as a model of its own.
    """

    def __init__(self, module: torch.nn.Module, vision: Vision, sight: Sight, device: torch.device) -> None:
        self.module, self.store = module, sight.images
        self.tower = Tower.of(vision, partial(encode, module), sight, device)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def named(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters by their names in transformers' vision-language model."""
        return dict(self.module.named_parameters(prefix=NESTED_TOWER_PREFIX.removesuffix(".")))


class VisionPolicy(torch.nn.Module):
    """A vision-language model without its tower, whose head is left to the loss."""

    defers_head = True
    softcap: float | None = None

    def __init__(self, language_model: Any) -> None:
        """Takes transformers' model and removes its tower."""
        super().__init__()
        language_model.model.visual = None
        self.language_model = language_model

    @property
    def head(self) -> torch.nn.Module:
        head: torch.nn.Module = self.language_model.lm_head
        return head

    def forward(self, **arguments: Any) -> Tensor:
        """Returns the head's inputs, [1, rows, hidden]."""
        decoder = self.language_model.model.language_model
        states: Tensor = decoder(**inputs_with_images(decoder, **arguments)).last_hidden_state
        return states


def inputs_with_images(decoder: Any, *, shown: Shown | None = None, **arguments: Any) -> dict[str, Any]:
    """Returns the arguments of a decoder's call, with the features of images in place of the embeddings of their rows.

    `arguments` are those without images. They include input_ids, [1, rows].
    """
    if shown is None:
        return arguments
    embedded = decoder.get_input_embeddings()(arguments.pop("input_ids"))
    arguments["inputs_embeds"] = embedded.index_copy(1, shown.rows, shown.features[None].to(embedded.dtype))
    if shown.deepstack:
        # The decoder adds them in the order of the rows.
        order = shown.rows.argsort()
        is_image = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        is_image[0, shown.rows] = True
        arguments["visual_pos_masks"] = is_image
        arguments["deepstack_visual_embeds"] = [features.index_select(0, order) for features in shown.deepstack]
    return arguments


def positions_around_images(batch: MicroBatch, positions: Tensor) -> Tensor:
    """Returns position_ids for a vision-language model, [4, 1, rows with padding].

    The first is each row's place in its sequence, `positions` [rows with padding]. The others are the three positions
    of rotary embeddings.
    """
    if not batch.experience.has("rope_positions"):
        return positions.expand(4, 1, -1)
    of_rows = batch.rows_of(batch.experience.rope_positions)
    padding = (0, 0, 0, len(positions) - len(of_rows))
    rotary = torch.nn.functional.pad(of_rows, padding).to(positions.dtype)
    return torch.cat([positions[None], rotary.T])[:, None]


def shown_in(images: TowerPass | None, number: int, batch: MicroBatch, share: ContextShare) -> Shown | None:
    """Returns the images in this rank's rows of micro-batch `number`. None: there are none."""
    if images is None or not batch.experience.has("image_keys"):
        return None
    return images.shown(number, partial(batch.rows_with, share=share))
