"""Memory of messages between pack and wire, and between wire and unpack."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.reshard.plan.steps import Message, Steps


@dataclass(frozen=True, eq=False)
class Staging:
    """Two buffers of bytes to send from and two to receive into; round k uses those of number k mod 2."""

    send: tuple[Tensor, Tensor]
    receive: tuple[Tensor, Tensor]

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (*self.send, *self.receive)

    @property
    def num_bytes(self) -> int:
        """Of all distinct memory together."""
        return sum({buffer.data_ptr(): buffer.numel() for buffer in self.buffers}.values())


class Memory:
    """The memory of a table's bases as bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._bytes: dict[int, Tensor] = {}

    def bytes(self, base: int) -> Tensor:
        """All of a base."""
        if base not in self._bytes:
            self._bytes[base] = self.tensors[base].detach().view(-1).view(torch.uint8)
        return self._bytes[base]

    def part(self, message: Message) -> Tensor:
        """What a message carries, or is to fill."""
        return self.bytes(message.base).narrow(0, message.offset, message.num_bytes)


def allocate(steps: Steps, device: torch.device, *, host: bool) -> Staging:
    """Buffers for the largest rounds of `steps` that go over a wire, on `device`; where `host`, in host memory that its
    kernels can address.

    Where no stage has two rounds the two buffers of a direction are one.
    """
    stages = [stage for stage in steps.stages if not stage.kind.shared]
    num_buffers = 2 if max(stage.num_rounds for stage in stages) > 1 else 1

    def pair(num_bytes: int) -> tuple[Tensor, Tensor]:
        made = [byte_buffer(num_bytes, device, host=host) for _ in range(num_buffers)]
        return made[0], made[-1]

    return Staging(pair(max(s.send_bytes for s in stages)), pair(max(s.receive_bytes for s in stages)))


def byte_buffer(num_bytes: int, device: torch.device, *, host: bool) -> Tensor:
    """Contents undefined; on `device`, or where `host` in host memory that its kernels can address."""
    if device.type != "cpu":
        where = torch.device("cpu") if host else device
        return torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=host)
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # The system hands memory out by the page, and small pages take it ten times as long as a pack takes to fill them.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
