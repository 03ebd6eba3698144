"""The servers of one rank: their list, their requests, and changes of the list during the job."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rltrain.config.rollout import Http, Sampling
from rltrain.errors import ConfigError, EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample
from rltrain.rollout.servers.calls import Access, Calls, ServerBusy, ServerGone, ServerRefuses, words
from rltrain.rollout.servers.http_weights import Weights, WeightsLater
from rltrain.rollout.servers.protocols import (
    MODELS,
    NO_SUCH_ROUTE,
    OpenAIProtocol,
    Receiver,
    ServerDescription,
    ServerProtocol,
    SGLangProtocol,
    VLLMProtocol,
)
from rltrain.rollout.servers.remote_engine import Drawing, DrawingServer, Requests
from rltrain.rollout.servers.server_images import ServerImages
from rltrain.runtime.job_store import JobStore

# The list of servers and their assignment to ranks, from the config or from a file that may change.

SCHEMES = ("http://", "https://")


def checked(urls: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the URLs without trailing slashes. Raises ConfigError if one is not a URL or is listed twice. `where`
    names the list in messages."""
    plain = tuple(url.strip().rstrip("/") for url in urls)
    for url in plain:
        if not url.startswith(SCHEMES) or not url.split("://", 1)[1]:
            raise ConfigError(f"{where}: got {url!r}; expected a URL such as http://10.0.0.5:30000")
        if plain.count(url) > 1:
            raise ConfigError(f"{where}: {url} is listed {plain.count(url)} times; expected once")
    return plain


def read(path: Path, where: str) -> tuple[str, ...]:
    """Reads a file with one URL per line and comments after #. Raises ConfigError if it cannot be read or has a wrong
    URL."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}; expected a file with a URL a line") from None
    return checked([line for line in (raw.split("#", 1)[0].strip() for raw in lines) if line], f"{where}, {path}")


def dealt_out(urls: Sequence[str], before: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Assigns each URL to one of `num_ranks` ranks.

    Assignments in `before` stay. A new URL goes to the rank with the fewest. A rank without URLs takes one from the
    rank with the most.
    """
    dealt = {url: before[url] for url in urls if url in before}
    held: list[list[str]] = [[url for url in dealt if dealt[url] == rank] for rank in range(num_ranks)]
    for url in urls:
        if url not in dealt:
            min(held, key=len).append(url)
            dealt[url] = -1
    while len(most := max(held, key=len)) > 1 and not (fewest := min(held, key=len)):
        fewest.append(most.pop())
    return {url: rank for rank, of_rank in enumerate(held) for url in of_rank}


class Addresses:
    """The URLs of the servers of a role's rank number `number` of `num_ranks`.

    The first rank reads the file and publishes the assignment in the job store. A file with an error, such as one that
    is being written, changes nothing.
    """

    def __init__(
        self, given: Sequence[str] | str, where: str, job_store: JobStore, key: str, number: int, num_ranks: int
    ) -> None:
        self._file = Path(given) if isinstance(given, str) else None
        self._where, self._job_store, self._key = where, job_store, f"http/{key}/urls"
        self._number, self._num_ranks = number, num_ranks
        self._dealt: dict[str, int] = {}
        self.problem: str | None = None
        """The current error of the file, or None."""
        urls = read(self._file, where) if self._file else checked(given, where)
        if len(urls) < num_ranks:
            raise ConfigError(
                f"{where}: got {len(urls)} for {num_ranks} ranks of role {key}; expected at least one for each. Name "
                "more, or place the role on fewer ranks; each rank can use many servers"
            )
        self._deal(urls)

    def mine(self) -> tuple[str, ...]:
        """Returns the current URLs of this rank."""
        if self._file is not None:
            self._look(self._file)
        return tuple(url for url, number in self._dealt.items() if number == self._number)

    def _look(self, file: Path) -> None:
        if self._number > 0:
            if self._job_store.has(self._key):
                self._dealt = json.loads(self._job_store.store.get(self._key))
            return
        try:
            urls, self.problem = read(file, self._where), None
        except ConfigError as error:
            self.problem = str(error)
            return
        if {*urls} != self._dealt.keys():
            self._deal(urls)

    def _deal(self, urls: Sequence[str]) -> None:
        self._dealt = dealt_out(urls, self._dealt, self._num_ranks)
        if self._number == 0 and self._file is not None:
            self._job_store.put(self._key, self._dealt)


# The protocol of a server, from the config or detected.

