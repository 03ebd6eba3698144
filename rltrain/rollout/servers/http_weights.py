"""New weights for servers at URLs: the common interface, and broadcasts over a process group.

The other ways of delivery are in folder_weights.py.
"""

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
from rltrain.rollout.servers.protocols import Receiver, ServerProtocol
from rltrain.rollout.servers.update_groups import Broadcasts, UpdateGroup
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.machine import JobThread

# The interface for all ways of delivery.


class Weights(ABC):
    """This rank's share of the weights for its servers.

    An update is `begin`, then `tensors` and `arrived` for every part in order, then `complete`. Afterwards `give` can
    deliver the weights to any server, any number of times. `open` follows `begin`, and `pass_on` follows every
    `arrived`.

    `open`, `pass_on`, `give` and `forget` run in the event loop; the others run in the rank's main thread. Servers
    receive nothing before `complete`, unless `pass_on` sends parts earlier.
    """

    way: str
    """One of a protocol's `ways`."""
    label: str | None = None
    """Label of the weights delivered by `give`, unique among all jobs. None before the first update."""
    adapter: str | None = None
    """Name of the delivered adapters in requests. None if the weights have none apart from the base."""
    lora_rank = 0
    """Rank of the adapters that servers must take, or 0."""

    def refusal(self, protocol: ServerProtocol) -> str | None:
        """Returns the reason if this rank cannot deliver weights to servers of `protocol`, else None."""
        return None

    def begin(self) -> None:
        """Begins an update."""
        return

    @abstractmethod
    def tensors(self, part: int) -> Mapping[str, Tensor]:
        """Returns the tensors to write the part's parameters to, by name."""

    @abstractmethod
    def arrived(self, part: int) -> None:
        """Marks `tensors(part)` as written."""

    @abstractmethod
    def complete(self, version: int) -> None:
        """Ends an update after its last part. Collective over: all ranks of the role."""

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """Prepares these servers for the update. A failure is raised later by `give` for the same server."""
        return

    async def pass_on(self) -> None:
        """Sends the part that arrived."""
        return

    @abstractmethod
    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        """Delivers the weights to a server and returns once it has taken them.

        Raises as `Calls` does, and WeightsLater if the server must wait for the next update.
        """

    async def forget(self, calls: Calls) -> None:
        """Frees the resources of a server that is gone or has left."""
        return

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last update."""
        return {}

    def close(self) -> None:
        """Frees all resources. Must be called after the last `give`."""
        return


class WeightsLater(Exception):  # noqa: N818 - names what happens
    """A server must wait for the next update, because the last one is not kept."""


def shared_run(job_store: JobStore, role: str, *, leads: bool) -> str:
    """Returns the common prefix of the labels of this run's weights. The rank with `leads` chooses it."""
    key = f"http/{role}/run"
    if leads:
        job_store.put(key, secrets.token_hex(4))
    return str(job_store.get(key, waiting_for=f"the labels of role {role}'s weights"))


def entries_of(part: Layout, rank: int) -> list[TensorEntry]:
    """Returns the entries of the parameters of `part` on a rank."""
    types: Sequence[int] = parameter_types(part, part.parts[part.ranks.index(rank)]).tolist()
    return [
        TensorEntry(name, DTYPES[ElementType(kind)], tuple(shape))
        for (name, shape), kind in zip(part.on(rank).parameters, types, strict=True)
    ]


