"""A wire in host memory, over gloo."""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from rltrain.reshard.execute.device_streams import DeviceStream, Event
from rltrain.reshard.execute.staging import Memory
from rltrain.reshard.plan.steps import Message, StageSteps
from rltrain.reshard.wires.wire import Wire

Transfer = Callable[[list[Tensor], int, int], dist.Work]
"""(tensors, rank within the group, tag): `send` or `recv` of a process group."""


class _Posted(NamedTuple):
    """A message on its way and its handle; `what` is done with it, such as "send {} to"."""

    what: str
    message: Message
    work: dist.Work


class GlooWire(Wire):
    """The host waits for messages: gloo has no streams.

    A message leaves its sender only once it is expected, so receives are posted as early as can be: those in place at
    once, those of a round when their buffer is free. One may be shorter than what it is received into.
    """

    def __init__(
        self, steps: StageSteps, rank: int, stream: DeviceStream, memory: Memory, group: dist.ProcessGroup
    ) -> None:
        super().__init__(steps, rank, stream)
        self._memory, self._group = memory, group
        self._began: Event | None = None
        self._sends: dict[int, list[_Posted]] = {}
        self._receives: dict[int, list[_Posted]] = {}
        self._sends_in_place: list[_Posted] = []
        # torch.distributed.isend looks up the group and its ranks for every message, which costs more than posting it.
        self._places = {peer: place for place, peer in enumerate(dist.get_process_group_ranks(group))}
        self._receives_in_place = self._receive(steps.receives_in_place, "receive {} from")

    def expect(self, number: int, free: Event | None) -> None:
        if free is not None:
            free.wait()
        messages = self.steps.receives[number]
        self._receives[number] = self._receive(messages, f"receive {{}} of {self.round(number)} from")

    def start(self, number: int, packed: Event) -> None:
        packed.wait()
        self._began = self._began or self.stream.event()
        self._sends[number] = self._send(self.leaving(number), f"send {{}} of {self.round(number)} to")
        if number == 0:
            self._sends_in_place = self._send(self.steps.sends_in_place, "send {} to")

    def left(self, number: int) -> Event:
        return self._wait(self._sends.pop(number))

    def arrived(self, number: int) -> Event:
        return self._wait(self._receives.pop(number))

    def taken(self, number: int, unpacked: Event) -> None:
        """The sender has it from gloo that its buffer is free."""

    def finish(self) -> Event:
        received = self._wait(self._receives_in_place)
        sent = self._wait(self._sends_in_place)
        for number in sorted(self._sends):
            sent = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, received if self.bytes_received else sent)]
        return sent

    def _send(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_sent(messages)
        return self._post(self._group.send, messages, what)

    def _receive(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_received(messages)
        return self._post(self._group.recv, messages, what)

    def _post(self, transfer: Transfer, messages: list[Message], what: str) -> list[_Posted]:
        posted = []
        for message in messages:
            try:
                work = transfer([self._memory.part(message)], self._places[message.peer], message.tag)
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
            posted.append(_Posted(what, message, work))
        return posted

    def _wait(self, posted: list[_Posted]) -> Event:
        for what, message, work in posted:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
        return self.stream.event()


def _described(what: str, message: Message) -> str:
    return f"{what.format(f'{message.num_bytes} bytes')} rank {message.peer}"
