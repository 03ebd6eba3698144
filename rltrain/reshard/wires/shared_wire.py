"""No wire at all: messages stay in memory of their sender, from which the receivers unpack them.

Each rank has two counters that its neighbours see: how many rounds it has packed, and how many it has unpacked. All
ranks go through the same rounds, so that these numbers mean the same on each.
"""

import time

from rltrain.reshard.execute.device_streams import DeviceStream, Event
from rltrain.reshard.kernels.signals import Signal
from rltrain.reshard.plan.steps import Message, StageSteps
from rltrain.reshard.wires.neighbours import NodeMemory
from rltrain.reshard.wires.wire import Wire
from rltrain.runtime.machine import has_ended

LOOK_S = 0.2
"""How often a rank that waits for another looks whether it still runs."""


class SharedWire(Wire):
    """`first_round` is how many rounds ranks have gone through before this stage, in all runs of a reshard together."""

    def __init__(self, steps: StageSteps, rank: int, stream: DeviceStream, node: NodeMemory, first_round: int) -> None:
        super().__init__(steps, rank, stream)
        self._node, self._first_round = node, first_round
        self._began: Event | None = None
        self._received: Event | None = None
        self._not_left: list[int] = []

    def expect(self, number: int, free: Event | None) -> None:
        self.count_received(self.steps.receives[number])

    def start(self, number: int, packed: Event) -> None:
        packed.wait()
        self._began = self._began or self.stream.event()
        self.count_sent(self.leaving(number))
        self._not_left.append(number)
        self._node.own.packed.set(self._count(number))

    def left(self, number: int) -> Event:
        self._not_left.remove(number)
        for message in self.steps.sends[number]:
            reader = self._node.neighbours[message.peer]
            self._wait(reader.taken, number, message, reader.process, "read")
        return self.stream.event()

    def arrived(self, number: int) -> Event:
        messages = self.steps.receives[number]
        for message in messages:
            sender = self._node.neighbours[message.peer]
            self._wait(sender.packed, number, message, sender.process, "packed")
        event = self.stream.event()
        self._received = event if messages else self._received
        return event

    def taken(self, number: int, unpacked: Event) -> None:
        unpacked.wait()
        self._node.own.taken.set(self._count(number))

    def finish(self) -> Event:
        end = self.stream.event()
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
