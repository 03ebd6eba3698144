"""Sending and receiving the messages of one round after another, over gloo or NCCL.

A round is first expected, then started once it is packed. All ranks start the rounds in the same order.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.reshard.execute.lanes import Lane, Mark
from rltrain.reshard.execute.staging import Memory
from rltrain.reshard.execute.steps import Message, StageSteps


@dataclass(frozen=True)
class Link:
    """Over which group a rank exchanges messages, and the lane that does it."""

    group: dist.ProcessGroup
    rank: int
    lane: Lane


class Wire(ABC):
    """The transfers of one stage.

    `bytes_sent` counts by peer what was handed to the transport. `spans` are, once the stage is over, from when
    messages were handed over to when those that this rank receives, or else those that it sends, were through.
    """

    def __init__(self, steps: StageSteps, memory: Memory, link: Link) -> None:
        self.steps, self.memory, self.link = steps, memory, link
        self.bytes_sent: Counter[int] = Counter()
        self.bytes_received = 0
        self.spans: list[tuple[Mark, Mark]] = []

    @abstractmethod
    def expect(self, number: int, free: Mark | None) -> None:
        """Be ready to receive round `number`, whose buffer is `free` from that mark on (None: now)."""

    @abstractmethod
    def start(self, number: int, packed: Mark) -> None:
        """Send round `number`, whose messages are `packed` from that mark on, and receive what was expected."""

    @abstractmethod
    def left(self, number: int) -> Mark:
        """When the messages that round `number` sends have left their buffer."""

    @abstractmethod
    def arrived(self, number: int) -> Mark:
        """When the messages that round `number` receives are in their buffer."""

    @abstractmethod
    def finish(self) -> Mark:
        """When all that remains has left and arrived; after the rounds."""

    def count_sent(self, messages: list[Message]) -> None:
        for message in messages:
            self.bytes_sent[message.peer] += message.num_bytes

    def count_received(self, messages: list[Message]) -> None:
        self.bytes_received += sum(message.num_bytes for message in messages)

    def failed(self, what: str, error: RuntimeError) -> SyncError:
        """In place of an `error` of the transport, one that says what this rank was about."""
        return SyncError(
            f"rank {self.link.rank} could not {what} in stage {self.steps.name} of a reshard: {error}. Look for "
            "what ended or holds up the other rank: its own message comes first in the log. How long a rank waits "
            "for another is config key timeouts.no_progress_s"
        )


Transfer = Callable[[list[Tensor], int, int], dist.Work]
"""(tensors, rank within the group, tag): `send` or `recv` of a process group."""


class _Posted(NamedTuple):
    """A message on its way and its handle; `what` is done with it, such as "send {} to"."""

    what: str
    message: Message
    work: dist.Work


class GlooWire(Wire):
    """Messages in host memory. The host waits for them: gloo has no streams.

    A message leaves its sender only once it is expected, so receives are posted as early as can be: those in place at
    once, those of a round when their buffer is free.
    """

    def __init__(self, steps: StageSteps, memory: Memory, link: Link) -> None:
        super().__init__(steps, memory, link)
        self._began: Mark | None = None
        self._received: Mark | None = None
        self._sends: dict[int, list[_Posted]] = {}
        self._receives: dict[int, list[_Posted]] = {}
        self._sends_in_place: list[_Posted] = []
        # torch.distributed.isend looks up the group and its ranks for every message, which costs more than posting it.
        self._places = {peer: place for place, peer in enumerate(dist.get_process_group_ranks(link.group))}
        self._receives_in_place = self._receive(steps.receives_in_place, "receive {} from")

    def expect(self, number: int, free: Mark | None) -> None:
        if free is not None:
            free.wait()
        messages = self.steps.receives[number]
        self._receives[number] = self._receive(messages, f"receive {{}} of {self._round(number)} from")

    def start(self, number: int, packed: Mark) -> None:
        packed.wait()
        self._began = self._began or self.link.lane.mark()
        self._sends[number] = self._send(self.steps.sends[number], f"send {{}} of {self._round(number)} to")
        if number == 0:
            self._sends_in_place = self._send(self.steps.sends_in_place, "send {} to")

    def left(self, number: int) -> Mark:
        return self._wait(self._sends.pop(number))

    def arrived(self, number: int) -> Mark:
        self._received = self._wait(self._receives.pop(number))
        return self._received

    def finish(self) -> Mark:
        received = self._wait(self._receives_in_place)
        sent = self._wait(self._sends_in_place)
        for number in sorted(self._sends):
            sent = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, received if self.bytes_received else sent)]
        return sent

    def _round(self, number: int) -> str:
        return f"round {number + 1} of {self.steps.num_rounds}"

    def _send(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_sent(messages)
        return self._post(self.link.group.send, messages, what)

    def _receive(self, messages: list[Message], what: str) -> list[_Posted]:
        self.count_received(messages)
        return self._post(self.link.group.recv, messages, what)

    def _post(self, transfer: Transfer, messages: list[Message], what: str) -> list[_Posted]:
        posted = []
        for message in messages:
            try:
                work = transfer([self.memory.part(message)], self._places[message.peer], message.tag)
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
            posted.append(_Posted(what, message, work))
        return posted

    def _wait(self, posted: list[_Posted]) -> Mark:
        for what, message, work in posted:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.failed(_described(what, message), error) from error
        return self.link.lane.mark()


def _described(what: str, message: Message) -> str:
    return f"{what.format(f'{message.num_bytes} bytes')} rank {message.peer}"


class NcclWire(Wire):
    """Messages in device memory, a round as one group call. All of it is issued to the lane: the host never waits."""

    def __init__(self, steps: StageSteps, memory: Memory, link: Link) -> None:
        super().__init__(steps, memory, link)
        assert not (steps.sends_in_place or steps.receives_in_place), "a round is one call: all of it is staged"
        self._free: dict[int, Mark | None] = {}
        self._done: dict[int, Mark] = {}

    def expect(self, number: int, free: Mark | None) -> None:
        self._free[number] = free

    def start(self, number: int, packed: Mark) -> None:
        lane = self.link.lane
        sends, receives = self.steps.sends[number], self.steps.receives[number]
        self.count_sent(sends)
        self.count_received(receives)
        operations = [*self._operations(dist.isend, sends), *self._operations(dist.irecv, receives)]
        with lane:
            lane.after(packed)
            lane.after(self._free.pop(number))
            began = lane.mark()
            if operations:
                peers = sorted({operation.peer for operation in operations})
                try:
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()  # makes the lane wait, not the host
                except RuntimeError as error:
                    what = f"exchange round {number + 1} of {self.steps.num_rounds} with ranks {peers}"
                    raise self.failed(what, error) from error
            self._done[number] = lane.mark()
        if operations:
            self.spans.append((began, self._done[number]))

    def left(self, number: int) -> Mark:
        return self._done[number]

    def arrived(self, number: int) -> Mark:
        return self._done[number]

    def finish(self) -> Mark:
        return self.link.lane.mark()

    def _operations(self, call: Callable[..., dist.Work | None], messages: list[Message]) -> list[dist.P2POp]:
        return [
            dist.P2POp(call, self.memory.part(message), message.peer, self.link.group, message.tag)
            for message in messages
        ]


def make_wire(steps: StageSteps, memory: Memory, link: Link) -> Wire:
    """For the backend of the link's group."""
    return (NcclWire if dist.get_backend(link.group) == "nccl" else GlooWire)(steps, memory, link)
