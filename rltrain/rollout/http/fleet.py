"""The servers of one rank: which samples are where, who is asked next, who comes and goes."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue

from rltrain.config.rollout import Http
from rltrain.errors import EngineError
from rltrain.rollout.engine import SamplingParams, response_limit
from rltrain.rollout.http.addresses import Addresses
from rltrain.rollout.http.calls import Access, ServerBusy, ServerGone, ServerRefuses
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.protocol import Receiver
from rltrain.rollout.http.server import Server
from rltrain.rollout.http.weights import Weights, WeightsLater
from rltrain.rollout.sample import Sample
from rltrain.rollout.sglang.inflight_requests import DivergenceWatch
from rltrain.rollout.stop_strings import StopCut

logger = logging.getLogger(__name__)

WITHDRAW_S = 5.0
"""For a server to tell what it has drawn of what is withdrawn."""
BUSY_S = 0.2
"""Before a server that has too much to do is asked again."""


class Fleet:
    """All but `outbox` within one event loop.

    A sample goes to the server with the fewest of this rank's, in the order in which they come. Where a server is lost,
    leaves, or has other weights than it was given, what it was drawing goes to others with what is certain of it. One
    that comes, or comes back, gets the present weights before its first sample.
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
    ) -> None:
        self.outbox: SimpleQueue[Sample | Exception] = SimpleQueue()
        """What is finished, and what ends the job."""
        self.num_sent_again = 0
        self.num_serving = 0
        self.version = 0
        """The policy version of the present weights."""
        self._divergence = DivergenceWatch()
        self._addresses, self._access, self._weights = addresses, access, weights
        self._settings, self._protocol, self._role = settings, protocol, role
        self._max_running_requests, self._max_context_tokens = max_running_requests, max_context_tokens
        self._needs_weights = needs_weights
        self._servers: dict[str, Server] = {}
        self._queue: deque[Drawing] = deque()
        self._running: dict[int, tuple[asyncio.Task[None], Server]] = {}
        self._back: dict[int, Sample] = {}
        """Samples that are being taken back, with what has come of them."""
        self._withdrawn: set[int] = set()
        """Those of them that have yet to come."""
        self._sampling: SamplingParams | None = None
        self._cut: StopCut | None = None
        self._is_held = False
        self._updating = asyncio.Lock()
        self._given: list[Server] = []
        """Servers that get the update that is under way."""
        self._names, self._job = count(), secrets.token_hex(4)
        self._served_s = time.monotonic()
        self._maintaining: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until one serves. EngineError where none does in time, or one refuses what it is to do."""
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
                logger.warning("%s is asked for again later: %s", server.url, server.problem)
        self._maintaining = asyncio.get_running_loop().create_task(self._maintain())

    async def submit(self, samples: Sequence[Sample], sampling: SamplingParams, cut: StopCut | None) -> None:
        self._sampling, self._cut = sampling, cut
        self._queue.extend(map(self._queued, samples))
        self._dispatch()

    async def take_back(self, ids: Collection[int] | None = None) -> dict[int, Sample]:
        """These samples, or all, with what is certain of each, by id; what had ended before is in the outbox."""
        back = {drawing.sample.id: drawing.sample for drawing in self._queue if ids is None or drawing.sample.id in ids}
        self._queue = deque(drawing for drawing in self._queue if drawing.sample.id not in back)
        running = {number for number in self._running if ids is None or number in ids}
        self._withdrawn |= running
        servers = {id(server): server for number in running for _, server in [self._running[number]]}
        await asyncio.gather(*(self._withdraw(server, running) for server in servers.values()))
        for number in running & self._running.keys():
            back[number] = self._stop(number).known()
        self._withdrawn -= running
        for number in running & self._back.keys():
            back[number] = self._back.pop(number)
        self._dispatch()
        return back

    async def progress(self, ids: Collection[int]) -> list[Sample]:
        """Those of the samples that servers draw, with what is certain of each."""
        for server in [server for server in self._servers.values() if server.is_uncertain]:
            with suppress(ServerGone, ServerBusy, ServerRefuses):  # who draws there will notice
                await server.confirm()
        drawings = [drawing for server in self._servers.values() for drawing in server.drawings.values()]
        return [drawing.known() for drawing in drawings if drawing.sample.id in ids]

    async def begin_update(self) -> list[Receiver]:
        """Nobody draws from here on, nor is given weights, until `end_update`; who will be given them then."""
        await self._updating.acquire()
        self._is_held = True
        order = [*self._running]
        waiting, self._queue = self._queue, deque()
        back = await self.take_back()
        self._queue = deque(self._queued(back[number]) for number in order if number in back) + waiting
        self._given = [server for server in self._servers.values() if server.serves or server.waits]
        return [server.receiver for server in self._given]

    async def end_update(self, version: int) -> None:
        """Give all servers the present weights. One that is lost meanwhile is looked for again, as ever.

        EngineError where one refuses them.
        """
        given = [server for server in self._given if server in self._servers.values()]
        outcomes = await asyncio.gather(*(server.take_weights() for server in given), return_exceptions=True)
        self.version = version
        for server, outcome in zip(given, outcomes, strict=True):
            if isinstance(outcome, ServerRefuses):
                raise EngineError(f"{self._role}.urls: {server.url} does not take the weights of {version}: {outcome}")
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
        tasks = [task for task, _ in self._running.values()]
        tasks += [server.joining for server in self._servers.values() if server.joining is not None]
        tasks += [self._maintaining] if self._maintaining is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers.values():
            with suppress(Exception):  # whatever state it is in
                await asyncio.wait_for(self._weights.forget(server.calls), WITHDRAW_S)
            await server.close()

    # Who comes and goes.

    async def _maintain(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._settings.reread_s)
                await self._look()
                if self.num_serving or not (self._queue or self._running):
                    self._served_s = time.monotonic()
                elif time.monotonic() - self._served_s > self._settings.start_timeout_s:
                    raise self._nobody(self._settings.start_timeout_s)
        except Exception as error:  # a task's error is nobody's: whoever waits for samples raises this one
            self.outbox.put(error)

    async def _look(self) -> None:
        urls = self._addresses.mine()
        for url in [url for url in self._servers if url not in urls]:
            self._retire(self._servers[url])
            # A server that leaves in the middle of an update would keep it unfinished, and refuse the next one.
            if not self._updating.locked():
                await self._leave(self._servers.pop(url))
        for url in urls:
            if url not in self._servers:
                server = Server(url, self._access, self._weights, needs_weights=self._needs_weights)
                self._servers[url] = server
            server = self._servers[url]
            _refusal_of(server)  # it has been logged
            if not (server.serves or server.waits) and (server.joining is None or server.joining.done()):
                server.joining = asyncio.get_running_loop().create_task(self._join(server))

    async def _join(self, server: Server) -> None:
        """Raises ServerRefuses."""
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
                logger.warning("%s is not asked: %s", server.url, refused)
            server.problem = str(refused)
            raise
        self._serve(server)

    def _serve(self, server: Server) -> None:
        server.serves, server.waits = True, False
        logger.info("%s serves, by %s", server.url, server.protocol.name)
        self._changed()

    def _retire(self, server: Server) -> None:
        """Gives the server's samples to others."""
        server.serves = server.waits = False
        self._requeue(server)
        self._changed()

    async def _leave(self, server: Server) -> None:
        """Closes what was open to a retired server."""
        if server.joining is not None:
            server.joining.cancel()
        with suppress(ServerGone, ServerBusy, ServerRefuses):
            await self._weights.forget(server.calls)
        await server.close()
        logger.warning("%s has left", server.url)

    def _lose(self, server: Server, why: str) -> None:
        if server.serves:
            logger.warning("%s is lost, and looked for again: %s", server.url, why)
        server.problem = why
        self._retire(server)

    def _changed(self) -> None:
        """Others serve now than before."""
        self.num_serving = sum(server.serves for server in self._servers.values())
        self._dispatch()

    def _nobody(self, seconds: float) -> EngineError:
        problems = "; ".join(f"{server.url}: {server.problem}" for server in self._servers.values())
        return EngineError(
            f"{self._role}.urls: no server has served this rank for {seconds:g} s ({self._role}.http.start_timeout_s). "
            f"{problems or self._addresses.problem or 'No URL is left to ask'}"
        )

    # What is where.

    def _dispatch(self) -> None:
        while self._queue and not self._is_held:
            free = [s for s in self._servers.values() if s.serves and len(s.drawings) < self._max_running_requests]
            if not free:
                return
            self._send(self._queue.popleft(), min(free, key=lambda server: len(server.drawings)))

    def _send(self, drawing: Drawing, server: Server) -> None:
        # A server takes a request's name for the beginning of others': none is that of another one's here.
        drawing.version, drawing.name = self.version, f"{self._job}.{next(self._names)}."
        number = drawing.sample.id
        server.drawings[number] = drawing
        task = asyncio.get_running_loop().create_task(self._draw(drawing, server))
        self._running[number] = task, server

    async def _draw(self, drawing: Drawing, server: Server) -> None:
        assert self._sampling is not None
        try:
            await server.draw(drawing, self._sampling, self._settings.hang_timeout_s)
            sample = drawing.ended(self._sampling, self._cut)
            self._divergence.ended(sample, drawing.version, len(self._running) - 1)
            self._finish(drawing, sample)
        except ServerGone as gone:
            self._lose(server, str(gone))  # with all that it draws
        except ServerBusy as busy:
            await asyncio.sleep(BUSY_S)
            self._again(self._stop(drawing.sample.id), str(busy))
            self._dispatch()
        except ServerRefuses as refused:
            self.outbox.put(
                EngineError(f"{self._role}.urls: {server.url} refuses sample {drawing.sample.id}: {refused}")
            )
        except Exception as error:  # a task's error is nobody's: whoever waits for samples raises this one
            self.outbox.put(error)

    def _finish(self, drawing: Drawing, sample: Sample) -> None:
        """A server has ended it, though perhaps for a reason of its own, before it is finished."""
        number = drawing.sample.id
        self._stop(number, cancel=False)
        if sample.is_finished:
            self.outbox.put(sample)
        elif number in self._withdrawn:
            self._back[number] = sample
        else:
            self._again(drawing, f"the server ended it ({drawing.end}) before the limit", sample)
        self._dispatch()

    def _requeue(self, server: Server) -> None:
        for number in reversed([*server.drawings]):
            self._again(self._stop(number), f"{server.url}: {server.problem}")

    def _again(self, drawing: Drawing, why: str, sample: Sample | None = None) -> None:
        """To the front of the queue."""
        sample = drawing.known() if sample is None else sample
        if drawing.sample.id in self._withdrawn:
            self._back[drawing.sample.id] = sample
            return
        again = drawing.again(sample)
        again.failures += 1
        self.num_sent_again += 1
        if again.failures > self._settings.max_retries:
            self.outbox.put(
                EngineError(
                    f"{self._role}.urls: sample {sample.id} was sent {again.failures} times in a row, and nothing came "
                    f"of it ({self._role}.http.max_retries {self._settings.max_retries}); at last: {why}"
                )
            )
            return
        self._queue.appendleft(again)

    def _queued(self, sample: Sample) -> Drawing:
        assert self._sampling is not None
        return Drawing(sample, response_limit(sample, self._sampling, self._max_context_tokens))

    def _stop(self, number: int, *, cancel: bool = True) -> Drawing:
        """Take it off its server."""
        task, server = self._running.pop(number)
        if cancel and task is not asyncio.current_task():
            task.cancel()
        return server.drawings.pop(number)

    async def _withdraw(self, server: Server, numbers: Collection[int]) -> None:
        """Have a server say what it has drawn of these; it may be lost, or silent."""
        mine = {number: drawing for number, drawing in server.drawings.items() if number in numbers}
        tasks = [self._running[number][0] for number in mine]
        if not tasks:
            return
        try:
            tells = await asyncio.wait_for(
                server.protocol.withdraw(server.calls, [drawing.name for drawing in mine.values()]), WITHDRAW_S
            )
            if tells:
                await asyncio.wait(tasks, timeout=WITHDRAW_S)
            else:
                await asyncio.wait_for(server.confirm(), WITHDRAW_S)
        except (TimeoutError, ServerGone, ServerBusy, ServerRefuses) as problem:
            logger.info("%s was asked to end %d requests: %s", server.url, len(mine), problem)


def _refusal_of(server: Server) -> BaseException | None:
    """What came of asking it to join, where it refused."""
    if server.joining is None or not server.joining.done() or server.joining.cancelled():
        return None
    return server.joining.exception()