PROTOCOLS: dict[str, ServerProtocol] = {
    protocol.name: protocol for protocol in (SGLangProtocol(), VLLMProtocol(), OpenAIProtocol())
}


async def protocol_of(calls: Calls, named: str) -> ServerProtocol:
    """Returns the protocol with the name `named`, from rollout.protocol. "auto" asks the server for the owner of its
    models.

    Raises as `Calls` does, and ServerRefuses for "openai" if the server has a protocol of its own. Through OpenAI's API
    SGLang would refuse weights while it is not idle, and vLLM would add the checkpoint's own limits to the sampling.
    """
    if named not in ("auto", OpenAIProtocol.name):
        return PROTOCOLS[named]
    try:
        listed = (await calls.get(MODELS))["data"]
    except ServerRefuses as refused:
        how = "; set rollout.protocol to the protocol of the server" if refused.status in NO_SUCH_ROUTE else ""
        raise ServerRefuses(f"{refused}{how}", refused.status) from None
    found = PROTOCOLS.get(str(listed[0].get("owned_by")), PROTOCOLS["openai"])
    if named not in ("auto", found.name):
        told = f"{calls.url} is a server of {found.name}; expected protocol: {found.name} or auto, got {named}"
        raise ServerRefuses(told, HTTPStatus.BAD_REQUEST)
    return found


logger = logging.getLogger(__name__)


# One server of a rank: its protocol, its requests, and the check of its weights.


