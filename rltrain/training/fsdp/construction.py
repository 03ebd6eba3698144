"""transformers' own model of a checkpoint's config.json, made without memory for its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from rltrain.models import NUM_LABELS, Architecture
from rltrain.training.fsdp.attention import NAME, register

BUILT_AS = {"mimo": "qwen2"}
"""Families that transformers does not have, with the one of which it has the same model."""


class ValueModel(torch.nn.Module):
    """A decoder with a score of every token, named as in transformers' models for sequence classification."""

    def __init__(self, model: torch.nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix: str = model.base_model_prefix  # type: ignore[assignment]
        setattr(self, self.prefix, model)
        self.score = torch.nn.Linear(hidden_size, NUM_LABELS, bias=False, dtype=dtype)

    def forward(self, **arguments: Any) -> Tensor:
        """[1, rows] fp32"""
        hidden = getattr(self, self.prefix)(**arguments).last_hidden_state
        return hidden.float() @ self.score.weight[0].float()


class Policy(torch.nn.Module):
    """A causal language model as it is, of whose output nothing but the logits is kept."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, **arguments: Any) -> Tensor:
        """[1, rows, vocabulary]"""
        logits: Tensor = self.language_model(**arguments).logits
        return logits


def empty_model(folder: Path, architecture: Architecture, dtype: torch.dtype) -> torch.nn.Module:
    """With the head that `architecture` has, its parameters of `dtype` on torch's meta device, never in training mode:
    without dropout."""
    register()
    own = BUILT_AS.get(architecture.family)
    kind: Any = CONFIG_MAPPING[own] if own else AutoConfig
    config = kind.from_pretrained(folder)
    with _parameters_without_memory():
        if architecture.head == "value":
            decoder = AutoModel.from_config(config.get_text_config(), dtype=dtype, attn_implementation=NAME)
            model: torch.nn.Module = ValueModel(decoder, architecture.hidden_size, dtype)
        else:
            model = Policy(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME))
    _train_padding_tokens(model)
    return model.eval()


def checkpoint_names(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of an `empty_model` by transformers' names; those that are tied once."""
    return {name.removeprefix("language_model."): parameter for name, parameter in module.named_parameters()}


def decoder_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """In order: those that transformers says are not to be split."""
    kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in kinds]


def give_memory(module: torch.nn.Module, device: torch.device, given: dict[int, Any]) -> None:
    """To the parameters of `module` that have none, contents undefined. `given` keeps those that are tied together."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in given:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                given[id(parameter)] = (parameter, empty)  # the former too: its id must stay its own
            part._parameters[name] = given[id(parameter)][1]


def _train_padding_tokens(module: torch.nn.Module) -> None:
    """Makes embeddings give the pad token's row its gradient, as Megatron does. transformers drops that gradient,
    although a policy can draw the token as any other."""
    for part in module.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Buffers, such as rotary frequencies, are made as ever."""
    original = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        original(module, name, parameter)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
