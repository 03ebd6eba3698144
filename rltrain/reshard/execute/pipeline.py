"""The rounds of a reshard on one rank: round k + 1 is packed and round k - 1 unpacked while round k is on the wire."""

from dataclasses import dataclass, field
from typing import Protocol

from rltrain.reshard.execute.device_streams import DeviceStream, DeviceStreams, Event
from rltrain.reshard.kernels.copy_table import CopyTable
from rltrain.reshard.plan.steps import StageSteps, Steps
from rltrain.reshard.wires.wire import Wire

Span = tuple[Event, Event]


@dataclass
class Times:
    """When what was done, as events, to be read when all of it is over."""

    begin: Event
    copies: list[Span] = field(default_factory=list)
    packs: list[Span] = field(default_factory=list)
    unpacks: list[Span] = field(default_factory=list)
    wire: list[Span] = field(default_factory=list)


class Coding(Protocol):
    """What packs and unpacks messages with headers (delta.coder.Coder)."""

    def encode(self, steps: StageSteps, number: int) -> None:
        """Round `number` is to leave: write its messages."""

    def decode(self, steps: StageSteps, number: int) -> None:
        """It has arrived: write the destinations."""


def total_seconds(spans: list[Span]) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans)


def covered_seconds(spans: list[Span], origin: Event) -> float:
    """Seconds during which at least one of `spans`, which end in order, goes on."""
    covered, until = 0.0, 0.0
    for begin, end in spans:
        start, stop = max(begin.seconds_since(origin), until), end.seconds_since(origin)
        covered += max(stop - start, 0.0)
        until = max(until, stop)
    return covered


class Pipeline:
    """Issues the copies and transfers of one run; on CUDA nothing here waits, unless messages go over gloo."""

    def __init__(self, table: CopyTable, steps: Steps, streams: DeviceStreams, coding: Coding | None = None) -> None:
        self._table, self._steps, self._streams, self._coding = table, steps, streams, coding
        self.times = Times(streams.begin())
        self._settled: Event | None = None
        """When the stages so far have written all destinations and no longer use the staging buffers."""

    def stage(self, steps: StageSteps, wire: Wire | None) -> None:
        """All rounds of a stage, after the one before; `wire` may be None where there are no rounds."""
        num_rounds = steps.num_rounds if wire else 0
        unpacked = [self._settled, self._settled]
        self._streams.pack.after(self._settled)
        for number in range(num_rounds + 1):
            if wire and number < num_rounds:
                wire.expect(number, unpacked[number % 2])
                if number >= 2:
                    self._streams.pack.after(wire.left(number - 2))
                wire.start(number, self._pack(steps, number))
            if number == 0 and steps is self._steps.stages[0]:
                self._launch(self._streams.unpack, [0, self._steps.num_copies], 0, self.times.copies)
            if wire and number > 0:
                self._streams.unpack.after(wire.arrived(number - 1))
                event = self._unpack(steps, number - 1)
                unpacked[(number - 1) % 2] = event
                wire.taken(number - 1, event)
        if wire:
            self._streams.unpack.after(wire.finish())
            self.times.wire += wire.spans
        self._settled = self._streams.unpack.event()

    def _pack(self, steps: StageSteps, number: int) -> Event:
        if self._coding is None or not steps.header_bytes:
            return self._launch(self._streams.pack, steps.pack, number, self.times.packs)
        with self._streams.pack:
            begin = self._streams.pack.event()
            self._coding.encode(steps, number)
            encoded = self._streams.pack.event()
        if steps.pack[number] < steps.pack[number + 1]:
            self.times.packs.append((begin, encoded))
        return encoded

    def _unpack(self, steps: StageSteps, number: int) -> Event:
        if self._coding is None or not steps.header_bytes:
            return self._launch(self._streams.unpack, steps.unpack, number, self.times.unpacks)
        with self._streams.unpack:
            arrived = self._streams.unpack.event()
            self._coding.decode(steps, number)
            decoded = self._streams.unpack.event()
        if steps.unpack[number] < steps.unpack[number + 1]:
            self.times.unpacks.append((arrived, decoded))
        return decoded

    def _launch(self, stream: DeviceStream, bounds: list[int], number: int, spans: list[Span]) -> Event:
        with stream:
            begin = stream.event()
            self._table.launch(bounds[number], bounds[number + 1])
            end = stream.event()
        if bounds[number] < bounds[number + 1]:
            spans.append((begin, end))
        return end
