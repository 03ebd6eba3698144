"""Process groups of a rank and one server for broadcasts of weights, and the interface of the calls for them."""

import asyncio
import socket
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from secrets import token_hex
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.checkpoint.safetensors_file import TensorEntry
from rltrain.rollout.servers.calls import Calls
from rltrain.runtime.messages import family_of
from rltrain.runtime.world import own_address

# torch has no public function for a group with the processes of another job. Stores and backends are public. The
# nesting of prefixes below follows torch's own, because SGLang makes its end with torch.

Backend = Any
"""A backend of torch.distributed. torch's stubs lack the methods used here."""


class UpdateGroup(ABC):
    """This rank's end of a group with the ranks of one server. This rank is rank 0 of the group.

    `join` and `broadcast` block for at most `timeout_s` and raise RuntimeError if the other end is lost. With NCCL
    `join` may block for longer. `close` may be called from another thread meanwhile. It ends a broadcast, but not a
    `join`.
    """

    def __init__(self, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        self.name = f"rltrain-{token_hex(8)}"
        self.size = 1 + num_ranks
        self._timeout, self._device = timedelta(seconds=timeout_s), device
        self._backend: Backend | None = None

    @abstractmethod
    async def invitation(self) -> dict[str, Any]:
        """Returns the fields that tell the server how to join. `join` may have to run meanwhile."""

    def join(self) -> None:
        """Joins the group. Returns once the server has joined too, so the server must have been asked to."""
        self._backend = self._joined()

    @abstractmethod
    def _joined(self) -> Backend: ...

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcasts `tensor`, contiguous and on this rank's device. Returns once the transfer is complete."""
        assert self._backend is not None, "the group was joined"
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout
        self._backend.broadcast([tensor], options).wait()
        self._finish()

    def close(self) -> None:
        """Aborts this rank's end. The server's end is closed by Broadcasts.leave, or with its process."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):  # the group may be in any state
                backend.abort()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def nccl(store: dist.Store, size: int, device: torch.device, timeout: timedelta) -> Backend:
    """Returns rank 0 of a group of NCCL. The others join it at its first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # torch ends this process then, so callers close the group before
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, 0, size, options)


class StoreGroup(UpdateGroup):
    """A group through a store on this host, with torch at both ends.

    The store and gloo listen only on this host's address towards `peer`.
    """

    def __init__(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        super().__init__(num_ranks, device, timeout_s)
        self._host = own_address(peer)
        with socket.create_server((self._host, 0), family=family_of(self._host)) as listener:
            self._port, descriptor = listener.getsockname()[1], listener.detach()
        self._kind = "nccl" if device.type == "cuda" else "gloo"
        self._store = dist.TCPStore(
            *(self._host, self._port, self.size),
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    async def invitation(self) -> dict[str, Any]:
        return {
            "master_address": self._host,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self.size,
            "group_name": self.name,
            "backend": self._kind,
        }

    def _joined(self) -> Backend:
        within = dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, self._store))
        if self._kind == "nccl":
            return nccl(dist.PrefixStore("cuda/", within), self.size, self._device, self._timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        # Both ends must connect at once. The setting for this process's other groups may differ.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)]
        return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", within), 0, self.size, options)


UNIQUE_ID = "0"
"""Key of a group's store under which torch's rank 0 leaves the first unique id of NCCL."""
MINTED_POLL_S = 0.01


class UniqueIdGroup(UpdateGroup):
    """A group of NCCL that its unique id names, without a store for the server. The server may use NCCL without torch.

    A sum of one element follows the joining, as in vLLM's own communicators.
    """

    def __init__(self, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        super().__init__(num_ranks, device, timeout_s)
        self._store = dist.HashStore()

    async def invitation(self) -> dict[str, Any]:
        while not self._store.check([UNIQUE_ID]):
            await asyncio.sleep(MINTED_POLL_S)
        minted = b64encode(self._store.get(UNIQUE_ID)).decode()
        return {"rank_offset": 1, "world_size": self.size, "nccl_unique_id_b64": minted}

    def _joined(self) -> Backend:
        backend = nccl(self._store, self.size, self._device, self._timeout)
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        try:
            backend.allreduce([torch.zeros(1, device=self._device)], options).wait()
            self._finish()
        except RuntimeError as error:
            raise RuntimeError(f"{error}. {NCCL_NEEDS}") from error
        return backend


NCCL_NEEDS = "NCCL needs the same version of NCCL in the rank and the server, and a GPU for each of their ranks"


class Broadcasts(Protocol):
    """A server's calls for weights over a process group, without state. Its methods raise as `Calls` does.

    An update is `begin`, then `receive` for every part, then `end`.
    """

    def refusal(self, device: torch.device) -> str | None:
        """Returns the reason if a rank with this device cannot broadcast to such servers, else None."""
        ...

    def group(self, peer: str, num_ranks: int, device: torch.device, timeout_s: float) -> UpdateGroup:
        """Returns this rank's end of a new group with the server at host `peer`."""
        ...

    async def join(self, calls: Calls, group: UpdateGroup, limit_s: float) -> None:
        """Has the server join `group`. Returns once the group is complete."""
        ...

    async def begin(self, calls: Calls, limit_s: float) -> None:
        """Opens an update. Closes an open update of an earlier job first."""
        ...

    async def receive(self, calls: Calls, group: str, entries: Sequence[TensorEntry], limit_s: float) -> None:
        """Has the server receive one broadcast of bytes, with the tensors of `entries` one after another.

        Returns once the server has taken them.
        """
        ...

    async def end(self, calls: Calls, label: str, limit_s: float) -> None:
        """Closes the update. The server then serves the new weights as `label`, with an empty prefix cache."""
        ...

    async def leave(self, calls: Calls, group: str) -> None:
        """Has the server leave the group."""
        ...


def names_types_shapes(entries: Sequence[TensorEntry]) -> tuple[list[str], list[str], list[Sequence[int]]]:
    """Returns the names, torch's names of types, and shapes of tensors."""
    types = [str(entry.dtype).removeprefix("torch.") for entry in entries]
    return [entry.name for entry in entries], types, [entry.shape for entry in entries]
