"""Executes a plan. Rounds are packed, sent and unpacked while the neighbouring rounds are in flight."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import ElementType, IntArray, TypeArray, wire_types
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.copies import StageSteps, Steps, make_steps
from rltrain.reshard.copy_table import DTYPES, CopyTable
from rltrain.reshard.delta import Coder, DeltaSettings, headers_of
from rltrain.reshard.fp8_blocks import SCALES_PARAMETER
from rltrain.reshard.fp8_scales import BlockScales
from rltrain.reshard.layout import Parameters, num_bytes
from rltrain.reshard.plan import RankPlan
from rltrain.reshard.rounds import NO_HEADERS, shared_places, stage_streams
from rltrain.reshard.wires import (
    DeviceStream,
    DeviceStreams,
    Event,
    GlooWire,
    Memory,
    NcclWire,
    Neighbours,
    SharedWire,
    Wire,
    allocate,
)
from rltrain.runtime.heartbeat import Waiting, unnoted
from rltrain.runtime.process_groups import plain_group

# Checks of the given tensors against the plan, and their order in its table.

UNKNOWN = -1


@dataclass(frozen=True, eq=False)
class _Side:
    """One of the two layouts on this rank. `types` [parameters] are element types or UNKNOWN."""

    name: str
    parameters: Parameters
    types: IntArray


class Binding:
    """The tensors expected by a reshard on this rank.

    Raises ValueError if one parameter would hold elements of several types.
    """

    def __init__(self, plan: RankPlan, device: torch.device) -> None:
        self._rank, self._device = plan.rank, device
        copies = plan.copies
        outgoing, incoming = plan.direct.sends, [plan.direct.receives, plan.fan_out.sends, plan.fan_out.receives]
        source = [(copies["source_parameter"], copies["tensor"]), (outgoing["parameter"], outgoing["tensor"])]
        destination = [(copies["destination_parameter"], copies["tensor"])]
        destination += [(boxes["parameter"], boxes["tensor"]) for boxes in incoming]
        self._sides = tuple(
            _Side(name, parameters, _types_of(parameters, [(number, types[tensor]) for number, tensor in used]))
            for name, parameters, used, types in (
                ("source", plan.source_parameters, source, plan.source_types),
                ("destination", plan.destination_parameters, destination, plan.destination_types),
            )
        )

    def check(
        self,
        source_tensors: Mapping[str, Tensor] | None,
        destination_tensors: Mapping[str, Tensor] | None,
        *,
        without: Iterable[str] = (),
    ) -> None:
        """Checks the given tensors against the plan. Skips the names in `without`, because these tensors do not exist
        yet. Raises SyncError about the first wrong tensor."""
        for side, tensors in zip(self._sides, (source_tensors, destination_tensors), strict=True):
            if side.parameters and tensors is None:
                raise SyncError(
                    f"rank {self._rank} is in the {side.name} layout, but no {side.name} tensors were given"
                )
            for (name, shape), kind in zip(side.parameters, side.types.tolist(), strict=True):
                if tensors is not None and name not in without:
                    self._check(side.name, name, shape, kind, tensors.get(name))

    def ordered(
        self, source_tensors: Mapping[str, Tensor] | None, destination_tensors: Mapping[str, Tensor] | None
    ) -> list[Tensor]:
        """Returns the source tensors, then the destination tensors, each in the order of its layout."""
        given = (source_tensors, destination_tensors)
        return [
            tensors[name]
            for side, tensors in zip(self._sides, given, strict=True)
            if tensors is not None
            for name, _ in side.parameters
        ]

    def _check(self, side: str, name: str, shape: tuple[int, ...], kind: int, tensor: Tensor | None) -> None:
        dtype = None if kind == UNKNOWN else DTYPES[ElementType(kind)]
        expected = f"{shape} of {dtype or 'any dtype'}, contiguous on {self._device}"
        if tensor is None:
            raise SyncError(f"{side} tensor {name} of rank {self._rank} was not given; expected {expected}")
        right = tuple(tensor.shape) == shape and dtype in (None, tensor.dtype) and tensor.is_contiguous()
        if not right or tensor.device.type != self._device.type:
            raise SyncError(
                f"{side} tensor {name} of rank {self._rank} is {tuple(tensor.shape)} of {tensor.dtype} with strides "
                f"{tensor.stride()} on {tensor.device}; expected {expected}, as the {side} layout says. Was the model "
                "changed after the reshard was planned?"
            )


def _types_of(parameters: Parameters, used: list[tuple[IntArray, TypeArray]]) -> IntArray:
    """Returns the element type of every parameter, shape [parameters], or UNKNOWN if it is not used. `used` has pairs
    of (parameter numbers, element types)."""
    types = np.full(len(parameters), UNKNOWN, dtype=np.int64)
    for number, kind in used:
        types[number] = kind
    for number, kind in used:
        mixed = np.flatnonzero(types[number] != kind)
        if len(mixed):
            name = parameters[number[mixed[0]]][0]
            raise ValueError(f"parameter {name} would hold elements of several types; expected one per parameter")
    return types


def device_of(tensors: Iterable[Mapping[str, Tensor] | None]) -> torch.device:
    """Returns the device of the first tensor, or the CPU if there is none."""
    for given in tensors:
        for tensor in (given or {}).values():
            return tensor.device
    return torch.device("cpu")


# The report of a reshard.


@dataclass(frozen=True)
class SyncReport:
    """The bytes and times of a reshard.

    `bytes_local` stayed on a rank, `bytes_node` went between ranks of a node, and `bytes_network` went between nodes.
    They are summed over all ranks and counted when messages are handed to the wire. `network_minimum` is the least
    possible value of `bytes_network` for whole tensors. All further numbers are this rank's, except for the last three.
    `peak_staging_bytes` is the memory of all staging buffers.

    `copy_seconds` went into local copies. `pack_seconds` and `unpack_seconds` went into filling and emptying staging
    buffers. `wire_seconds` is the time with messages of this rank on the wire. It begins when messages are handed to
    the transport. It ends when everything has arrived, or if nothing is received, when everything has left. NCCL
    measures it per round on the device. Gloo measures it per stage on the host. These times overlap, so they do not add
    up to `seconds`. `seconds` begins when all ranks have met and ends when all are done.

    The last three are summed over all ranks and count a run with deltas. It compared `bytes_compared` with the last
    sent values. Of these, `bytes_changed` differed, and `bytes_encoded` were sent for them.
    """

    bytes_local: int
    bytes_node: int
    bytes_network: int
    network_minimum: int
    bytes_sent: int
    bytes_received: int
    num_rounds: int
    num_launches: int
    peak_staging_bytes: int
    copy_seconds: float
    pack_seconds: float
    wire_seconds: float
    unpack_seconds: float
    seconds: float
    bytes_compared: int = 0
    bytes_changed: int = 0
    bytes_encoded: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes between ranks, within nodes and between nodes."""
        return self.bytes_node + self.bytes_network

    @property
    def network_ratio(self) -> float:
        """Bytes between nodes divided by the least possible number. It is 1 if both are 0."""
        if self.network_minimum:
            return self.bytes_network / self.network_minimum
        return float("inf") if self.bytes_network else 1.0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes moved per second by all ranks together, from the first meeting of all ranks to the end."""
        return self.bytes_moved / self.seconds


def total(reports: Sequence[SyncReport]) -> SyncReport:
    """Returns one report for several successive reshards of a rank. Numbers are sums, except for the peak of staging
    memory."""
    sums = {field.name: sum(getattr(report, field.name) for report in reports) for field in fields(SyncReport)}
    return SyncReport(**{**sums, "peak_staging_bytes": max(report.peak_staging_bytes for report in reports)})


# The pipeline of rounds on one rank. Round k + 1 is packed and round k - 1 unpacked while round k is on the wire.

Span = tuple[Event, Event]


@dataclass
class Times:
    """The events of one run, by kind of work. Read them after the run."""

    begin: Event
    copies: list[Span] = field(default_factory=list)
    packs: list[Span] = field(default_factory=list)
    unpacks: list[Span] = field(default_factory=list)
    wire: list[Span] = field(default_factory=list)


def total_seconds(spans: list[Span]) -> float:
    return sum(end.seconds_since(begin) for begin, end in spans)


def covered_seconds(spans: list[Span], origin: Event) -> float:
    """Returns the seconds covered by at least one of `spans`. The spans must be sorted by their ends."""
    covered, until = 0.0, 0.0
    for begin, end in spans:
        start, stop = max(begin.seconds_since(origin), until), end.seconds_since(origin)
        covered += max(stop - start, 0.0)
        until = max(until, stop)
    return covered


class Pipeline:
    """The copies and transfers of one run, issued to streams. On CUDA the host does not wait here, unless messages go
    over gloo."""

    def __init__(self, table: CopyTable, steps: Steps, streams: DeviceStreams, coding: Coder | None = None) -> None:
        self._table, self._steps, self._streams, self._coding = table, steps, streams, coding
        self.times = Times(streams.begin())
        self._settled: Event | None = None
        """The event after all stages so far. It means written destinations and free staging buffers."""

    def stage(self, steps: StageSteps, wire: Wire | None) -> None:
        """Issues all rounds of a stage, after the previous stage. `wire` may be None if the stage has no rounds."""
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
                self._issue(self._streams.unpack, [0, self._steps.num_copies], self.times.copies)
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
        coded = partial(self._coding.encode, steps, number) if self._coding and steps.header_bytes else None
        return self._issue(self._streams.pack, steps.pack[number : number + 2], self.times.packs, coded)

    def _unpack(self, steps: StageSteps, number: int) -> Event:
        coded = partial(self._coding.decode, steps, number) if self._coding and steps.header_bytes else None
        return self._issue(self._streams.unpack, steps.unpack[number : number + 2], self.times.unpacks, coded)

    def _issue(
        self, stream: DeviceStream, bounds: list[int], spans: list[Span], coded: Callable[[], None] | None = None
    ) -> Event:
        """Copies the slices between two `bounds`. If a coder encodes or decodes them, `coded` does it instead."""
        with stream:
            begin = stream.event()
            if coded:
                coded()
            else:
                self._table.launch(*bounds)
            end = stream.event()
        if bounds[0] < bounds[1]:
            spans.append((begin, end))
        return end


# Execution of a plan.

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds to wait for other ranks in shared memory by default. torch's process groups have the same default."""

