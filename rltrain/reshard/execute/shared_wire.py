"""No wire at all: messages stay in memory of their sender, from which the receivers unpack them.

Each rank has two counters that its neighbours see: how many rounds it has packed, and how many it has unpacked. All
ranks go through the same rounds, so that these numbers mean the same on each.
"""

import time

from rltrain.cluster.processes import has_ended
from rltrain.reshard.execute.lanes import Lane, Mark
from rltrain.reshard.execute.neighbours import NodeMemory
from rltrain.reshard.execute.steps import Message, StageSteps
from rltrain.reshard.execute.wire import Wire
from rltrain.reshard.kernels.signals import Signal

LOOK_S = 0.2
"""How often a rank that waits for another looks whether it still runs."""


class SharedWire(Wire):
    """`first_round` is how many rounds ranks have gone through before this stage, in all runs of a reshard together."""

    def __init__(self, steps: StageSteps, rank: int, lane: Lane, node: NodeMemory, first_round: int) -> None:
        super().__init__(steps, rank, lane)
        self._node, self._first_round = node, first_round
        self._began: Mark | None = None
        self._received: Mark | None = None
        self._not_left: list[int] = []

    def expect(self, number: int, free: Mark | None) -> None:
        self.count_received(self.steps.receives[number])

    def start(self, number: int, packed: Mark) -> None:
        packed.wait()
        self._began = self._began or self.lane.mark()
        self.count_sent(self.steps.sends[number])
        self._not_left.append(number)
        self._node.own.packed.set(self._count(number))

    def left(self, number: int) -> Mark:
        self._not_left.remove(number)
        for message in self.steps.sends[number]:
            reader = self._node.neighbours[message.peer]
            self._wait(reader.taken, number, message, reader.process, "read")
        return self.lane.mark()

    def arrived(self, number: int) -> Mark:
        messages = self.steps.receives[number]
        for message in messages:
            sender = self._node.neighbours[message.peer]
            self._wait(sender.packed, number, message, sender.process, "packed")
        mark = self.lane.mark()
        self._received = mark if messages else self._received
        return mark

    def taken(self, number: int, unpacked: Mark) -> None:
        unpacked.wait()
        self._node.own.taken.set(self._count(number))

    def finish(self) -> Mark:
        end = self.lane.mark()
        for number in list(self._not_left):
            end = self.left(number)
        if self._began is not None and (self.bytes_received or self.bytes_sent):
            self.spans = [(self._began, self._received or end)]
        return end

    def _count(self, number: int) -> int:
        return self._first_round + number + 1

    def _wait(self, signal: Signal, number: int, message: Message, process: str, done: str) -> None:
        """Until `process`, the message's peer, has `done` something with a round."""
        deadline = time.monotonic() + self._node.timeout_s
        while not signal.wait(self._count(number), LOOK_S):
            ended = has_ended(process)
            if ended or time.monotonic() > deadline:
                what = f"have {message.num_bytes} bytes of {self.round(number)} {done} by rank {message.peer}"
                reason = "its process has ended" if ended else f"it has not come in {self._node.timeout_s:g} s"
                raise self.failed(what, reason)
