"""A stand-in for NCCL on CPUs: a unique id of 128 bytes names a group, and gloo carries its collectives.

It needs torch alone, so servers can use it too. NCCL does not compare the calls of two ranks. Here a rank raises if its
collective differs from that of rank 0.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HOST = "127.0.0.1"
UNIQUE_ID_BYTES = 128
LIMIT = timedelta(seconds=30)


class Communicator:
    """A rank's end of a group. Its store is at the address in the unique id, as NCCL's bootstrap is."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta = LIMIT) -> None:
        self._store, self._rank, self._num_calls = store, rank, 0
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST, lazy_init=False)]
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)

    def sum(self, tensor: Tensor) -> None:
        self._compare("sum", tensor)
        self.gloo.allreduce([tensor], dist.AllreduceOptions()).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._compare(f"broadcast from {root}", tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([tensor], options).wait()

    def _compare(self, call: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise RuntimeError("NCCL reads from the tensor's address on, so it must be contiguous")
        mine, key = f"{call} of {tensor.numel()} x {tensor.dtype}", f"call {self._num_calls}"
        self._num_calls += 1
        if self._rank == 0:
            self._store.set(key, mine)
        elif (first := self._store.get(key).decode()) != mine:
            raise RuntimeError(f"rank 0 makes the call {first}; rank {self._rank} makes {mine}")


class TorchBackend:
    """Torch's backend of NCCL on rank 0. It mints the unique id and joins at its first collective."""

    def __init__(self, store: dist.Store, size: int, device: torch.device, timeout: timedelta) -> None:
        self._store, self._size, self._timeout = store, size, timeout
        self._communicator: Communicator | None = None

    def allreduce(self, tensors: Sequence[Tensor], options: dist.AllreduceOptions) -> "TorchBackend":
        self._joined().sum(*tensors)
        return self

    def broadcast(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> "TorchBackend":
        self._joined().broadcast(*tensors, root=options.rootRank)
        return self

    def wait(self) -> None:
        """Returns at once: the collectives above are complete."""

    def abort(self) -> None:
        if self._communicator is not None:
            self._communicator.gloo.abort()

    def _joined(self) -> Communicator:
        if self._communicator is None:
            with socket.create_server((HOST, 0)) as listener:
                port, descriptor = listener.getsockname()[1], listener.detach()
            how = {"is_master": True, "timeout": self._timeout, "wait_for_workers": False}
            server = dist.TCPStore(HOST, port, self._size, **how, master_listen_fd=descriptor)
            self._store.set("0", str(port).ljust(UNIQUE_ID_BYTES))
            self._communicator = Communicator(server, 0, self._size, self._timeout)
        return self._communicator


class PyNcclCommunicator:
    """The part of vLLM's communicator that weight transfers use."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        store = dist.TCPStore(HOST, int(unique_id), size, is_master=False, timeout=LIMIT)
        self._communicator = Communicator(store, rank, size)
        self._communicator.sum(torch.zeros(1))

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: object
    ) -> "PyNcclCommunicator":
        assert len(unique_id_bytes) == UNIQUE_ID_BYTES
        return cls(unique_id_bytes, rank, world_size)

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        self._communicator.broadcast(tensor, src)

    def destroy(self) -> None:
        self._communicator.gloo.abort()
