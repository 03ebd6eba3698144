"""Servers that somebody else runs, for a rank of a role; they have no memory here."""

import os
from collections.abc import Callable
from pathlib import Path

from rltrain.config.rollout import Http
from rltrain.errors import ConfigError
from rltrain.offload.memory_parts import RemotePart
from rltrain.rollout.engine import EngineSite, HostedEngine
from rltrain.rollout.http.addresses import Addresses
from rltrain.rollout.http.calls import Access
from rltrain.rollout.http.checkpoint_weights import CheckpointWeights
from rltrain.rollout.http.delta_weights import DeltaWeights
from rltrain.rollout.http.disk_weights import DiskWeights
from rltrain.rollout.http.engine import HttpEngine
from rltrain.rollout.http.fleet import Fleet
from rltrain.rollout.http.group_weights import GroupWeights
from rltrain.rollout.http.weights import Weights, shared_run
from rltrain.rollout.layout import engine_parts, staging_bytes, whole_engine


def build_http(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """As rollout.build says. ConfigError where servers cannot be named or reached as the config says, EngineError where
    they refuse what they are to do."""
    settings, http = site.settings, site.settings.http
    number = site.grid.ranks.index(site.world.rank)
    addresses = Addresses(
        settings.urls, f"{site.role}.urls", site.job_store, site.role, number, num_ranks=len(site.grid.ranks)
    )
    access = Access(token_of(http, f"{site.role}.http"), http.ca_file)
    weights = _weights(site)
    fleet = Fleet(
        addresses,
        access,
        weights,
        http,
        protocol=settings.protocol,
        role=site.role,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        needs_weights=site.weights_change,
    )
    engine = HttpEngine(
        fleet,
        weights,
        max_running_requests=settings.max_running_requests,
        max_context_tokens=settings.max_context_tokens,
        advance=site.job_store.heartbeat.advance,
        tokenizer=site.tokenizer,
    )
    engine.start()
    return HostedEngine(engine, _parts(leave), engine.metrics)


def token_of(http: Http, key: str) -> str | None:
    """That servers ask for; ConfigError where it is named and not there."""
    if http.token_env is not None and http.token_file is not None:
        raise ConfigError(f"{key}: got both token_env and token_file; expected one")
    if http.token_env is not None:
        token = os.environ.get(http.token_env, "")
        where = f"{key}.token_env: the environment variable {http.token_env}"
    elif http.token_file is not None:
        where = f"{key}.token_file: {http.token_file}"
        try:
            token = Path(http.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}; expected a file with a token") from None
    else:
        return None
    if not token:
        raise ConfigError(f"{where} is empty or not there; expected a token")
    return token


def _weights(site: EngineSite) -> Weights:
    http, config, key = site.settings.http, site.config, f"{site.role}.http.weights_dir"
    if not site.weights_change:
        return CheckpointWeights(http.update_timeout_s)
    whole = whole_engine(config, site.architecture, site.grid, site.role).plain
    parts = [part.plain for part in engine_parts(config, site.architecture, site.grid, site.role)]
    if http.weights == "group":
        return GroupWeights(
            parts,
            site.world.rank,
            device=site.world.device,
            run=shared_run(site.job_store, site.role, leads=site.world.rank == site.grid.ranks[0]),
            update_timeout_s=http.update_timeout_s,
        )
    folder = DiskWeights(
        whole,
        parts,
        staging_bytes(site.settings),
        site.world.rank,
        device=site.world.device,
        folder=Path(http.weights_dir or Path(config.output_dir) / "http_weights"),
        like=Path(config.checkpoint_of(site.role)[0]),
        job_store=site.job_store,
        role=site.role,
        config_key=key if http.weights_dir else "output_dir",
        update_timeout_s=http.update_timeout_s,
    )
    delta = config.weight_sync.delta if site.role == "rollout" else None
    return folder if delta is None else DeltaWeights(folder, delta)


def _parts(leave: Callable[[], None]) -> dict[str, RemotePart]:
    """Servers keep their memory whatever this rank's devices are used for."""

    def nothing() -> None:
        pass

    weights = RemotePart(release=nothing, resume=nothing, num_bytes=lambda: 0, restore=nothing)
    kv_cache = RemotePart(release=nothing, resume=nothing, num_bytes=lambda: 0, forget=leave)
    return {"kv_cache": kv_cache, "weights": weights}