class FleetServer(DrawingServer):
    """A server at a URL.

    With `needs_weights` a server is refused if it cannot take weights by the way of `weights`. Otherwise such a server
    keeps its own weights. With `needs_images` a server is refused if it takes no images with token ids. With
    `trained_sampling` it is refused if it returns other log-probs for samples of this kind.
    """

    def __init__(
        self,
        url: str,
        access: Access,
        weights: Weights,
        *,
        needs_weights: bool,
        needs_images: bool = False,
        trained_sampling: Sampling | None = None,
    ) -> None:
        super().__init__(Calls(url, access))
        self._needs_images, self._trained_sampling = needs_images, trained_sampling
        self.serves = False
        """Whether the server has the current weights and may be sent samples."""
        self.waits = False
        """Whether the server lacks the current weights and waits for the next update."""
        self.joining: asyncio.Task[None] | None = None
        self._weights, self._needs_weights = weights, needs_weights
        self._protocol: ServerProtocol | None = None
        self.described = ServerDescription("")
        self.keeps_own: str | None = None
        """The reason if the server cannot take the weights, or None."""
        self._upcoming: asyncio.Future[None] | None = None
        self._confirming: asyncio.Task[None] | None = None

    @property
    def protocol(self) -> ServerProtocol:
        assert self._protocol is not None, "the server was introduced"
        return self._protocol

    @property
    def receiver(self) -> Receiver:
        return Receiver(self.protocol, self.calls)

    @property
    def is_uncertain(self) -> bool:
        """Whether the server has received tokens that `confirm` would make certain."""
        return not all(drawing.is_certain for drawing in self.drawings.values())

    async def introduce(self, protocol: str, max_context_tokens: int) -> None:
        """Asks the server for its protocol, model and limits. Raises ServerRefuses if it cannot be used."""
        with in_known_form(self.url):
            await self.ask(protocol)
            lacks = await self.lacks(max_context_tokens)
        if lacks:
            raise ServerRefuses(f"{self.url} ({self.protocol.name}) {'; it '.join(lacks)}", 400)
        if self.keeps_own is not None:
            logger.warning("%s keeps the weights that it was started with: %s", self.url, self.keeps_own)

    async def ask(self, protocol: str) -> None:
        """Asks the server for its protocol, model and limits."""
        self._protocol = await protocol_of(self.calls, protocol)
        self.described = await self._protocol.describe(self.calls)

    async def lacks(self, max_context_tokens: int) -> list[str]:
        """Returns what the server lacks for the job: sentences about it without a subject. Requires `ask` before."""
        found = []
        if self._needs_images and not self.protocol.takes_images:
            found.append("takes no images with token ids; expected a server of SGLang, or no model.vision")
        context = self.described.max_context_tokens
        if context is not None and context < max_context_tokens:
            found.append(
                f"has a context of {context} tokens; expected rollout.max_context_tokens = {max_context_tokens} or "
                "more. Start the server with it, or lower that key"
            )
        if self._trained_sampling and (why := await self.protocol.without_logprobs(self.calls, self._trained_sampling)):
            found.append(f"returns log-probs that do not fit: {why}")
        why = self.keeps_own = await self._refuses_weights()
        if why is not None and self._needs_weights:
            way = _named(self._weights.way)
            found.append(f"takes no weights by way of {way}, and would silently keep old ones: {why}")
        return found

    async def _refuses_weights(self) -> str | None:
        if self._weights.way not in self.protocol.ways:
            return f"rltrain knows no such way for servers of {self.protocol.name}{INSTEAD.get(self._weights.way, '')}"
        return self._weights.refusal(self.protocol) or await self.protocol.prepare_for_weights(
            self.calls, self._weights.way, self._weights.lora_rank
        )

    async def take_weights(self) -> None:
        """Makes sure that the server has the current weights.

        Raises ServerGone if the server then reports others, and WeightsLater as `Weights.give` does.
        """
        label = self.expected
        if label is None:
            return
        if await self.protocol.version(self.calls) != label:
            await self._weights.give(self.protocol, self.calls)
        self._check(await self.protocol.version(self.calls))

    @property
    def expected(self) -> str | None:
        """The label of the weights required of the server, or None if it keeps its own."""
        return self._weights.label if self.keeps_own is None else None

    def request(self, drawings: Sequence[Drawing], sampling: SamplingParams) -> tuple[str, Mapping[str, Any]]:
        return self.protocol.request(drawings[0], sampling, self.described, self._adapter)

    async def draw(
        self,
        drawings: Sequence[Drawing],
        sampling: SamplingParams,
        limit_s: float | None,
        ended: Callable[[Drawing], None],
    ) -> None:
        try:
            await super().draw(drawings, sampling, limit_s, ended)
        except ServerRefuses:
            if self._adapter is not None:  # a restarted server does not know it
                self._check(await self.protocol.version(self.calls))
            raise

    @property
    def _adapter(self) -> str | None:
        return self._weights.adapter if self.keeps_own is None else None

    def take(self, drawing: Drawing, event: Mapping[str, Any]) -> None:
        """Adds the tokens of an event. Tokens of other weights never become certain."""
        label = self.protocol.take(drawing, event)
        if label is not None and self.expected is not None:
            self._check(label)
        if label is not None or self.expected is None:
            drawing.num_certain = len(drawing.tokens)

    async def withdraw(self, names: Sequence[str]) -> bool:
        return await self.protocol.withdraw(self.calls, names)

    async def confirm(self) -> None:
        """Checks that the server still has the current weights, and marks its tokens so far as certain.

        A restarted server would not have these weights. Concurrent calls share one request.
        """
        if self._upcoming is None:
            self._upcoming = asyncio.get_running_loop().create_future()
        upcoming = self._upcoming
        if self._confirming is None or self._confirming.done():
            self._confirming = asyncio.get_running_loop().create_task(self._confirm())
        await asyncio.shield(upcoming)

    async def _confirm(self) -> None:
        while self._upcoming is not None:
            upcoming, self._upcoming = self._upcoming, None
            drawn = [(drawing, len(drawing.tokens)) for drawing in self.drawings.values()]
            try:
                if self.expected is not None:
                    self._check(await self.protocol.version(self.calls))
            except Exception as error:  # the waiting callers raise it
                upcoming.set_exception(error)
                upcoming.exception()  # marks it as retrieved, in case no caller waits any more
                continue
            for drawing, num_certain in drawn:
                drawing.num_certain = max(drawing.num_certain, num_certain)
            upcoming.set_result(None)

    def _check(self, label: str | None) -> None:
        if label != self.expected:
            raise ServerGone(
                f"{self.url} has weights of version {label}; expected {self.expected}. It was restarted, or gets "
                "weights from another job too"
            )

    async def close(self) -> None:
        await self.calls.close()


