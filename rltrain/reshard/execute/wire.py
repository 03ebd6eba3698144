"""Sending and receiving the messages of one round after another, over gloo or NCCL.

A round is first expected, then started once it is packed. All ranks start the rounds in the same order.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

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

    def outgoing(self, messages: list[Message]) -> list[dist.P2POp]:
        for message in messages:
            self.bytes_sent[message.peer] += message.num_bytes
        return self._operations(dist.isend, messages)

    def incoming(self, messages: list[Message]) -> list[dist.P2POp]:
        self.bytes_received += sum(message.num_bytes for message in messages)
        return self._operations(dist.irecv, messages)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turns errors of the transport into ones that say what this rank was about."""
        try:
            yield
        except RuntimeError as error:
            raise SyncError(
                f"rank {self.link.rank} could not {what} in stage {self.steps.name} of a reshard: {error}. Look for "
                "what ended or holds up the other rank: its own message comes first in the log. How long a rank waits "
                "for another is config key cluster.timeout_s"
            ) from error

    def _operations(self, call: Callable[..., dist.Work | None], messages: list[Message]) -> list[dist.P2POp]:
        return [
            dist.P2POp(call, self.memory[base][offset : offset + size], peer, self.link.group, tag)
            for peer, tag, base, offset, size in messages
        ]


@dataclass(frozen=True)
class _Posted:
    """A message on its way: what to call it, and its handle."""

    what: str
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
        self._receives_in_place = self._post(self.incoming(steps.receives_in_place), "receive {} from")

    def expect(self, number: int, free: Mark | None) -> None:
        if free is not None:
            free.wait()
        incoming = self.incoming(self.steps.receives[number])
        self._receives[number] = self._post(incoming, f"receive {{}} of {self._round(number)} from")

    def start(self, number: int, packed: Mark) -> None:
        packed.wait()
        self._began = self._began or self.link.lane.mark()
        outgoing = self.outgoing(self.steps.sends[number])
        self._sends[number] = self._post(outgoing, f"send {{}} of {self._round(number)} to")
        if number == 0:
            self._sends_in_place = self._post(self.outgoing(self.steps.sends_in_place), "send {} to")

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

    def _post(self, operations: list[dist.P2POp], what: str) -> list[_Posted]:
        posted = []
        for operation in operations:
            named = f"{what.format(f'{operation.tensor.numel()} bytes')} rank {operation.peer}"
            with self.named(named):
                work = operation.op(operation.tensor, operation.peer, self.link.group, operation.tag)
            posted.append(_Posted(named, work))
        return posted

    def _wait(self, posted: list[_Posted]) -> Mark:
        for message in posted:
            with self.named(message.what):
                message.work.wait()
        return self.link.lane.mark()


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
        operations = [*self.outgoing(self.steps.sends[number]), *self.incoming(self.steps.receives[number])]
        with lane:
            lane.after(packed)
            lane.after(self._free.pop(number))
            began = lane.mark()
            if operations:
                peers = sorted({operation.peer for operation in operations})
                with self.named(f"exchange round {number + 1} of {self.steps.num_rounds} with ranks {peers}"):
                    for work in dist.batch_isend_irecv(operations):
                        work.wait()  # makes the lane wait, not the host
            self._done[number] = lane.mark()
        if operations:
            self.spans.append((began, self._done[number]))

    def left(self, number: int) -> Mark:
        return self._done[number]

    def arrived(self, number: int) -> Mark:
        return self._done[number]

    def finish(self) -> Mark:
        return self.link.lane.mark()


def make_wire(steps: StageSteps, memory: Memory, link: Link) -> Wire:
    """For the backend of the link's group."""
    return (NcclWire if dist.get_backend(link.group) == "nccl" else GlooWire)(steps, memory, link)
