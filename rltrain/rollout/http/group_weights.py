"""Weights by broadcasts: a process group of this rank and the ranks of one server, for each of its servers."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

from rltrain.reshard.layout import Layout
from rltrain.rollout.http.calls import Calls, ServerGone, ServerRefuses, words
from rltrain.rollout.http.protocol import ServerProtocol, UpdateGroup
from rltrain.rollout.http.weights import empty_tensors

T = TypeVar("T")

HTTP_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class _Joined:
    group: UpdateGroup
    process_group: dist.ProcessGroup


class GroupWeights:
    """Implements `Weights`. Every rank of the role has all tensors, whole, in `parts`, and keeps the last ones on the
    host: a server that joins is given them. Each server has a group of its own: one that is lost breaks no other's.
    """

    way = "group"

    def __init__(self, parts: Sequence[Layout], rank: int, *, device: torch.device, update_timeout_s: float) -> None:
        self.label: str | None = None
        self._parts, self._rank, self._device = parts, rank, device
        self._update_timeout_s = update_timeout_s
        self._run = secrets.token_hex(4)
        self._pool = ThreadPoolExecutor(thread_name_prefix="update groups")
        self._held: Mapping[str, Tensor] = {}
        self._kept: list[Mapping[str, Tensor]] = []
        self._joined: dict[str, _Joined] = {}
        """By the URLs of servers."""

    def begin(self) -> None:
        self._kept = []

    def tensors(self, part: int) -> Mapping[str, Tensor]:
        self._held = empty_tensors(self._parts[part], self._rank, self._device)
        return self._held

    def arrived(self, part: int) -> None:
        if self._held:
            self._kept.append({name: tensor.to("cpu") for name, tensor in self._held.items()})
        self._held = {}

    def complete(self, version: int) -> None:
        self.label = f"{self._run}.{version}"

    async def give(self, protocol: ServerProtocol, calls: Calls) -> None:
        assert self.label is not None, "an update is complete"
        try:
            await asyncio.wait_for(self._give(protocol, calls, self.label), self._update_timeout_s)
        except TimeoutError:
            await self.forget(calls)
            raise ServerGone(f"{calls.url} has not taken its weights within {self._update_timeout_s:g} s") from None
        except (ServerGone, ServerRefuses):
            await self.forget(calls)
            raise

    async def _give(self, protocol: ServerProtocol, calls: Calls, label: str) -> None:
        joined = self._joined.get(calls.url) or await self._join(protocol, calls)
        await protocol.begin_receiving(calls)
        for tensors in self._kept:
            described = [
                (name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]) for name, tensor in tensors.items()
            ]
            taken = asyncio.ensure_future(protocol.receive(calls, joined.group.name, described))
            sent = self._beside(self._send, joined.process_group, [*tensors.values()])
            await _both(taken, sent, calls)
        await protocol.end_receiving(calls, label)

    async def _join(self, protocol: ServerProtocol, calls: Calls) -> _Joined:
        described = await protocol.describe(calls)
        assert described.num_ranks is not None, "servers of other kinds are refused"
        address = await self._beside(_address_towards, calls.url)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        group = UpdateGroup(f"rltrain-{secrets.token_hex(8)}", address, port, 1 + described.num_ranks, backend)
        asked = asyncio.ensure_future(protocol.join_group(calls, group, self._update_timeout_s))
        made = self._beside(_make, group, self._update_timeout_s)
        await _both(asked, made, calls)
        self._joined[calls.url] = _Joined(group, made.result())
        return self._joined[calls.url]

    def _send(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.to(self._device), group_src=0, group=group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def forget(self, calls: Calls) -> None:
        """The server's part of the group goes with its process, or with the next one that it makes."""
        if (joined := self._joined.pop(calls.url, None)) is not None:
            await self._beside(dist.destroy_process_group, joined.process_group)

    def close(self) -> None:
        self._kept = []
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _beside(self, call: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        """`call`, which blocks, in a thread of the pool."""
        return asyncio.wrap_future(self._pool.submit(call, *arguments))


async def _both(asked: "asyncio.Future[None]", here: "asyncio.Future[T]", calls: Calls) -> None:
    """What the server does, and what this rank does with it. Where either fails the other is not waited for."""
    both: list[asyncio.Future[Any]] = [asked, here]
    await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
    for one in both:
        if one.done() and (error := one.exception()) is not None:
            asked.cancel()
            if isinstance(error, RuntimeError):
                raise ServerGone(f"{calls.url}: its update group: {words(error)}") from error
            raise error


def _make(group: UpdateGroup, timeout_s: float) -> dist.ProcessGroup:
    """This rank's end, as SGLang makes its own of torch's parts: no public function makes a group with another job."""
    timeout = timedelta(seconds=timeout_s)
    host = f"[{group.address}]" if ":" in group.address else group.address
    store, _, _ = next(iter(rendezvous(f"tcp://{host}:{group.port}", 0, group.size, timeout=timeout)))
    made, _ = _new_process_group_helper(
        group.size,
        0,
        [],
        Backend(group.backend),
        PrefixStore(group.name, store),
        group_name=group.name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    _world.pg_group_ranks[made] = {rank: rank for rank in range(group.size)}
    return made


def _address_towards(url: str) -> str:
    """This machine's address on the way to a server, by which that reaches it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or HTTP_PORTS[parts.scheme]), timeout=10) as way:
        address: str = way.getsockname()[0]
    return address