@contextmanager
def in_known_form(url: str) -> Iterator[None]:
    """Raises ServerRefuses in place of errors of code that reads answers of the server at `url`."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerRefuses(f"{url} answers in an unknown form: {words(error)}", 400) from error


INSTEAD = {
    "delta": "; expected weight_sync.delta: null",
    "adapters": "; expected weight_sync.adapters: merged",
}
"""What to set in place of a way that a protocol lacks."""


def _named(way: str) -> str:
    """Returns the way with its config key."""
    if way == "adapters":
        return "adapters apart (weight_sync.adapters)"
    return f"a {way} ({'weight_sync.delta' if way == 'delta' else 'http.weights'})"


# The fleet: distributes samples, follows changes of the list, and replaces lost servers.

WITHDRAW_S = 5.0
"""Time for a server to return the tokens of withdrawn samples."""


class Fleet(Requests):
    """The servers of one rank, and its samples there.

    A sample goes to the server with the fewest samples of this rank. If a server is lost, leaves, or has wrong weights,
    its samples continue on others. A new or returning server gets the current weights before its first sample.
    `trained_sampling` is the sampling of samples whose log-probs are used, or None.
    """

    def __init__(
        self,
        addresses: Addresses,
        access: Access,
        weights: Weights,
        settings: Http,
        *,
        protocol: str,
        role: str,
        max_running_requests: int,
        max_context_tokens: int,
        needs_weights: bool,
        images: ServerImages | None = None,
        trained_sampling: Sampling | None = None,
    ) -> None:
        super().__init__(
            max_running_requests=max_running_requests,
            max_context_tokens=max_context_tokens,
            withdraw_s=WITHDRAW_S,
            stream_limit_s=settings.hang_timeout_s,
            where=f"{role}.urls",
            images=images,
        )
        self.num_serving = 0
        self._addresses, self._weights = addresses, weights
        self._settings, self._protocol, self._role = settings, protocol, role
        self._new_server = partial(
            FleetServer,
            access=access,
            weights=weights,
            needs_weights=needs_weights,
            needs_images=images is not None,
            trained_sampling=trained_sampling,
        )
        self._servers: dict[str, FleetServer] = {}
        self._updating = asyncio.Lock()
        self._given: list[FleetServer] = []
        """Servers that receive the update under way."""
        self._served_s = time.monotonic()
        self._maintaining: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Waits until one server serves. Raises EngineError if none does in time, or if one refuses."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        while True:
            await self._look()
            joining = [server.joining for server in self._servers.values() if server.joining is not None]
            if joining:
                await asyncio.wait(joining, timeout=max(0.0, deadline - time.monotonic()))
            if refusals := [error for server in self._servers.values() if (error := _refusal_of(server)) is not None]:
                raise EngineError(f"{self._role}.urls: {refusals[0]}")
            if self.num_serving:
                break
            if time.monotonic() > deadline:
                raise self._nobody(self._settings.start_timeout_s)
            await asyncio.sleep(min(self._settings.reread_s, 1.0))
        for server in self._servers.values():
            if not server.serves:
                logger.warning("%s is not ready and is tried again later: %s", server.url, server.problem)
        self._maintaining = asyncio.get_running_loop().create_task(self._maintain())

    async def progress(self, ids: Collection[int]) -> list[Sample]:
        """Returns these samples with their certain tokens if servers are running them."""
        for server in [server for server in self._servers.values() if server.is_uncertain]:
            with suppress(ServerGone, ServerBusy, ServerRefuses):  # the requests on that server notice it too
                await server.confirm()
        return await super().progress(ids)

    async def begin_update(self) -> list[Receiver]:
        """Stops all requests and weight transfers until `end_update`. Returns the servers that will get the update."""
        await self._updating.acquire()
        self._is_held = True
        order = [*self._running]
        waiting = [*self._queue]
        self._queue.clear()
        back = await self.take_back()
        self._queue.extend([*(self._queued(back[number]) for number in order if number in back), *waiting])
        self._given = [server for server in self._servers.values() if server.serves or server.waits]
        return [server.receiver for server in self._given]

    async def end_update(self, version: int) -> None:
        """Gives the new weights to all servers. A server lost meanwhile is looked for again.

        Raises EngineError if a server refuses them.
        """
        given = [server for server in self._given if server in self._servers.values()]
        outcomes = await asyncio.gather(*(server.take_weights() for server in given), return_exceptions=True)
        self.version = version
        for server, outcome in zip(given, outcomes, strict=True):
            if isinstance(outcome, ServerRefuses):
                raise EngineError(f"{self._role}.urls: {server.url} refuses weights of version {version}: {outcome}")
            if isinstance(outcome, (ServerGone, ServerBusy, WeightsLater)):
                self._lose(server, str(outcome))
            elif outcome is not None:
                raise outcome
            elif server.waits:
                self._serve(server)
        self._is_held = False
        self._updating.release()
        self._dispatch()

    async def close(self) -> None:
        """Ends all requests and connections. The servers keep running."""
        await self.stop()
        tasks = [server.joining for server in self._servers.values() if server.joining is not None]
        tasks += [self._maintaining] if self._maintaining is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers.values():
            with suppress(Exception):  # the server may be in any state
                await asyncio.wait_for(self._weights.forget(server.calls), WITHDRAW_S)
            await server.close()

    # Changes of the list of servers.

    async def _maintain(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._settings.reread_s)
                await self._look()
                if self.num_serving or not (self._queue or self._running):
                    self._served_s = time.monotonic()
                elif time.monotonic() - self._served_s > self._settings.start_timeout_s:
                    raise self._nobody(self._settings.start_timeout_s)
        except Exception as error:  # the engine's next step raises it
            self.outbox.put(error)

    async def _look(self) -> None:
        urls = self._addresses.mine()
        for url in [url for url in self._servers if url not in urls]:
            self._retire(self._servers[url])
            # A server that leaves during an update would keep its update session open and refuse the next one.
            if not self._updating.locked():
                await self._leave(self._servers.pop(url))
        for url in urls:
            if url not in self._servers:
                self._servers[url] = self._new_server(url)
            server = self._servers[url]
            _refusal_of(server)  # it has been logged
            if not (server.serves or server.waits) and (server.joining is None or server.joining.done()):
                server.joining = asyncio.get_running_loop().create_task(self._join(server))

    async def _join(self, server: FleetServer) -> None:
        """Introduces a server and gives it the weights. Raises ServerRefuses."""
        try:
            await server.introduce(self._protocol, self._max_context_tokens)
            async with self._updating:
                await server.take_weights()
        except (ServerGone, ServerBusy) as problem:
            server.problem = str(problem)
            return
        except WeightsLater as later:
            server.waits, server.problem = True, str(later)
            logger.info("%s", later)
            return
        except ServerRefuses as refused:
            if server.problem != str(refused):
                logger.warning("%s is not used: %s", server.url, refused)
            server.problem = str(refused)
            raise
        self._serve(server)

    def _serve(self, server: FleetServer) -> None:
        server.serves, server.waits = True, False
        logger.info("%s serves, with protocol %s", server.url, server.protocol.name)
        self._changed()

    def _retire(self, server: FleetServer) -> None:
        """Takes a server out of service and queues its samples again."""
        server.serves = server.waits = False
        self._requeue(server)
        self._changed()

    async def _leave(self, server: FleetServer) -> None:
        """Closes the connections to a retired server."""
        if server.joining is not None:
            server.joining.cancel()
        with suppress(ServerGone, ServerBusy, ServerRefuses):
            await self._weights.forget(server.calls)
        await server.close()
        logger.warning("%s has left", server.url)

    def _lose(self, server: DrawingServer, why: str) -> None:
        assert isinstance(server, FleetServer)
        if server.serves:
            logger.warning("%s is lost and is tried again later: %s", server.url, why)
        server.problem = why
        self._retire(server)

    def _changed(self) -> None:
        """Counts the serving servers and sends queued samples."""
        self.num_serving = sum(server.serves for server in self._servers.values())
        self._dispatch()

    def _nobody(self, seconds: float) -> EngineError:
        problems = "; ".join(f"{server.url}: {server.problem}" for server in self._servers.values())
        return EngineError(
            f"{self._role}.urls: no server has served this rank for {seconds:g} s ({self._role}.http.start_timeout_s). "
            f"{problems or self._addresses.problem or 'No URL is left to ask'}"
        )

    # Requests and their samples.

    def _free_server(self) -> FleetServer | None:
        free = [s for s in self._servers.values() if s.serves and len(s.drawings) < self._max_running_requests]
        return min(free, key=lambda server: len(server.drawings), default=None)

    def _not_back(self, server: DrawingServer, why: str) -> None:
        logger.info("%s was asked to end requests: %s", server.url, why)

    def _wrong_end(self, drawing: Drawing, again: Drawing, why: str) -> EngineError | None:
        if again.failures <= self._settings.max_retries:
            return None
        return EngineError(
            f"{self._role}.urls: sample {again.sample.id} was sent {again.failures} times in a row without a new token "
            f"({self._role}.http.max_retries {self._settings.max_retries}). The last reason: {why}"
        )


def _refusal_of(server: FleetServer) -> BaseException | None:
    """Returns the exception of the server's attempt to join, or None."""
    if server.joining is None or not server.joining.done() or server.joining.cancelled():
        return None
    return server.joining.exception()
