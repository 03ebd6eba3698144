"""The engine of a judge: rltrain's own, with the weights of a checkpoint, which nobody changes."""

from pathlib import Path

import torch

from rltrain.checkpoint.hf import load_parameters
from rltrain.residency.memory_parts import MemoryPart
from rltrain.rollout.embedded.build import budget_within, keeps_recordings
from rltrain.rollout.embedded.engine import EmbeddedEngine
from rltrain.rollout.embedded.parameters import allocate_parameters
from rltrain.rollout.layout import engine_layout
from rltrain.rollout.site import EngineSite, HostedEngine

ROLE = "judge"


def build_judging_engine(site: EngineSite) -> HostedEngine:
    """This rank's share. CheckpointError where the checkpoint cannot be read, ConfigError where judge.kv_cache_gb
    cannot hold a sample, or cannot be auto. Collective over: the engine's ranks."""
    config, settings, world = site.config, site.config.judge, site.world
    layout = engine_layout(site.architecture, site.grid, dtype=config.model.dtype)
    parameters = allocate_parameters(layout, world.rank, device=world.device)
    path, key = config.checkpoint_of(ROLE)
    load_parameters(Path(path), layout, world.rank, parameters, config_key=key)
    engine = EmbeddedEngine(
        site.architecture,
        parameters,
        tp_group=site.groups[site.ranks] if len(site.ranks) > 1 else None,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        dtype=getattr(torch, config.model.dtype),
        device=world.device,
        tokenizer=site.tokenizer,
        kv_budget=budget_within(site, settings.kv_cache_gb, ROLE),
        cache_returns=lambda: keeps_recordings(site, kv_cache),
    )
    kv_cache = MemoryPart(engine.cache_tensors, forget=engine.release_cache)
    return HostedEngine(engine, {"weights": MemoryPart(parameters.values), "kv_cache": kv_cache})
