"""Carrying out a plan: every round is packed, sent and unpacked while its neighbours are in other steps."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rltrain.models.table import wire_types
from rltrain.reshard.delta.coder import Coder, DeltaSettings, headers_of
from rltrain.reshard.execute.agreement import Agreement
from rltrain.reshard.execute.binding import Binding, device_of
from rltrain.reshard.execute.device_streams import DeviceStreams
from rltrain.reshard.execute.pipeline import Pipeline, covered_seconds, total_seconds
from rltrain.reshard.execute.report import SyncReport
from rltrain.reshard.execute.staging import Memory, Staging, allocate
from rltrain.reshard.fp8.blocks import SCALES_PARAMETER
from rltrain.reshard.kernels.copy_table import CopyTable
from rltrain.reshard.plan.match import num_bytes
from rltrain.reshard.plan.rank_plan import RankPlan
from rltrain.reshard.plan.stages import NO_HEADERS, shared_places, stage_streams
from rltrain.reshard.plan.steps import BlockPlaces, StageSteps, Steps, make_steps
from rltrain.reshard.wires.gloo_wire import GlooWire
from rltrain.reshard.wires.nccl_wire import NcclWire
from rltrain.reshard.wires.neighbours import Neighbours
from rltrain.reshard.wires.shared_wire import SharedWire
from rltrain.reshard.wires.wire import Wire
from rltrain.runtime.heartbeat import Waiting, unnoted
from rltrain.runtime.process_groups import plain_group

DEFAULT_TIMEOUT_S = 1800.0
"""How long ranks wait for each other in shared memory where nothing was said, as long as torch does over wires."""

LARGE_BYTES = 2**18
"""On the CPU boxes of at least this size are sent and received in place where they can be: packing costs more there
than a message."""


class Magnitudes(Protocol):
    """What a reshard that quantises knows of this rank's blocks (block_scales.BlockScales)."""

    amax: Tensor

    @property
    def table(self) -> BlockPlaces: ...

    @property
    def num_launches(self) -> int: ...

    def prepare(
        self, source_tensors: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None
    ) -> Mapping[str, Tensor] | None:
        """Bring `amax` up to date; the source tensors with what it adds to them. Collective over: `group`."""


class Resharding:
    """A plan that is ready to be carried out any number of times: its rounds, and its copies as a table on the device.

    `group` moves the bytes and `cpu_group` (gloo, the same ranks) is where ranks meet; both hold the ranks of both
    layouts, and may be None where that is this rank alone. With a gloo `group` messages of CUDA tensors pass through
    host memory. In no round does a rank pack or receive more than `bucket_bytes`. `device` is where all tensors are.
    `ranks_per_node` tells what goes between nodes; None: all ranks are on one. On the CPU ranks of a node read each
    other's memory where they can, unless `share_memory` is false. `magnitudes` must be given where the plan quantises.
    With `delta` runs may send only what changed since the last one. `waiting` is entered
    where ranks that came early wait for the others to come.

    Raises SyncError, on all ranks, where plans of ranks disagree or one cannot be carried out.
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
        magnitudes: Magnitudes | None = None,
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
        """Write this rank's `destination_tensors` from all ranks' `source_tensors`, both by the names of their layouts.

        A rank that is in one layout only passes None for the other. Where not `whole`, which is for a reshard with
        `delta` and the same on all ranks, destinations hold what the last run left there: only what changed since is
        sent. Returns when every rank has everything. Raises SyncError: before anything is moved, on all ranks, where a
        tensor of one does not fit the plan; on the way where another rank is lost, and destinations are then partly
        written.

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
        staging = self._allocate()
        tensors = self._binding.ordered(source_tensors, destination_tensors)
        amax = self._magnitudes.amax if self._magnitudes else torch.empty(0, device=self._device)
        bases = [*tensors, *staging.buffers, amax, *(self._node.slots if self._node else [])]
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
        """Have the table copy between `bases`; what a coder compares is packed into memory of its own."""
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
        self, begin: float, launches: int, staging: Staging, wires: list[Wire], pipeline: Pipeline
    ) -> SyncReport:
        """Collective over: the ranks of both layouts."""
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

    def _allocate(self) -> Staging:
        staging = allocate(self.steps, self._device, host=self._over_gloo)
        for buffer in staging.buffers:
            self._streams.keep(buffer)
        return staging

    def _move(self, pipeline: Pipeline, memory: Memory) -> list[Wire]:
        """All stages; returns when what this rank sends and receives is through, with the stages' wires."""
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
        """Have NCCL set the group up: in its first call, which all its ranks must make, while some may have nothing to
        send. The group may have been made anew since the last run. Collective over: the group."""
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
        """Messages that may be shorter count by their headers."""
        exact = sum(wire.bytes_received for wire in wires if wire.shortened is None)
        return exact + (self._coder.count.received if self._coder else 0)

    def _staging_bytes(self, staging: Staging) -> int:
        scratch = self._coder.scratch_bytes if self._coder else 0
        return staging.num_bytes + scratch + (self._node.own_bytes if self._node else 0)

    def _local_bytes(self) -> int:
        wire = wire_types(self.plan.source_types, self.plan.destination_types)
        return int(num_bytes(self.plan.copies, wire).sum())

    def _by_distance(self, sent: Counter[int]) -> tuple[int, int]:
        """(bytes to ranks of this node, bytes to other nodes)."""
        near = sum(sent[peer] for peer in self._ranks_of_node())
        return near, sent.total() - near

    def _ranks_of_node(self) -> list[int]:
        """The other ones that are on this rank's node."""
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
    """Carry out a plan once: see `Resharding`, whose arguments these are, and `Resharding.run`.

    `cpu_group` may be left out where `group` is gloo's. Collective over: the ranks of both layouts.
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
