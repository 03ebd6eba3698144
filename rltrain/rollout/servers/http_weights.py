"""How new weights reach servers: what all ways share, and broadcasts over a process group."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rltrain.checkpoint.safetensors_file import TensorEntry
from rltrain.models.table import ElementType
from rltrain.reshard.copy_table import DTYPES
from rltrain.reshard.layout import Layout, parameter_types
from rltrain.rollout.servers.calls import Calls, ServerBusy, ServerGone, ServerRefuses, words
from rltrain.rollout.servers.protocols import Receiver, ServerProtocol, SGLangBroadcasts, UpdateGroup
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import JobThread

# How new weights reach servers that somebody else runs: what all ways have in common.


class Weights(ABC):
    """What this rank has of the weights, on their way to its servers. An update is `begin`, for every part in order
    `tensors` and `arrived`, then `complete`; after that any server can be given them, as often as need be.

    `open` follows `begin`, and `pass_on` every `arrived`: those two, `give` and `forget` are called in the event loop,
    the others by the rank's main thread. Servers are sent nothing before all has arrived, unless `pass_on` does.
    """

    way: str
    """Of a protocol's ways."""
    label: str | None = None
    """Of the weights that `give` gives; None before the first update. No other job has the same."""

    def begin(self) -> None:
        """Nothing is held yet."""
        return

    @abstractmethod
    def tensors(self, part: int) -> Mapping[str, Tensor]:
        """Where to write the part's parameters, by name."""

    @abstractmethod
    def arrived(self, part: int) -> None:
        """`tensors(part)` are written."""

    @abstractmethod
    def complete(self, version: int) -> None:
        """All parts have arrived, on all ranks of the role. Collective over: these."""

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """These servers will be given the update. What fails for one is raised by its `give`."""
        return

    async def pass_on(self) -> None:
        """Send on what has arrived."""
        return

    @abstractmethod
    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Returns when the server has taken them; raises as `Calls` does, WeightsLater where it can take no others than
        the next ones."""

    async def forget(self, calls: Calls) -> None:
        """The server is gone, or has left: what was made for it alone is of no use any more."""
        return

    def metrics(self) -> dict[str, float]:
        """Of the last update."""
        return {}

    def close(self) -> None:
        """Once no server is given any more."""
        return


class WeightsLater(Exception):  # noqa: N818 - names what happens
    """A server has to wait for the next update: nothing is kept of the last one."""


def shared_run(job_store: JobStore, role: str, *, leads: bool) -> str:
    """The beginning of labels that this run gives weights, the same on all ranks of the role; one of them leads."""
    key = f"http/{role}/run"
    if leads:
        job_store.put(key, secrets.token_hex(4))
    return str(job_store.get(key, waiting_for=f"the labels of role {role}'s weights"))


def entries_of(part: Layout, rank: int) -> list[TensorEntry]:
    """Of the parameters of a part on a rank."""
    types: Sequence[int] = parameter_types(part, part.parts[part.ranks.index(rank)]).tolist()
    return [
        TensorEntry(name, DTYPES[ElementType(kind)], tuple(shape))
        for (name, shape), kind in zip(part.on(rank).parameters, types, strict=True)
    ]


def empty_tensors(part: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """For the parameters of a part on a rank, by name."""
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in entries_of(part, rank)}


# Weights by broadcasts: part by part, over a process group of this rank and each of its servers.

T = TypeVar("T")
Problem = ServerGone | ServerRefuses | ServerBusy


@dataclass(frozen=True)
class _Part:
    """`flat` has the tensors of `entries`, one behind the other."""

    number: int
    flat: Tensor
    entries: Sequence[TensorEntry]


@dataclass(frozen=True)
class _Joined:
    group: UpdateGroup
    way: SGLangBroadcasts


class GroupWeights(Weights):
    """By broadcasts. Every rank of the role gets all tensors, whole, in `parts`, of which it holds two at a
    time: one is written while the other is broadcast. `run` begins the labels, the same on all ranks of the role.

    Nothing of an update is kept. So a server that comes between two updates waits for the next one, and one that is
    lost in the middle of an update is left out of the rest. Each server has a group of its own: one that is lost breaks
    no other's. No wait is longer than `update_timeout_s`, which is for a part.
    """

    way = "group"

    def __init__(
        self, parts: Sequence[Layout], rank: int, *, device: torch.device, run: str, update_timeout_s: float
    ) -> None:
        self._parts, self._rank, self._device, self._run = parts, rank, device, run
        self._limit_s = update_timeout_s
        self._written: _Part | None = None
        self._sending: asyncio.Task[None] | None = None
        self._groups: dict[str, _Joined] = {}
        """By the URLs of servers, as the next two are."""
        self._receivers: dict[str, Receiver] = {}
        """Of the update that is under way, those that have failed left out."""
        self._problems: dict[str, Problem] = {}

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        # Wide elements come first, so that all are aligned.
        entries = sorted(entries_of(self._parts[part], self._rank), key=lambda entry: -entry.dtype.itemsize)
        flat = torch.empty(sum(entry.bytes for entry in entries), dtype=torch.uint8, device=self._device)
        self._written = _Part(part, flat, entries)
        pieces = zip(entries, flat.split([entry.bytes for entry in entries]), strict=True)
        return {entry.name: piece.view(entry.dtype).view(entry.shape) for entry, piece in pieces}

    def arrived(self, part: int) -> None:
        """`pass_on` sends it."""

    def complete(self, version: int) -> None:
        self.label = f"{self._run}.{version}"

    async def open(self, receivers: Sequence[Receiver]) -> None:
        self._problems = {}
        self._receivers = {receiver.calls.url: receiver for receiver in receivers}
        await self._by_all(self._open, "the beginning of an update")

    async def pass_on(self) -> None:
        await self._sent()
        part, self._written = self._written, None
        if part is not None and part.entries:
            what = f"part {part.number + 1} of {len(self._parts)} of the weights"
            sending = self._by_all(lambda receiver: self._send(receiver, part), what)
            self._sending = asyncio.get_running_loop().create_task(sending)

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "an update is complete"
        await self._sent()
        if (problem := self._problems.pop(calls.url, None)) is not None:
            raise problem
        if (receiver := self._receivers.pop(calls.url, None)) is None:
            await self.forget(calls)
            raise WeightsLater(f"{calls.url} has come between two updates: it gets weights with the next one")
        await self._limited(_way(receiver).end(calls, self.label, self._limit_s), calls, "the end of an update")

    async def forget(self, calls: Calls) -> None:
        if (joined := self._groups.get(calls.url)) is not None:
            with suppress(ServerGone, ServerRefuses, ServerBusy):  # one that is gone has left it
                await joined.way.leave(calls, joined.group.address.name)
            self._drop(calls.url)

    def close(self) -> None:
        for url in [*self._groups]:
            self._drop(url)

    def _drop(self, url: str) -> None:
        """This rank's end of a group, which may be in the middle of something."""
        if (joined := self._groups.pop(url, None)) is not None:
            JobThread(target=joined.group.close, name="update group", daemon=True).start()

    async def _by_all(self, act: Callable[[Receiver], Awaitable[None]], what: str) -> None:
        """Where it fails for one, that one is left out from here on."""

        async def tried(receiver: Receiver) -> None:
            url = receiver.calls.url
            try:
                await self._limited(act(receiver), receiver.calls, what)
            except (ServerGone, ServerRefuses, ServerBusy) as problem:
                self._problems[url] = problem
                del self._receivers[url]
                self._drop(url)

        await asyncio.gather(*map(tried, [*self._receivers.values()]))

    async def _open(self, receiver: Receiver) -> None:
        calls = receiver.calls
        if await receiver.protocol.version(calls) != self.label:
            await self.forget(calls)  # it was started anew, and knows of no group
        if calls.url not in self._groups:
            await self._join(receiver)
        await _way(receiver).begin(calls)

    async def _join(self, receiver: Receiver) -> None:
        calls, num_ranks = receiver.calls, (await receiver.protocol.describe(receiver.calls)).num_ranks
        assert num_ranks is not None, "other servers are refused"
        peer = urlsplit(calls.url).hostname or ""
        group = await _beside(lambda: UpdateGroup(peer, num_ranks, self._device, self._limit_s))
        self._groups[calls.url] = _Joined(group, _way(receiver))
        await _both(_way(receiver).join(calls, group.address, self._limit_s), group.join)

    async def _send(self, receiver: Receiver, part: _Part) -> None:
        calls, group = receiver.calls, self._groups[receiver.calls.url].group
        asked = _way(receiver).receive(calls, group.address.name, part.entries, self._limit_s)
        await _both(asked, lambda: group.broadcast(part.flat))

    async def _sent(self) -> None:
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _limited(self, work: Awaitable[None], calls: Calls, what: str) -> None:
        try:
            await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            raise ServerGone(f"{calls.url}: {what}: not there within {self._limit_s:g} s") from None
        except (RuntimeError, OSError) as error:  # of the group
            raise ServerGone(f"{calls.url}: {what}: {words(error)}") from error


def _way(receiver: Receiver) -> SGLangBroadcasts:
    assert receiver.protocol.broadcasts is not None, "other servers are refused"
    return receiver.protocol.broadcasts


async def _both(asked: Coroutine[Any, Any, None], here: Callable[[], None]) -> None:
    """What a server does, and what this rank does meanwhile. Where one fails the other is not waited for; where both
    did, the server's words are raised."""
    both = [asyncio.ensure_future(asked), _beside(here)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for one in both:
            if one.done():
                one.result()
    finally:
        both[0].cancel()


def _beside(call: Callable[[], T]) -> "asyncio.Future[T]":
    """`call`, which blocks, in a thread that the end of the process does not wait for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it is that of whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    JobThread(target=work, name="update group", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda one: one.cancelled() or one.exception())  # nobody may wait any more
    return waiting
