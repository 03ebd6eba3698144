"""Builds the configured engine of a role, and loads checkpoints into engines without weight syncs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rltrain.checkpoint.hf_reader import load_parameters, load_quantized
from rltrain.config.schema import FakeQuantization
from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from rltrain.rollout.embedded.engine import EmbeddedEngine, build_embedded
from rltrain.rollout.engine import Engine, EngineSite, HostedEngine
from rltrain.rollout.layout import EnginePart, engine_parts
from rltrain.rollout.servers.http_engine import HttpEngine, build_http
from rltrain.rollout.servers.sglang_engine import build_sglang

BUILDERS: dict[str, Callable[[EngineSite, Callable[[], None]], HostedEngine]] = {
    "embedded": build_embedded,
    "sglang": build_sglang,
    "http": build_http,
}


# The engine named by <role>.engine, for a rank of the rollout or the judge.


def build_engine(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """Builds this rank's share of the engine. It has no weights until the first update.

    `leave` suspends the engine's running samples. It is called before keys and values are dropped. Collective over: the
    engine's ranks.
    """
    return BUILDERS[site.settings.engine](site, leave)


# Loading of checkpoints, as an update of any engine.


def serve_checkpoint(engine: Engine, site: EngineSite, version: int) -> None:
    """Loads the role's checkpoint into the engine and serves it as `version`. Raises the errors of `reload_weights`.

    Collective over: the engine's ranks.
    """
    path, key = site.config.checkpoint_of(site.role)
    reload_weights(engine, site, Path(path), version, key=key)


def reload_weights(engine: Engine, site: EngineSite, path: Path, version: int, *, key: str) -> None:
    """Loads the checkpoint in `path` into the engine and serves it as `version`. Unfinished samples continue under it.

    The checkpoint must have the same architecture. `key` is the config key of the path, for messages. Raises
    CheckpointError if the checkpoint cannot be read. Collective over: the engine's ranks.
    """
    if isinstance(engine, HttpEngine):
        engine.reload_weights(path, version)
        return
    rank = site.world.rank
    dtype = getattr(torch, site.config.model.dtype)
    rounding = site.config.model_of(site.role).fake_quantization
    parts: Sequence[EnginePart] = engine_parts(site.config, site.architecture, site.grid, site.role)
    engine.begin_update()
    if isinstance(engine, EmbeddedEngine):
        engine.forget_images()  # also those of a frozen tower, because this may be another checkpoint
    for number, part in enumerate(parts):
        incoming = engine.incoming(number)
        _load(path, part, rank, incoming, dtype, key)
        if rounding:
            _round(incoming, rounding)
        engine.arrived(number)
    engine.end_update(version)


def _round(parameters: Mapping[str, Tensor], settings: FakeQuantization) -> None:
    """Rounds expert weights as the trainer does in its passes. No quantization group may span two ranks."""
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
