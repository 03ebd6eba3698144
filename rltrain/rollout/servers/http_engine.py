"""The engine of a rank on servers at URLs. rltrain neither starts nor stops these servers."""

import os
import secrets
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rltrain.config.rollout import Http
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.offload.memory_parts import RemotePart
from rltrain.rollout.engine import (
    EngineSite,
    HostedEngine,
    Tokenizer,
    expect_idle,
)
from rltrain.rollout.layout import engine_parts, staging_bytes, whole_engine
from rltrain.rollout.servers.calls import Access, Calls, LoopThread
from rltrain.rollout.servers.fleet import Addresses, Fleet
from rltrain.rollout.servers.folder_weights import AdapterWeights, DeltaWeights, DiskWeights
from rltrain.rollout.servers.http_weights import GroupWeights, Weights, shared_run
from rltrain.rollout.servers.protocols import ServerProtocol
from rltrain.rollout.servers.remote_engine import RemoteEngine
from rltrain.rollout.servers.server_images import ServerImages

# Fixed weights: servers load a checkpoint from its own folder, if they can.


class CheckpointWeights(Weights):
    """Weights of a checkpoint that no sync changes. `name` sets the checkpoint, and may set another one later."""

    way = "folder"

    def __init__(self, update_timeout_s: float) -> None:
        self._update_timeout_s = update_timeout_s
        self._run = secrets.token_hex(4)
        self._path = ""

    def name(self, path: Path, version: int) -> None:
        """Sets the checkpoint folder and its policy version."""
        self._path, self.label = str(path.absolute()), f"{self._run}.{version}"

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        raise AssertionError("no part of these weights ever arrives")

    def arrived(self, part: int) -> None:
        raise AssertionError("no part of these weights ever arrives")

    def complete(self, version: int) -> None:
        """Does nothing, because the checkpoint is complete."""

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "a checkpoint has been named"
        await protocol.load_from_disk(calls, self._path, self.label, self._update_timeout_s)


# The engine: sends samples to the servers and delivers new weights to them.

T = TypeVar("T")

POLL_S = 1.0
"""Time between two calls of `advance` during a wait for servers."""
CLOSE_S = 30.0