def empty_tensors(part: Layout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Returns uninitialized tensors for the parameters of `part` on a rank, by name."""
    return {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry in entries_of(part, rank)}


# Weights by broadcasts, part by part. This rank has one process group with each of its servers.

T = TypeVar("T")
Problem = ServerGone | ServerRefuses | ServerBusy
CLOSE_S = 5.0
"""Time for each group to close before the process ends."""


@dataclass(frozen=True)
class _Part:
    """A part of the weights. `flat` holds the bytes of all `entries` one after another."""

    number: int
    flat: Tensor
    entries: Sequence[TensorEntry]


@dataclass(frozen=True)
class _Joined:
    group: UpdateGroup
    way: Broadcasts


class GroupWeights(Weights):
    """Weights by broadcasts. Every rank of the role receives all tensors whole, in `parts`.

    A rank holds two parts at a time: one is written while the other is broadcast. Nothing is kept after an update. So a
    server that joins between updates waits for the next one, and a server lost during an update misses the rest of it.
    Each server has its own group, so a lost server does not break the groups of others.

    `run` is the prefix of labels, equal on all ranks of the role. Waits last at most `update_timeout_s` per part.
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
        """Groups by the URL of their server. The next two are by URL too."""
        self._receivers: dict[str, Receiver] = {}
        """Servers of the update under way, without the failed ones."""
        self._problems: dict[str, Problem] = {}
        self._closing: list[JobThread] = []
        """Threads that close groups."""

    def refusal(self, protocol: ServerProtocol) -> str | None:
        return protocol.broadcasts.refusal(self._device) if protocol.broadcasts is not None else None

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        # Wide elements come first, so all tensors are aligned.
        entries = sorted(entries_of(self._parts[part], self._rank), key=lambda entry: -entry.dtype.itemsize)
        flat = torch.empty(sum(entry.bytes for entry in entries), dtype=torch.uint8, device=self._device)
        self._written = _Part(part, flat, entries)
        pieces = zip(entries, flat.split([entry.bytes for entry in entries]), strict=True)
        return {entry.name: piece.view(entry.dtype).view(entry.shape) for entry, piece in pieces}

    def arrived(self, part: int) -> None:
        """Does nothing, because `pass_on` sends the part."""

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
            with suppress(ServerGone, ServerRefuses, ServerBusy):  # a server that is gone has left its group
                await joined.way.leave(calls, joined.group.name)
            self._drop(calls.url)

    def close(self) -> None:
        for url in [*self._groups]:
            self._drop(url)
        for closing in self._closing:
            closing.join(CLOSE_S)  # the process may end, and torch would abort it in the middle of this

    def _drop(self, url: str) -> None:
        """Closes this rank's end of a group in another thread, because a broadcast may be running."""
        if (joined := self._groups.pop(url, None)) is not None:
            self._closing = [thread for thread in self._closing if thread.is_alive()]
            self._closing.append(JobThread(target=joined.group.close, name="update group", daemon=True))
            self._closing[-1].start()

    async def _by_all(self, act: Callable[[Receiver], Awaitable[None]], what: str) -> None:
        """Calls `act` for all servers of the update. A server that fails is left out of the rest."""

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
            await self.forget(calls)  # a restarted server has no group
        if calls.url not in self._groups:
            await self._join(receiver)
        await _way(receiver).begin(calls, self._limit_s)

    async def _join(self, receiver: Receiver) -> None:
        calls, num_ranks = receiver.calls, (await receiver.protocol.describe(receiver.calls)).num_ranks
        assert num_ranks is not None, "other servers are refused"
        peer = urlsplit(calls.url).hostname or ""
        way = _way(receiver)
        group = await _beside(lambda: way.group(peer, num_ranks, self._device, self._limit_s))
        self._groups[calls.url] = _Joined(group, way)
        await _both(way.join(calls, group, self._limit_s), group.join)

    async def _send(self, receiver: Receiver, part: _Part) -> None:
        calls, group = receiver.calls, self._groups[receiver.calls.url].group
        asked = _way(receiver).receive(calls, group.name, part.entries, self._limit_s)
        await _both(asked, lambda: group.broadcast(part.flat))

    async def _sent(self) -> None:
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _limited(self, work: Awaitable[None], calls: Calls, what: str) -> None:
        try:
            await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            raise ServerGone(f"{calls.url}: {what}: not done within {self._limit_s:g} s") from None
        except (RuntimeError, OSError) as error:  # from the process group
            raise ServerGone(f"{calls.url}: {what}: {words(error)}") from error


def _way(receiver: Receiver) -> Broadcasts:
    assert receiver.protocol.broadcasts is not None, "other servers are refused"
    return receiver.protocol.broadcasts


async def _both(asked: Coroutine[Any, Any, None], here: Callable[[], None]) -> None:
    """Waits for the call to a server and for this rank's part `here`. If one fails, does not wait for the other. If
    both fail, raises the server's error."""
    both = [asyncio.ensure_future(asked), _beside(here)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for one in both:
            if one.done():
                one.result()
    finally:
        both[0].cancel()


def _beside(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Runs the blocking `call` in a daemon thread, so that the process can end without it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the waiting caller raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    JobThread(target=work, name="update group", daemon=True).start()
    waiting = asyncio.wrap_future(future)
    waiting.add_done_callback(lambda one: one.cancelled() or one.exception())  # retrieves it
    return waiting
