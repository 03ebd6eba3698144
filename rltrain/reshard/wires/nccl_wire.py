"""A wire in device memory: a round is one group call of NCCL."""

from collections.abc import Callable

import torch.distributed as dist

from rltrain.reshard.execute.device_streams import DeviceStream, Event
from rltrain.reshard.execute.staging import Memory
from rltrain.reshard.plan.steps import Message, StageSteps
from rltrain.reshard.wires.wire import Wire


class NcclWire(Wire):
    """All of it is issued to the stream: the host never waits."""

    def __init__(
        self, steps: StageSteps, rank: int, stream: DeviceStream, memory: Memory, group: dist.ProcessGroup
    ) -> None:
        super().__init__(steps, rank, stream)
        self._memory, self._group = memory, group
        assert not (steps.sends_in_place or steps.receives_in_place), "a round is one call: all of it is staged"
        self._free: dict[int, Event | None] = {}
        self._done: dict[int, Event] = {}

    def expect(self, number: int, free: Event | None) -> None:
        self._free[number] = free

    def start(self, number: int, packed: Event) -> None:
        stream = self.stream
        sends, receives = self.leaving(number), self.steps.receives[number]
        if self.lengths is not None:  # both ends must name the same
            coming = self.lengths({message.peer: message.num_bytes for message in sends})
            receives = [message._replace(num_bytes=coming[message.peer]) for message in receives]
        self.count_sent(sends)
        self.count_received(receives)
        operations = [*self._operations(dist.isend, sends), *self._operations(dist.irecv, receives)]
        with stream:
            stream.after(packed)
            stream.after(self._free.pop(number))
            began = stream.event()
            if operations:
                peers = sorted({operation.peer for operation in operations})
                try:
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()  # makes the stream wait, not the host
                except RuntimeError as error:
                    what = f"exchange {self.round(number)} with ranks {peers}"
                    raise self.failed(what, error) from error
            self._done[number] = stream.event()
        if operations:
            self.spans.append((began, self._done[number]))

    def left(self, number: int) -> Event:
        return self._done[number]

    def arrived(self, number: int) -> Event:
        return self._done[number]

    def taken(self, number: int, unpacked: Event) -> None:
        """The sender has it from NCCL that its buffer is free."""

    def finish(self) -> Event:
        return self.stream.event()

    def _operations(self, call: Callable[..., dist.Work | None], messages: list[Message]) -> list[dist.P2POp]:
        return [
            dist.P2POp(call, self._memory.part(message), message.peer, self._group, message.tag) for message in messages
        ]
