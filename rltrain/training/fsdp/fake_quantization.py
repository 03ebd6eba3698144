"""transformers' experts, computing with rounded weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rltrain.config.schema import FakeQuantization
from rltrain.models.experts import is_expert
from rltrain.training.fake_quantization import rounded
from rltrain.training.fsdp.lora import Adapter


def round_experts(model: torch.nn.Module, settings: FakeQuantization) -> None:
    """Have the matrices of experts in `model` be rounded in every pass, once they are gathered; adapters are not. To be
    called after adapters were added, whose layers look their matrices up."""
    for name, part in model.named_modules():
        held = [own for own, _ in part.named_parameters(recurse=False) if is_expert(f"{name}.{own}")]
        if held and not isinstance(part, Adapter):
            part.forward = _of_rounded(part, held, part.forward, settings)


def _of_rounded(
    layer: Any, names: list[str], plain: Callable[..., Tensor], settings: FakeQuantization
) -> Callable[..., Tensor]:
    def forward(*inputs: Tensor) -> Tensor:
        held = {name: layer._parameters[name] for name in names}
        layer._parameters.update({name: rounded(weight, settings) for name, weight in held.items()})
        try:
            return plain(*inputs)
        finally:
            layer._parameters.update(held)

    return forward
