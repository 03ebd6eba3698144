"""The rounds of a reshard on one rank: round k + 1 is packed and round k - 1 unpacked while round k is on the wire."""

from dataclasses import dataclass, field

from rltrain.reshard.execute.lanes import Lane, Lanes, Mark
from rltrain.reshard.execute.steps import StageSteps, Steps
from rltrain.reshard.execute.wire import Wire
from rltrain.reshard.kernels.copy_table import CopyTable

Span = tuple[Mark, Mark]


@dataclass
class Times:
    """When what was done, as marks, to be read when all of it is over."""

    begin: Mark
    copies: list[Span] = field(default_factory=list)
    packs: list[Span] = field(default_factory=list)
    unpacks: list[Span] = field(default_factory=list)
    wire: list[Span] = field(default_factory=list)


def total_seconds(spans: list[Span]) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans)


def covered_seconds(spans: list[Span], origin: Mark) -> float:
    """Seconds during which at least one of `spans`, which end in order, goes on."""
    covered, until = 0.0, 0.0
    for begin, end in spans:
        start, stop = max(begin.seconds_since(origin), until), end.seconds_since(origin)
        covered += max(stop - start, 0.0)
        until = max(until, stop)
    return covered


class Pipeline:
    """Issues the copies and transfers of one run; on CUDA nothing here waits, unless messages go over gloo."""

    def __init__(self, table: CopyTable, steps: Steps, lanes: Lanes) -> None:
        self._table, self._steps, self._lanes = table, steps, lanes
        self.times = Times(lanes.begin())
        self._settled: Mark | None = None
        """When the stages so far have written all destinations and no longer use the staging buffers."""

    def stage(self, steps: StageSteps, wire: Wire | None) -> None:
        """All rounds of a stage, after the one before; `wire` may be None where there are no rounds."""
        num_rounds = steps.num_rounds if wire else 0
        unpacked = [self._settled, self._settled]
        self._lanes.pack.after(self._settled)
        for number in range(num_rounds + 1):
            if wire and number < num_rounds:
                wire.expect(number, unpacked[number % 2])
                if number >= 2:
                    self._lanes.pack.after(wire.left(number - 2))
                wire.start(number, self._launch(self._lanes.pack, steps.pack, number, self.times.packs))
            if number == 0 and steps is self._steps.stages[0]:
                self._launch(self._lanes.unpack, [0, self._steps.num_copies], 0, self.times.copies)
            if wire and number > 0:
                self._lanes.unpack.after(wire.arrived(number - 1))
                mark = self._launch(self._lanes.unpack, steps.unpack, number - 1, self.times.unpacks)
                unpacked[(number - 1) % 2] = mark
                wire.taken(number - 1, mark)
        if wire:
            self._lanes.unpack.after(wire.finish())
            self.times.wire += wire.spans
        self._settled = self._lanes.unpack.mark()

    def _launch(self, lane: Lane, bounds: list[int], number: int, spans: list[Span]) -> Mark:
        with lane:
            begin = lane.mark()
            self._table.launch(bounds[number], bounds[number + 1])
            end = lane.mark()
        if bounds[number] < bounds[number + 1]:
            spans.append((begin, end))
        return end
