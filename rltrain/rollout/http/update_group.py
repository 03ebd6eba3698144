"""The process group of this rank and one server, over which it broadcasts weights: torch's own, as SGLang makes it.

No public function of torch's makes a group with the processes of another job. Stores and backends are public; what
stands here besides is how torch nests their prefixes.
"""

import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.runtime.messages import family_of
from rltrain.runtime.world import own_address

Backend = Any
"""torch's, of which its stubs leave out what is used here."""


@dataclass(frozen=True)
class GroupAddress:
    """Where a server finds the group, of which its ranks are 1 to `size` - 1."""

    name: str
    host: str
    port: int
    size: int
    backend: str


class UpdateGroup:
    """This rank's end, rank 0. Its store listens on the address alone by which this host reaches `peer`, and gloo's
    connections use that too. `join` and `broadcast` block, no longer than `timeout_s`, and raise RuntimeError where
    the other end is lost; `close` may be called meanwhile, and ends them.
    """

    def __init__(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        host = own_address(peer)
        family = family_of(host)
        with socket.create_server((host, 0), family=family) as listener:
            port, descriptor = listener.getsockname()[1], listener.detach()
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.address = GroupAddress(f"rltrain-{token_hex(8)}", host, port, 1 + num_ranks, backend)
        self._store = dist.TCPStore(
            *(host, port, self.address.size),
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self._backend: Backend | None = None

    def join(self) -> None:
        """Once the server has been asked to."""
        within = dist.PrefixStore(f"{self.address.name}/", dist.PrefixStore(self.address.name, self._store))
        self._backend = self._nccl(within) if self.address.backend == "nccl" else self._gloo(within)

    def broadcast(self, tensor: Tensor) -> None:
        """`tensor`, contiguous and on this rank's device, has been taken by all when this returns."""
        assert self._backend is not None, "the group was joined"
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout
        self._backend.broadcast([tensor], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """The server's part of the group goes with its process, or by its own call for that."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):  # whatever state it is in
                backend.abort()

    def _gloo(self, store: dist.Store) -> Backend:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        # Connected at once, as the server's end is, whatever this process has for groups of its own.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address.host, lazy_init=False)]
        return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), 0, self.address.size, options)

    def _nccl(self, store: dist.Store) -> Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * self._timeout  # torch then ends this process: whoever waits closes the group before
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), 0, self.address.size, options)
