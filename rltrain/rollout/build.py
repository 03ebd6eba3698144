"""Builds the engine that a config names, and loads a checkpoint into one that no sync fills."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.config.schema import FakeQuantization
from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from rltrain.rollout.embedded.engine import build_embedded
from rltrain.rollout.engine import Engine, EngineSite, HostedEngine
from rltrain.rollout.layout import EnginePart, engine_parts
from rltrain.rollout.servers.http_engine import HttpEngine, build_http
from rltrain.rollout.servers.sglang_engine import build_sglang

BUILDERS: dict[str, Callable[[EngineSite, Callable[[], None]], HostedEngine]] = {
    "embedded": build_embedded,
    "sglang": build_sglang,
    "http": build_http,
}


# The engine of a rank of the rollout or the judge, as <role>.engine names it.


def build_engine(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """This rank's share of the engine; without weights until the first update.

    `leave` gives up what the engine has running, before its keys and values are dropped. Collective over: the engine's
    ranks.
    """
    return BUILDERS[site.settings.engine](site, leave)


# Weights of a checkpoint for an engine that no sync fills: as an update, whichever engine it is.


def serve_checkpoint(engine: Engine, site: EngineSite, version: int) -> None:
    """Have the engine of a site serve its role's checkpoint, as `version`. Raises as `reload_weights`.

    Collective over: the engine's ranks.
    """
    path, key = site.config.checkpoint_of(site.role)
    reload_weights(engine, site, Path(path), version, key=key)


def reload_weights(engine: Engine, site: EngineSite, path: Path, version: int, *, key: str) -> None:
    """Have the engine of a site serve the checkpoint in `path`, of the same architecture, as `version`; `key` names
    where that path was given. What is unfinished goes on under it.

    CheckpointError where it cannot be read. Collective over: the engine's ranks.
    """
    if isinstance(engine, HttpEngine):
        engine.reload_weights(path, version)
        return
    rank = site.world.rank
    dtype = getattr(torch, site.config.model.dtype)
    rounding = site.config.model_of(site.role).fake_quantization
    parts: Sequence[EnginePart] = engine_parts(site.config, site.architecture, site.grid, site.role)
    engine.begin_update()
    for number, part in enumerate(parts):
        incoming = engine.incoming(number)
        _load(path, part, rank, incoming, dtype, key)
        if rounding:
            _round(incoming, rounding)
        engine.arrived(number)
    engine.end_update(version)


def _round(parameters: Mapping[str, Tensor], settings: FakeQuantization) -> None:
    """Have experts be what they are in the trainer's passes. No rank's share may begin or end within a group."""
    for name, parameter in parameters.items():
        if is_expert(name):
            parameter.copy_(int4_rounded(parameter, settings.group_size, settings.scale_divisor))


def _load(
    path: Path, part: EnginePart, rank: int, parameters: Mapping[str, Tensor], dtype: torch.dtype, key: str
) -> None:
    if not part.quantized.any():
        load_parameters(path, part.plain, rank, parameters, config_key=key)
        return
    layouts = part.filled_from(part.plain)
    load_quantized(path, part.plain, layouts, rank, parameters, dtype=dtype, config_key=key)
