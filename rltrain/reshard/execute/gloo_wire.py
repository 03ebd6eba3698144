"""A wire in host memory, over gloo."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.reshard.execute.lanes import Mark
from rltrain.reshard.execute.staging import Memory
from rltrain.reshard.execute.steps import Message, StageSteps
from rltrain.reshard.execute.wire import Link, Wire

Transfer = Callable[[list[Tensor], int, int], dist.Work]
"""(tensors, rank within the group, tag): `send` or `recv` of a process group."""


class Posted(NamedTuple):
    """A message on its way and its handle; `what` is done with it, such as "send {} to"."""

    what: str
    message: Message
    work: dist.Work


class GlooPort:
    """Posts messages over a link's group and waits for them; errors of the transport become what `failed` makes."""

    def __init__(self, link: Link, failed: Callable[[str, RuntimeError], SyncError]) -> None:
        self._link, self._failed = link, failed
        # torch.distributed.isend looks up the group and its ranks for every message, which costs more than posting it.
        self._places = {peer: place for place, peer in enumerate(dist.get_process_group_ranks(link.group))}

    def send(self, message: Message, part: Tensor, what: str) -> Posted:
        return self._post(self._link.group.send, message, part, what)

    def receive(self, message: Message, part: Tensor, what: str) -> Posted:
        return self._post(self._link.group.recv, message, part, what)

    def wait(self, posted: Iterable[Posted]) -> Mark:
        for what, message, work in posted:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(_described(what, message), error) from error
        return self._link.lane.mark()

    def _post(self, transfer: Transfer, message: Message, part: Tensor, what: str) -> Posted:
        try:
            work = transfer([part], self._places[message.peer], message.tag)
        except RuntimeError as error:
            raise self._failed(_described(what, message), error) from error
        return Posted(what, message, work)


def _described(what: str, message: Message) -> str:
    return f"{what.format(f'{message.num_bytes} bytes')} rank {message.peer}"


class GlooWire(Wire):
    """The host waits for messages: gloo has no streams.

    A message leaves its sender only once it is expected, so receives are posted as early as can be: those in place at
    once, those of a round when their buffer is free.
    """

    def __init__(self, steps: StageSteps, memory: Memory, link: Link) -> None:
        super().__init__(steps, memory, link)
        self._port = GlooPort(link, self.failed)
        self._began: Mark | None = None
        self._sends: dict[int, list[Posted]] = {}
        self._receives: dict[int, list[Posted]] = {}
        self._sends_in_place: list[Posted] = []
        self._receives_in_place = self._receive(steps.receives_in_place, "receive {} from")

    def expect(self, number: int, free: Mark | None) -> None:
        if free is not None:
            free.wait()
        messages = self.steps.receives[number]
        self._receives[number] = self._receive(messages, f"receive {{}} of {self.round(number)} from")

    def start(self, number: int, packed: Mark) -> None:
        packed.wait()
        self._began = self._began or self.link.lane.mark()
        self._sends[number] = self._send(self.steps.sends[number], f"send {{}} of {self.round(number)} to")
        if number == 0:
            self._sends_in_place = self._send(self.steps.sends_in_place, "send {} to")

    def left(self, number: int) -> Mark:
        return self._port.wait(self._sends.pop(number))

    def arrived(self, number: int) -> Mark:
        return self._port.wait(self._receives.pop(number))

    def taken(self, number: int, unpacked: Mark) -> None:
        """The sender has it from its own transport that its buffer is free."""

    def finish(self) -> Mark:
        received = self._port.wait(self._receives_in_place)
        sent = self._port.wait(self._sends_in_place)
        for number in sorted(self._sends):
            sent = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, received if self.bytes_received else sent)]
        return sent

    def _send(self, messages: list[Message], what: str) -> list[Posted]:
        self.count_sent(messages)
        return [self._port.send(message, self.memory.part(message), what) for message in messages]

    def _receive(self, messages: list[Message], what: str) -> list[Posted]:
        self.count_received(messages)
        return [self._port.receive(message, self.memory.part(message), what) for message in messages]
