"""rltrain's own engine on a rollout rank."""

from collections.abc import Callable

import torch

from rltrain.residency.memory_parts import MemoryPart
from rltrain.rollout.embedded.engine import EmbeddedEngine
from rltrain.rollout.embedded.parameters import allocate_parameters, quantized_matrices
from rltrain.rollout.layout import whole_engine
from rltrain.rollout.site import EngineSite, HostedEngine


def build_embedded(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says."""
    config, world = site.config, site.world
    dtype = getattr(torch, config.model.dtype)
    layout = whole_engine(config, site.architecture, site.grid).layout
    parameters = allocate_parameters(layout, world.rank, device=world.device)
    engine = EmbeddedEngine(
        site.architecture,
        parameters,
        tp_group=site.groups[site.ranks] if len(site.ranks) > 1 else None,
        max_running_requests=config.rollout.max_running_requests,
        max_context_tokens=config.rollout.max_context_tokens,
        dtype=dtype,
        device=world.device,
        tokenizer=site.tokenizer,
        matrices=quantized_matrices(layout, world.rank, parameters, dtype),
    )
    engine.begin_update()  # its weights are zeros until the first weight sync
    parts = {"weights": MemoryPart(parameters.values), "kv_cache": MemoryPart(engine.cache_tensors, forget=leave)}
    return HostedEngine(engine, parts)