LARGE_BYTES = 2**18
"""On the CPU, boxes of at least this size in bytes are sent and received in place if possible. For them, packing costs
more than a message."""


class Resharding:
    """A plan ready to be executed any number of times. It has the rounds, and the copies as a table on the device.

    `group` moves the bytes, and ranks meet on `cpu_group` (gloo). Both have the ranks of both layouts. Both may be None
    if this rank is alone. With a gloo `group`, messages of CUDA tensors pass through host memory. A rank packs or
    receives at most `bucket_bytes` per round. `device` is the device of all tensors. `ranks_per_node` separates traffic
    within nodes from traffic between nodes. None puts all ranks on one node. On the CPU, ranks of a node read each
    other's memory if they can, unless `share_memory` is false. `magnitudes` is required if the plan quantises. With
    `delta`, a run may send only the changes since the last run. `waiting` is entered while an early rank waits for the
    others.

    Raises SyncError on all ranks if their plans disagree, or if one plan cannot be executed. Raises ValueError if only
    one of `group` and `cpu_group` is given.

    Collective over: the ranks of both layouts.
    """

    def __init__(
        self,
        plan: RankPlan,
        *,
        group: dist.ProcessGroup | None,
        cpu_group: dist.ProcessGroup | None,
        bucket_bytes: int,
        device: torch.device,
        ranks_per_node: int | None = None,
        magnitudes: BlockScales | None = None,
        timeout_s: float | None = None,
        share_memory: bool = True,
        delta: DeltaSettings | None = None,
        waiting: Waiting = unnoted,
    ) -> None:
        if (group is None) != (cpu_group is None):
            raise ValueError("one of group and cpu_group was given; expected both, over the same ranks, or neither")
        self.plan = plan
        self._group, self._device = group, device
        self._ranks_per_node, self._magnitudes = ranks_per_node, magnitudes
        self._agreement = Agreement(cpu_group, plan.rank, timeout_s, waiting)
        self._agreement.meet()
        neighbours = Neighbours(self._agreement, self._ranks_of_node() if share_memory and device.type == "cpu" else ())
        exchanged = stage_streams(plan, neighbours.ranks)
        large_bytes = LARGE_BYTES if device.type == "cpu" and delta is None else None
        headers = headers_of(delta) if delta else NO_HEADERS
        rounds = self._agreement.rounds(exchanged, bucket_bytes, large_bytes, headers)
        read = neighbours.read_places(shared_places(exchanged, rounds, self._agreement.ranks, headers))

        def make() -> tuple[Steps, CopyTable, Binding]:
            blocks = magnitudes.table if magnitudes else None
            steps = make_steps(
                plan, exchanged, rounds, read=read, blocks=blocks, large_bytes=large_bytes, headers=headers
            )
            return steps, CopyTable(steps.slices, device), Binding(plan, device)

        self.steps, self._table, self._binding = self._agreement.together(make)
        self._coder = Coder(self.steps, device, delta) if delta else None
        self._node = neighbours.memory(self.steps.slot_bytes, timeout_s or DEFAULT_TIMEOUT_S)
        self._num_runs = 0
        self._streams = DeviceStreams(device)
        self._over_gloo = group is not None and dist.get_backend(group) == "gloo"

    @torch.no_grad()
    def run(
        self,
        source_tensors: Mapping[str, Tensor] | None,
        destination_tensors: Mapping[str, Tensor] | None,
        *,
        whole: bool = True,
    ) -> SyncReport:
        """Writes this rank's `destination_tensors` from the `source_tensors` of all ranks. Returns when every rank has
        everything.

        Tensors are given by their names in the layouts. A rank of only one layout passes None for the other. If `whole`
        is false, only the changes since the last run are sent. This needs a reshard with `delta`, the same value on all
        ranks, and destinations left untouched since the last run.

        Raises SyncError on all ranks, before anything is moved, if a tensor does not fit the plan. Raises SyncError on
        the way if another rank is lost. Destinations are then partly written.

        Collective over: the ranks of both layouts, from their main threads.
        """
        self._agreement.meet()
        self._connect()
        begin = time.perf_counter()
        launches = self._num_launches
        self._num_runs += 1
        self._agreement.together(lambda: self._check(source_tensors, destination_tensors))
        if self._magnitudes:
            source_tensors = self._magnitudes.prepare(source_tensors, self._group)
        if self._coder:
            self._coder.begin(whole=whole)
        staging = allocate(self.steps, self._device, host=self._over_gloo)
        for buffer in staging:
            self._streams.keep(buffer)
        tensors = self._binding.ordered(source_tensors, destination_tensors)
        amax = self._magnitudes.amax if self._magnitudes else torch.empty(0, device=self._device)
        bases = [*tensors, *staging, amax, *(self._node.slots if self._node else [])]
        try:
            self._bind(bases)
            pipeline = Pipeline(self._table, self.steps, self._streams, self._coder)
            wires = self._move(pipeline, Memory(bases))
        finally:
            self._table.release()
            if self._coder:
                self._coder.release()
        return self._report(begin, launches, staging, wires, pipeline)

    def _bind(self, bases: list[Tensor]) -> None:
        """Makes the table copy between `bases`. Boxes compared by a coder are packed into its scratch memory
        instead."""
        if self._coder:
            self._coder.use(Memory(bases), self._table)
        if self._coder is None or self._coder.whole:
            self._table.bind(bases)
            return
        self._streams.keep(self._coder.scratch)
        coded = [stage.kind for stage in self.steps.stages if stage.header_bytes]
        packed_into = {self.steps.bases.packed(kind) + turn for kind in coded for turn in (0, 1)}
        scratch = self._coder.scratch
        self._table.bind([scratch if number in packed_into else base for number, base in enumerate(bases)])

    def _report(
        self, begin: float, launches: int, staging: Sequence[Tensor], wires: list[Wire], pipeline: Pipeline
    ) -> SyncReport:
        """Returns the report of a run. Collective over: the ranks of both layouts."""
        coder = self._coder
        sent = sum((wire.bytes_sent for wire in wires), start=Counter[int]())
        counted = [coder.count.compared, coder.count.changed, coder.count.sent] if coder else [0, 0, 0]
        local, node, network, compared, changed, encoded = self._agreement.total(
            [self._local_bytes(), *self._by_distance(sent), *counted]
        )
        if coder:
            coder.finish()
        times = pipeline.times
        return SyncReport(
            bytes_local=local,
            bytes_node=node,
            bytes_network=network,
            network_minimum=self.plan.traffic.network_minimum,
            bytes_sent=sent.total(),
            bytes_received=self._received_bytes(wires),
            num_rounds=sum(steps.num_rounds for steps in self.steps.stages),
            num_launches=self._num_launches - launches,
            peak_staging_bytes=self._staging_bytes(staging),
            bytes_compared=compared,
            bytes_changed=changed,
            bytes_encoded=encoded,
            copy_seconds=total_seconds(times.copies),
            pack_seconds=total_seconds(times.packs),
            wire_seconds=covered_seconds(times.wire, times.begin),
            unpack_seconds=total_seconds(times.unpacks),
            seconds=time.perf_counter() - begin,
        )

    @property
    def _num_launches(self) -> int:
        return self._table.num_launches + (self._magnitudes.num_launches if self._magnitudes else 0)

    def _check(
        self, source_tensors: Mapping[str, Tensor] | None, destination_tensors: Mapping[str, Tensor] | None
    ) -> None:
        computed = (SCALES_PARAMETER,) if self._magnitudes else ()
        self._binding.check(source_tensors, destination_tensors, without=computed)

    def _move(self, pipeline: Pipeline, memory: Memory) -> list[Wire]:
        """Runs all stages and returns their wires. Waits until all messages of this rank are sent and received."""
        wires: list[Wire] = []
        rounds_before = self._num_runs * sum(steps.num_rounds for steps in self.steps.stages)
        for steps in self.steps.stages:
            wire = self._wire(steps, memory, rounds_before)
            if wire and self._coder and steps.header_bytes:
                wire.shortened, wire.lengths = self._coder.shortened, self._agreement.lengths
            pipeline.stage(steps, wire)
            wires += [wire] if wire else []
            rounds_before += steps.num_rounds
        self._streams.finish()
        return wires

    def _connect(self) -> None:
        """Makes NCCL connect the group. NCCL does so in the first call on all ranks, but some ranks may have nothing to
        send. The group may be a new one since the last run. Collective over: the group."""
        if self._group is not None and not self._over_gloo:
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)

    def _wire(self, steps: StageSteps, memory: Memory, rounds_before: int) -> Wire | None:
        if self._group is None:
            return None
        rank, stream, group = self.plan.rank, self._streams.wire, plain_group(self._group)
        if steps.kind.shared:
            return SharedWire(steps, rank, stream, self._node, rounds_before) if self._node else None
        return (GlooWire if self._over_gloo else NcclWire)(steps, rank, stream, memory, group)

    def _received_bytes(self, wires: list[Wire]) -> int:
        """Returns the received bytes. Messages of variable length count by their headers."""
        exact = sum(wire.bytes_received for wire in wires if wire.shortened is None)
        return exact + (self._coder.count.received if self._coder else 0)

    def _staging_bytes(self, staging: Sequence[Tensor]) -> int:
        distinct = {buffer.data_ptr(): buffer.numel() for buffer in staging}
        scratch = self._coder.scratch_bytes if self._coder else 0
        return sum(distinct.values()) + scratch + (self._node.own_bytes if self._node else 0)

    def _local_bytes(self) -> int:
        wire = wire_types(self.plan.source_types, self.plan.destination_types)
        return int(num_bytes(self.plan.copies, wire).sum())

    def _by_distance(self, sent: Counter[int]) -> tuple[int, int]:
        """Returns (bytes to ranks of this node, bytes to other nodes)."""
        near = sum(sent[peer] for peer in self._ranks_of_node())
        return near, sent.total() - near

    def _ranks_of_node(self) -> list[int]:
        """Returns the other ranks of this rank's node."""
        rank, node = self.plan.rank, self._ranks_per_node
        return [
            peer for peer in self._agreement.ranks if peer != rank and (node is None or peer // node == rank // node)
        ]


def execute(
    plan: RankPlan,
    source_tensors: Mapping[str, Tensor] | None,
    destination_tensors: Mapping[str, Tensor] | None,
    *,
    group: dist.ProcessGroup | None,
    cpu_group: dist.ProcessGroup | None = None,
    bucket_bytes: int,
    ranks_per_node: int | None = None,
) -> SyncReport:
    """Executes a plan once. Takes the arguments of `Resharding` and `Resharding.run`.

    `cpu_group` may be left out if `group` is a gloo group. Collective over: the ranks of both layouts.
    """
    if cpu_group is None and group is not None and dist.get_backend(group) == "gloo":
        cpu_group = group
    resharding = Resharding(
        plan,
        group=group,
        cpu_group=cpu_group,
        bucket_bytes=bucket_bytes,
        device=device_of((source_tensors, destination_tensors)),
        ranks_per_node=ranks_per_node,
    )
    return resharding.run(source_tensors, destination_tensors)
