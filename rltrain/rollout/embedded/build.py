"""rltrain's own engine on a rank of a role."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rltrain.errors import ConfigError
from rltrain.offload.memory_parts import MemoryPart
from rltrain.rollout.embedded.engine import EmbeddedEngine
from rltrain.rollout.embedded.kv_budget import KvBudget, budget_of
from rltrain.rollout.embedded.parameters import adapted_matrices, allocate_parameters, quantized_matrices
from rltrain.rollout.engine import EngineSite, HostedEngine
from rltrain.rollout.layout import adapters_of_engine, whole_engine
from rltrain.rollout.workspace import workspace_beside_cache

logger = logging.getLogger(__name__)


def build_embedded(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says. ConfigError where <role>.kv_cache_gb cannot hold a sample, or cannot be auto."""
    config, settings, world = site.config, site.settings, site.world
    budget = budget_within(site, settings.kv_cache_gb, site.role)
    dtype = getattr(torch, config.model.dtype)
    layout = whole_engine(config, site.architecture, site.grid, site.role).layout
    weights = allocate_parameters(layout, world.rank, device=world.device)
    matrices = quantized_matrices(layout, world.rank, weights, dtype)
    adapters: dict[str, Tensor] = {}
    if lora := config.model.lora if config.keeps_adapters_apart(site.role) else None:
        beside = adapters_of_engine(config, site.architecture, site.grid, site.role).layout
        adapters = allocate_parameters(beside, world.rank, device=world.device)
        matrices = adapted_matrices(beside, world.rank, weights | adapters, matrices, lora.scale)
    engine = EmbeddedEngine(
        site.architecture,
        weights | adapters,
        tp_group=site.groups[site.ranks] if len(site.ranks) > 1 else None,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        dtype=dtype,
        device=world.device,
        tokenizer=site.tokenizer,
        matrices=matrices,
        kv_budget=budget,
        cache_returns=lambda: keeps_recordings(site, kv_cache),
        residual_dtype=getattr(torch, config.model.residual),
        head_dtype=getattr(torch, config.model.head),
        record_routing=config.model.router_replay == "rollout" and site.role == "rollout",
    )
    kv_cache = MemoryPart(engine.cache_tensors, forget=leave)
    if world.device.type == "cuda" and world.rank == site.grid.owner(0):
        logger.warning("%s.engine embedded decodes over %s", site.role, engine.decodes_by)
    engine.begin_update()  # its weights are zeros until the first update
    parts = {"weights": MemoryPart(weights.values), "kv_cache": kv_cache}
    if adapters:
        parts |= {"weights": MemoryPart(adapters.values), "base": MemoryPart(weights.values)}
    return HostedEngine(engine, parts, engine.cache_metrics)


def keeps_recordings(site: EngineSite, kv_cache: MemoryPart) -> bool:
    """Whether steps that were recorded are valid when the engine has left and come back: what they read lies where it
    was, and so do the communicators that they hold."""
    released = site.config.residency.communicators == "release" and len(site.ranks) > 1
    return kv_cache.memory.keeps_addresses and not released


def budget_within(site: EngineSite, given: float | str, role: str) -> KvBudget | None:
    """For the engine of a site, whose config section is `role`; ConfigError where auto cannot be known."""
    workspace_bytes = workspace_beside_cache(site.config, site.architecture, site.grid, role)
    budget = budget_of(given, site.world.device, workspace_bytes)
    if budget and budget.given == "auto" and site.others and not site.leaves:
        raise ConfigError(
            f"{role}.kv_cache_gb: got auto for an engine that stays on its GPU beside {', '.join(site.others)}; "
            f"expected a number, since it cannot see what those will need, or {role}.offload: true"
        )
    return budget
