"""The rank of test_devices: builds models for a role on torch's meta device.

As on a GPU, Megatron makes parameters on the current CUDA device, here meta. Tensors of libraries without an explicit
device are on the CPU, so a check finds them.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltrain.config import schema
from rltrain.config.models import Lora
from rltrain.errors import ConfigError
from rltrain.models import Architecture, read_architecture
from rltrain.models.registry import PREDICTIONS
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.rollout.embedded import EmbeddedEngine
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.training.fsdp_model import ShardedModel
from rltrain.training.megatron import model as megatron
from rltrain.training.megatron.platform import adapt_to_platform
from tests.support.family_checkpoints import SHAPE, tiny_config
from tests.support.trained_models import blank_model, groups_on

META = torch.device("meta")
GRIDS = {"megatron": Grid((0,)), "fsdp": Grid((0,), copies=1)}
LORA = Lora(rank=2)
UNTRAINABLE = "refused"
"""Report about a family that backend fsdp refuses."""


def built(families: Sequence[str], folder: str) -> dict[str, Any]:
    """Returns the names of tensors outside the role's device, by family and kind of model."""
    groups = _groups_of_a_stand_in_device()
    found: dict[str, Any] = {}
    for family in families:
        path = Path(folder, family)
        tiny_config(family, SHAPE | {"num_hidden_layers": 2}).save_pretrained(path)
        for kind, build in _kinds(path, groups).items():
            try:
                found[f"{family}/{kind}"] = sorted(_elsewhere(build()))
            except ConfigError as error:
                found[f"{family}/{kind}"] = UNTRAINABLE if "backend: megatron" in str(error) else str(error)
    return found


def left_on_the_host(family: str, folder: str) -> str:
    """Returns the error message of building a Megatron model without moving it to the device."""
    groups = _groups_of_a_stand_in_device()
    tiny_config(family, SHAPE).save_pretrained(folder)
    megatron.move_to_device = lambda model, device: None  # type: ignore[assignment]
    try:
        _megatron(read_architecture(Path(folder)), Path(folder), groups)
    except RuntimeError as error:
        return str(error)
    return ""


def _groups_of_a_stand_in_device() -> ProcessGroups:
    adapt_to_platform()
    torch.cuda.current_device = lambda: META  # type: ignore[assignment, return-value]
    asked = {"current_device": lambda: 0, "device_count": lambda: 1}  # by fully_shard
    torch.meta = types.SimpleNamespace(**asked)  # type: ignore[attr-defined]
    return groups_on(GRIDS.values())


def _kinds(path: Path, groups: ProcessGroups) -> dict[str, Callable[[], object]]:
    policy = read_architecture(path)
    critic = replace(policy, head="value", tied_embeddings=False)
    kinds: dict[str, Callable[[], object]] = {
        "megatron": lambda: _megatron(policy, path, groups),
        "megatron adapters": lambda: _adapted(policy, path, groups),
        "megatron critic": lambda: _megatron(critic, path, groups),
        "fsdp": lambda: _fsdp(policy, path, groups),
        "fsdp adapters": lambda: _fsdp(policy, path, groups, lora=LORA),
        "fsdp critic": lambda: _fsdp(critic, path, groups),
        "engine": lambda: _engine(policy),
    }
    if policy.family in PREDICTIONS:
        kinds["megatron prediction"] = lambda: _megatron(replace(policy, predicts=True), path, groups)
    return kinds


def _megatron(architecture: Architecture, path: Path, groups: ProcessGroups) -> megatron.LanguageModel:
    balanced = schema.MoE(aux_loss_coef=0.01, z_loss_coef=0.01) if architecture.moe else schema.MoE()
    own = {"moe": balanced, "mtp": schema.Mtp() if architecture.predicts else None}
    return blank_model(path, GRIDS["megatron"], groups, architecture=architecture, device=META, **own)


def _adapted(architecture: Architecture, path: Path, groups: ProcessGroups) -> object:
    model = _megatron(architecture, path, groups)
    return model, megatron.add_adapters(model, LORA)


def _fsdp(architecture: Architecture, path: Path, groups: ProcessGroups, lora: Lora | None = None) -> object:
    settings = {"model": schema.Model(path=str(path), dtype="float32"), "fsdp": schema.Fsdp(), "device": META}
    own = {"folder": path, "trains": lora is None, "lora": lora}
    return ShardedModel(architecture, GRIDS["fsdp"], groups, **settings, **own).module


def _engine(architecture: Architecture) -> object:
    parameters = allocate_parameters(engine_layout(architecture, Grid((0,)), dtype="float32"), 0, device=META)
    limits = {"max_running_requests": 4, "max_context_tokens": 64}
    return EmbeddedEngine(architecture, parameters, tp_group=None, dtype=torch.float32, device=META, **limits)


def _elsewhere(built: object) -> Iterator[str]:
    modules = [part for part in (built if isinstance(built, tuple) else (built,)) if isinstance(part, torch.nn.Module)]
    for name, part in (pair for module in modules for pair in module.named_modules()):
        held = {**part._parameters, **part._buffers, **vars(part)}
        for key, value in held.items():
            tensors = value if isinstance(value, list | tuple) else [value]
            yield from (f"{name}.{key}" for one in tensors if isinstance(one, Tensor) and not one.is_meta)
