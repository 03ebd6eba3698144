"""One server that a rank asks: what it is, what it draws, and whether it still has the weights that it was given."""

import asyncio
import logging
from contextlib import aclosing

from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.http.calls import Access, Calls, ServerGone, ServerRefuses, words
from rltrain.rollout.http.detection import protocol_of
from rltrain.rollout.http.drawing import Drawing
from rltrain.rollout.http.protocol import Described, Receiver, ServerProtocol
from rltrain.rollout.http.weights import Weights

logger = logging.getLogger(__name__)


class Server:
    """Within one event loop. Raises as `Calls` does.

    `needs_weights`: one that takes none by the way of `weights` is refused; else it draws by those that it has.
    """

    def __init__(self, url: str, access: Access, weights: Weights, *, needs_weights: bool) -> None:
        self.calls = Calls(url, access)
        self.serves = False
        """Whether it has the present weights and may be sent samples."""
        self.waits = False
        """Whether it is to get the next weights, not having the present ones."""
        self.problem = "has not answered yet"
        """Why it does not serve."""
        self.joining: asyncio.Task[None] | None = None
        self.drawings: dict[int, Drawing] = {}
        """What it draws, by the samples' ids."""
        self._weights, self._needs_weights = weights, needs_weights
        self._protocol: ServerProtocol | None = None
        self._described = Described("")
        self._takes_weights = True
        self._upcoming: asyncio.Future[None] | None = None
        self._confirming: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.calls.url

    @property
    def protocol(self) -> ServerProtocol:
        assert self._protocol is not None, "the server was introduced"
        return self._protocol

    @property
    def receiver(self) -> Receiver:
        return Receiver(self.protocol, self.calls)

    @property
    def is_uncertain(self) -> bool:
        """Whether `confirm` would tell anything."""
        return any(drawing.num_certain < len(drawing.tokens) for drawing in self.drawings.values())

    async def introduce(self, protocol: str, max_context_tokens: int) -> None:
        """Learn what it is. ServerRefuses where it is of no use here."""
        try:
            await self._introduce(protocol, max_context_tokens)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefuses(f"{self.url} answers in a form that is not known here: {words(error)}", 400) from error

    async def _introduce(self, protocol: str, max_context_tokens: int) -> None:
        self._protocol = await protocol_of(self.calls, protocol)
        self._described = await self._protocol.describe(self.calls)
        context = self._described.max_context_tokens
        if context is not None and context < max_context_tokens:
            raise ServerRefuses(
                f"{self.url} has a context of {context} tokens; expected rollout.max_context_tokens = "
                f"{max_context_tokens} or more: start it so, or lower that key",
                400,
            )
        why = await self._refuses_weights()
        self._takes_weights = why is None
        if why is not None and self._needs_weights:
            raise ServerRefuses(
                f"{self.url} ({self._protocol.name}) takes no weights by way of a {_named(self._weights.way)}, "
                f"and would go on with old ones in silence: {why}",
                400,
            )
        if why is not None:
            logger.warning("%s draws by the weights that it was started with: %s", self.url, why)

    async def _refuses_weights(self) -> str | None:
        if self._weights.way not in self.protocol.ways:
            expected = "; expected weight_sync.delta: null" if self._weights.way == "delta" else ""
            return f"rltrain knows no such way for servers of {self.protocol.name}{expected}"
        return await self.protocol.prepare_for_weights(self.calls, self._weights.way)

    async def take_weights(self) -> None:
        """See that it has the present weights. ServerGone where it says afterwards that it has others, WeightsLater as
        `Weights` says."""
        label = self.expected
        if label is None:
            return
        if await self.protocol.version(self.calls) != label:
            await self._weights.give(self.protocol, self.calls)
        self._check(await self.protocol.version(self.calls))

    @property
    def expected(self) -> str | None:
        """The label of the weights that it must have; None where it has its own."""
        return self._weights.label if self._takes_weights else None

    async def draw(self, drawing: Drawing, sampling: SamplingParams, hang_timeout_s: float) -> None:
        """Until it has ended it. What was drawn by other weights than the present ones never gets certain."""
        path, body = self.protocol.request(drawing, sampling, self._described)
        async with aclosing(self.calls.stream(path, body, hang_timeout_s)) as events:
            async for event in events:
                label = self.protocol.take(drawing, event)
                if label is not None and self.expected is not None:
                    self._check(label)
                if label is not None or self.expected is None:
                    drawing.num_certain = len(drawing.tokens)
        if drawing.end is None:
            raise ServerGone(f"{path} of {self.url}: its answer ended in the middle")
        if drawing.num_certain < len(drawing.tokens):
            await self.confirm()

    async def confirm(self) -> None:
        """See that it has the present weights still: all that it has drawn so far is certain then, since one that was
        started anew would have none of ours. Many who ask at a time get one answer."""
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
            except Exception as error:  # it is that of whoever waits
                upcoming.set_exception(error)
                upcoming.exception()  # nobody may be left who does
                continue
            for drawing, count in drawn:
                drawing.num_certain = max(drawing.num_certain, count)
            upcoming.set_result(None)

    def _check(self, label: str | None) -> None:
        if label != self.expected:
            raise ServerGone(
                f"{self.url} has weights of version {label}; expected {self.expected}: it was started anew, or "
                "somebody else gives it weights too"
            )

    async def close(self) -> None:
        await self.calls.close()


def _named(way: str) -> str:
    """With the config key that asks for it."""
    return f"{way} ({'weight_sync.delta' if way == 'delta' else 'http.weights'})"