class HttpEngine(RemoteEngine):
    """The engine of one rank on servers at URLs.

    Servers generate between calls of `step` too. `step` returns the samples finished since the last call. A weight sync
    takes running samples back and continues them under the new weights, so all tokens of a request have one version.
    `max_running_requests` is the limit for each server. `advance` is called regularly during waits for servers.
    """

    def __init__(
        self,
        fleet: Fleet,
        weights: Weights,
        *,
        max_running_requests: int,
        max_context_tokens: int,
        advance: Callable[[], None],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(fleet, max_running_requests, max_context_tokens, tokenizer)
        self._fleet, self._weights, self._advance = fleet, weights, advance
        self._told_sent_again = 0
        self._thread = LoopThread("http engines")

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests * max(1, self._fleet.num_serving)

    def start(self) -> None:
        """Waits until one server is ready. Raises EngineError if none is ready in time, or if one refuses."""
        self._wait(self._fleet.start())

    def begin_update(self) -> None:
        """Withdraws the policy version and takes running samples back from the servers."""
        self.policy_version = None
        receivers = self._wait(self._fleet.begin_update())
        self._weights.begin()
        self._wait(self._weights.open(receivers))

    def incoming(self, part: int, *, is_kept: bool = False) -> Mapping[str, Tensor]:
        return self._weights.tensors(part)

    def arrived(self, part: int) -> None:
        self._weights.arrived(part)
        self._wait(self._weights.pass_on())

    def end_update(self, version: int) -> None:
        """Completes an update once all parts have arrived. The servers get the weights, confirm them, and then serve
        them.

        Raises EngineError if a server refuses them. Collective over: the ranks of the role.
        """
        self._weights.complete(version)
        self._serve(version)

    def reload_weights(self, checkpoint: Path, version: int) -> None:
        """Has servers load a checkpoint as `version`, if they can. Raises as `end_update` does."""
        assert isinstance(self._weights, CheckpointWeights), "weights that no sync brings"
        self.policy_version = None
        self._wait(self._fleet.begin_update())
        self._weights.name(checkpoint, version)
        self._serve(version)

    def release_cache(self) -> None:
        """Raises ValueError if samples are unfinished. The servers keep their own prefix caches."""
        expect_idle(self.num_unfinished, "release_cache")

    def metrics(self) -> dict[str, float]:
        """Returns the engine's metrics since the last call, and those of the last weight update."""
        total = self._fleet.num_sent_again
        new, self._told_sent_again = total - self._told_sent_again, total
        asked = {"rollout/servers": float(self._fleet.num_serving), "rollout/requests_sent_again": float(new)}
        return {**asked, **self._weights.metrics()}

    def close(self) -> None:
        """Closes all connections. The servers keep running."""
        self._unfinished = {}
        if not self._thread.is_closed:
            self._thread.start(self._fleet.close()).result(CLOSE_S)
            self._thread.close(CLOSE_S)
            self._weights.close()

    def _serve(self, version: int) -> None:
        self._wait(self._fleet.end_update(version))
        self.policy_version = version

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._thread.start(work)
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                self._advance()


# Builds the engine for a rank of a role. It has no memory on this rank.


def build_http(site: EngineSite, leave: Callable[[], None]) -> HostedEngine:
    """Builds this rank's engine, as rollout.build.build_engine says.

    Raises ConfigError if the config's URLs, token or files are wrong, and EngineError if no server becomes ready or one
    refuses.
    """
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
        images=ServerImages.of(site),
        trained_sampling=settings.sampling if site.weights_change else None,
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
    """Returns the token for the servers, or None if the config names none. Raises ConfigError if it names a missing
    one. `key` is the config section in messages."""
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
        raise ConfigError(f"{where} is empty or missing; expected a token")
    return token


def way_of(config: Config, role: str, *, weights_change: bool) -> type[Weights]:
    """Returns the way in which the servers of a role get weights."""
    if not weights_change:
        return CheckpointWeights
    if config.served(role).http.weights == "group":
        return GroupWeights
    if config.keeps_adapters_apart(role):
        return AdapterWeights
    return DeltaWeights if config.weight_sync.delta is not None and role == "rollout" else DiskWeights


def _weights(site: EngineSite) -> Weights:
    http, config, key = site.settings.http, site.config, f"{site.role}.http.weights_dir"
    way = way_of(config, site.role, weights_change=site.weights_change)
    if way is CheckpointWeights:
        return CheckpointWeights(http.update_timeout_s)
    whole = whole_engine(config, site.architecture, site.grid, site.role).plain
    arriving = engine_parts(config, site.architecture, site.grid, site.role)
    adapters = [part.plain for part in arriving if part.content == "adapters"]
    parts = [part.plain for part in arriving if part.content != "adapters"]
    if way is GroupWeights:
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
    if way is AdapterWeights:
        assert config.model.lora is not None, "only a model with adapters can keep them separate"
        return AdapterWeights(folder, len(parts), adapters, config.model.lora, config.model.path)
    delta = config.weight_sync.delta if way is DeltaWeights else None
    return folder if delta is None else DeltaWeights(folder, delta)


def _parts(leave: Callable[[], None]) -> dict[str, RemotePart]:
    """Returns parts without memory of this process. The servers keep theirs between the rank's tasks."""

    def nothing() -> None:
        pass

    weights = RemotePart(release=nothing, resume=nothing, num_bytes=lambda: 0, restore=nothing)
    kv_cache = RemotePart(release=nothing, resume=nothing, num_bytes=lambda: 0, forget=leave)
    return {"kv_cache": kv_cache, "weights": weights}
