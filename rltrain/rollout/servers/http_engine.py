"""Servers that somebody else runs, as one engine of a rank."""

import asyncio
import os
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

from torch import Tensor

from rltrain.config.rollout import Http
from rltrain.errors import ConfigError, DivergenceError
from rltrain.offload.memory_parts import RemotePart
from rltrain.rollout.engine import (
    EngineSite,
    HostedEngine,
    SamplingParams,
    Tokenizer,
    expect_idle,
    served_version,
    stop_cut,
)
from rltrain.rollout.layout import engine_parts, staging_bytes, whole_engine
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Access, Calls
from rltrain.rollout.servers.disk_weights import DeltaWeights, DiskWeights
from rltrain.rollout.servers.fleet import Addresses, Fleet
from rltrain.rollout.servers.http_weights import GroupWeights, Weights, shared_run
from rltrain.rollout.servers.protocols import ServerProtocol
from rltrain.rollout.servers.remote_engine import RemoteEngine
from rltrain.runtime.machine import JobThread

# Weights that nobody changes: a checkpoint that servers load where they can.


class CheckpointWeights(Weights):
    """Of engines that draw by a checkpoint as it is: `name` it once, or another one later."""

    way = "folder"

    def __init__(self, update_timeout_s: float) -> None:
        self._update_timeout_s = update_timeout_s
        self._run = secrets.token_hex(4)
        self._path = ""

    def name(self, path: Path, version: int) -> None:
        self._path, self.label = str(path.absolute()), f"{self._run}.{version}"

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        raise AssertionError("no part of these weights ever arrives")

    def arrived(self, part: int) -> None:
        raise AssertionError("no part of these weights ever arrives")

    def complete(self, version: int) -> None:
        """It lies there already."""

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "a checkpoint has been named"
        await protocol.load_from_disk(calls, self._path, self.label, self._update_timeout_s)


# Servers that somebody else runs as one engine of a rank: samples out to them, new weights into them.

T = TypeVar("T")

STEP_WAIT_S = 0.005
"""What a step waits for a response to end."""
POLL_S = 1.0
"""Between two calls of `advance` while this thread waits for servers."""
CLOSE_S = 30.0


class HttpEngine(RemoteEngine):
    """Of one rank. `max_running_requests` is for each server.

    Servers draw tokens whether or not anybody calls `step`, which returns what has finished meanwhile. A sync takes
    back what is under way, and it goes on under the new weights: what a request draws is of one version. `advance` is
    called while this rank waits for servers.
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
        super().__init__(max_running_requests, max_context_tokens, tokenizer)
        self._fleet, self._weights, self._advance = fleet, weights, advance
        self._done: list[Sample] = []
        """Finished, and not taken by a step."""
        self._ended: dict[Sample, Sample] = {}
        """What finished while it was suspended, by what was given back for it."""
        self._told_sent_again = 0
        self._loop = asyncio.new_event_loop()
        self._thread = JobThread(target=self._loop.run_forever, name="http engines", daemon=True)
        self._thread.start()

    @property
    def _num_slots(self) -> int:
        return self._max_running_requests * max(1, self._fleet.num_serving)

    def start(self) -> None:
        """Wait until a server can be asked. EngineError where none can in time, or one refuses."""
        self._wait(self._fleet.start())

    def begin_update(self) -> None:
        """Withdraw the policy version, and what servers draw by it."""
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
        """All parts have arrived: servers get them, say that they have them, and draw by them.

        EngineError where one refuses them. Collective over: the ranks of the role.
        """
        self._weights.complete(version)
        self._serve(version)

    def reload_weights(self, checkpoint: Path, version: int) -> None:
        """Have servers load a checkpoint, where they can, as `version`. Raises as `end_update`."""
        assert isinstance(self._weights, CheckpointWeights), "weights that no sync brings"
        self.policy_version = None
        self._wait(self._fleet.begin_update())
        self._weights.name(checkpoint, version)
        self._serve(version)

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> None:
        if not samples:
            return
        self._accept(samples, sampling)
        self._done += [self._ended[sample] for sample in samples if sample in self._ended]
        new = [sample for sample in samples if self._ended.pop(sample, None) is None]
        self._wait(self._fleet.submit(new, sampling, stop_cut(sampling.stop, self._tokenizer)))

    def step(self) -> list[Sample]:
        """What has finished since the last step; where nothing has, wait for some milliseconds.

        Raises SyncError between `begin_update` and `end_update`, EngineError where servers fail too often or none is
        left.
        """
        served_version(self.policy_version)
        if not self._unfinished:
            return []
        self._take_finished(0.0 if self._done else STEP_WAIT_S)
        done, self._done = self._done, []
        for sample in done:
            del self._unfinished[sample.id]
        return done

    def suspend(self) -> list[Sample]:
        return self._take_back(self._unfinished)

    def progress(self, ids: Collection[int]) -> list[Sample]:
        return self._wait(self._fleet.progress(ids))

    def withdraw(self, ids: Collection[int]) -> list[Sample]:
        return self._take_back({number: sample for number, sample in self._unfinished.items() if number in ids})

    def release_cache(self) -> None:
        """Nothing but a check: keys and values are the servers'."""
        expect_idle(self.num_unfinished, "release_cache")

    def metrics(self) -> dict[str, float]:
        """Of what it did since the last call."""
        total = self._fleet.num_sent_again
        new, self._told_sent_again = total - self._told_sent_again, total
        asked = {"rollout/servers": float(self._fleet.num_serving), "rollout/requests_sent_again": float(new)}
        return {**asked, **self._weights.metrics()}

    def close(self) -> None:
        """Leave the servers as they are."""
        self._unfinished = {}
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._fleet.close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._weights.close()

    def _serve(self, version: int) -> None:
        self._wait(self._fleet.end_update(version))
        self.policy_version = version

    def _take_back(self, wanted: Mapping[int, Sample]) -> list[Sample]:
        if not wanted:
            return []
        served_version(self.policy_version)
        order = [*wanted]
        back = self._wait(self._fleet.take_back(order))
        self._take_finished(0.0)
        for sample in [sample for sample in self._done if sample.id in wanted]:
            # Whoever gets back what has ended may go on with it elsewhere, so there has to be something left to draw.
            shorter = sample.first(len(sample.tokens) - 1)
            self._ended[shorter] = sample
            self._done.remove(sample)
            back[sample.id] = shorter
        for number in order:
            del self._unfinished[number]
        return [back[number] for number in order]

    def _take_finished(self, wait_s: float) -> None:
        """From the outbox to `_done`; waits for the first one."""
        while True:
            try:
                item = self._fleet.outbox.get(timeout=wait_s) if wait_s else self._fleet.outbox.get_nowait()
            except Empty:
                return
            if isinstance(item, DivergenceError):
                self._unfinished = {}
                self._wait(self._fleet.take_back())
            if isinstance(item, Exception):
                raise item
            if item.id in self._unfinished:
                self._done.append(item)
            wait_s = 0.0

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if future.done():
                    raise
                self._advance()


# Servers that somebody else runs, for a rank of a role; they have no memory here.


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
