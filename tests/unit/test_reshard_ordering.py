"""The streams of a reshard order all that its kernels and messages read and write: tests/stand_ins/cuda_streams.py.

What runs is Resharding itself with its streams, events, pipeline and wires; kernels and transports say what they touch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, IntArray
from rltrain.reshard import execute, wires
from rltrain.reshard.execute import Resharding
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import RankPlan, plan
from rltrain.reshard.rounds import Rounds, choose_rounds, stage_streams
from rltrain.reshard.wires import DeviceStreams, _CudaEvent, _CudaStream
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import tiny_architecture
from tests.stand_ins.cuda_streams import Actor, Device, RaceError, Region, Stream, region

LLAMA = tiny_architecture("llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Case(NamedTuple):
    actor: Grid
    rollout: Grid
    rank: int
    bucket_bytes: int
    ranks_per_node: int
    dtype: str
    transport: str


def of_all_ranks(case: Case) -> dict[int, RankPlan]:
    source = megatron_layout(LLAMA, case.actor)
    destination = engine_layout(LLAMA, case.rollout, dtype=case.dtype)
    ranks = sorted({*source.ranks, *destination.ranks})
    return {rank: plan(source, destination, rank, case.ranks_per_node) for rank in ranks}


class Agreed:
    """In the place of Agreement: what all ranks would settle."""

    plans: dict[int, RankPlan]

    def __init__(self, *_: Any) -> None:
        self.ranks = list(self.plans)

    def meet(self) -> None:
        pass

    def together(self, attempt: Callable[[], Any]) -> Any:
        return attempt()

    def total(self, numbers: list[int]) -> list[int]:
        return numbers

    def exchange(self, rows: IntArray) -> IntArray:
        return rows

    def rounds(self, exchanged: Any, bucket_bytes: int, _: int | None, __: Any) -> tuple[Rounds, ...]:
        of_ranks = [stage_streams(made) for made in self.plans.values()]
        cuts = []
        for number, stage in enumerate(exchanged):
            made = [end for streams in of_ranks for end in (streams[number].sends, streams[number].receives)]
            most = max(end.total_bytes for end in made), max(len(end.peers) for end in made)
            cuts.append(choose_rounds(*most, stage.kind.round_bytes(bucket_bytes)))
        return tuple(cuts)


class Table:
    """In the place of CopyTable: a launch reads and writes what its slices say."""

    device: Device
    num_launches = 0

    def __init__(self, slices: Array, _: torch.device) -> None:
        self._slices = slices
        self._bases: Sequence[Tensor] = ()

    def bind(self, bases: Sequence[Tensor]) -> None:
        self._bases = bases

    def release(self) -> None:
        self._bases = ()

    def launch(self, first: int, last: int) -> None:
        rows = self._slices[first:last]
        reads, writes = [self._side(rows, "src"), self._side(rows, "dst")]
        self.device.run(self.device.current, f"copy of slices {first} to {last}", reads=reads, writes=writes)

    def _side(self, rows: Array, side: str) -> list[Region]:
        found = []
        for row in rows:
            item = int(ITEM_BYTES[row[f"{side}_type"]])
            memory = region(self._bases[row[f"{side}_base"]])
            begin = memory.begin + int(row[f"{side}_offset"]) * item
            reach = (int(row["rows"]) - 1) * int(row[f"{side}_stride"]) + int(row["cols"])
            found.append(Region(memory.owner, begin, begin + reach * item))
        return found


class Operation(NamedTuple):
    """In the place of dist.P2POp."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any
    tag: int


class StreamWork:
    """NCCL's: a wait is the current stream's."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._clock = device, dict(stream.clock)

    def wait(self) -> None:
        self._device.current.join(self._clock)


class HostWork:
    """gloo's: a wait is the host's."""

    def __init__(self, device: Device, message: Actor) -> None:
        self._device, self._message = device, message

    def wait(self) -> None:
        self._device.host.join(self._message.clock)


class Group:
    """A process group whose messages read and write on `device`, and move nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> HostWork:
        return HostWork(self.device, self.device.message(f"send to place {peer}", reads=map(region, tensors)))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> HostWork:
        return HostWork(self.device, self.device.message(f"receive from place {peer}", writes=map(region, tensors)))

    def together(self, operations: list[Operation]) -> list[StreamWork]:
        device = self.device
        device.nccl.wait_stream(device.current)
        sent = [region(o.tensor) for o in operations if o.op is dist.isend]
        received = [region(o.tensor) for o in operations if o.op is dist.irecv]
        peers = sorted({o.peer for o in operations})
        device.run(device.nccl, f"messages with ranks {peers}", reads=sent, writes=received)
        return [StreamWork(device, device.nccl)]


def run_rank(case: Case, device: Device, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two syncs of one rank between an update of its weights and a use of what came; the number of rounds of one."""
    plans = of_all_ranks(case)
    group: Any = Group(device)
    device.install(monkeypatch)
    monkeypatch.setattr(Table, "device", device, raising=False)
    monkeypatch.setattr(Agreed, "plans", plans, raising=False)
    monkeypatch.setattr(execute, "Agreement", Agreed)
    monkeypatch.setattr(execute, "CopyTable", Table)
    monkeypatch.setattr(execute, "LARGE_BYTES", None)
    monkeypatch.setattr(execute, "DeviceStreams", lambda _: DeviceStreams(torch.device("cuda")))
    monkeypatch.setattr(dist, "P2POp", Operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", group.together)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda _: case.transport)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(plans))
    on_host, allocated = case.transport == "gloo", list[Tensor]()

    def allocate(*arguments: Any, **named: Any) -> wires.StagingBuffers:
        made = wires.allocate(*arguments, **named)
        for buffer in {id(buffer): buffer for buffer in made.buffers}.values():
            allocated.append(buffer)
            if not on_host:
                device.allocated(buffer.untyped_storage()._cdata, buffer.nbytes)
        return made

    monkeypatch.setattr(execute, "allocate", allocate)
    made = plans[case.rank]
    held = tensors_of(made.source_parameters, torch.float32)
    wanted = tensors_of(made.destination_parameters, DTYPES[case.dtype])
    sync = Resharding(
        made,
        group=group,
        cpu_group=group,
        bucket_bytes=case.bucket_bytes,
        device=torch.device("cpu"),
        ranks_per_node=case.ranks_per_node,
        share_memory=False,
    )
    for _ in range(2):
        device.run(device.default, "an update", writes=map(region, held.values()))
        sync.run(held, wanted)
        while allocated:
            device.freed(allocated.pop().untyped_storage()._cdata, "a staging buffer", at_once=on_host)
        device.run(device.default, "a decode step", reads=map(region, wanted.values()))
        device.run(device.default, "an update", writes=map(region, held.values()))
    return sum(stage.num_rounds for stage in sync.steps.stages)


def tensors_of(parameters: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, shape in parameters}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.permutations(range(4)))
    num_actors, shared = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    actors = tuple(sorted(ranks[:num_actors]))
    others = actors if shared else tuple(sorted(ranks[num_actors:])) or actors
    rollout = others[: draw(st.sampled_from([n for n in (1, 2, 4) if n <= len(others)]))]
    tp, pp = draw(st.sampled_from([(tp, pp) for tp in (1, 2) for pp in (1, 2) if num_actors % (tp * pp) == 0]))
    return Case(
        Grid(actors, tp=tp, pp=pp),
        Grid(rollout, tp=draw(st.sampled_from([tp for tp in (1, 2) if len(rollout) % tp == 0]))),
        rank=draw(st.sampled_from(sorted({*actors, *rollout}))),
        bucket_bytes=draw(st.sampled_from([2048, 6000, 2**24])),
        ranks_per_node=draw(st.sampled_from([1, 2, 4])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        transport=draw(st.sampled_from(["nccl", "gloo"])),
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_nothing_in_a_reshard_races(case: Case) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_rank(case, Device(), monkeypatch)


FANS_OUT = Case(Grid((0, 1), tp=2), Grid((2, 3)), 2, 2048, 2, "bfloat16", "nccl")
SENDS = FANS_OUT._replace(rank=0)


def without(owner: type, name: str, stream: str | None = None) -> Any:
    """A wait that is left out, of all streams or of one."""
    wait = getattr(owner, name)

    def left_out(self: Any, *arguments: Any) -> Any:
        if stream is not None and self._stream.name != stream:
            wait(self, *arguments)

    return mock.patch.object(owner, name, left_out)


PACK, WIRE, UNPACK = "stream 2", "stream 3", "stream 4"
LEFT_OUT = {
    "packing over what is being sent": (SENDS, without(_CudaStream, "after", PACK)),
    "sending before it is packed": (SENDS, without(_CudaStream, "after", WIRE)),
    "receiving over what is being unpacked": (FANS_OUT, without(_CudaStream, "after", WIRE)),
    "handing on before it has come": (FANS_OUT, without(_CudaStream, "after", PACK)),
    "unpacking before it has come": (FANS_OUT, without(_CudaStream, "after", UNPACK)),
    "beginning before the update is over": (SENDS, without(Stream, "wait_stream")),
    "ending before all is written": (FANS_OUT, without(DeviceStreams, "finish")),
    "sending over gloo before it is packed": (SENDS._replace(transport="gloo"), without(_CudaEvent, "wait")),
}


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, left_out = LEFT_OUT[fault]
    with left_out, pytest.raises(RaceError, match="nothing orders|is freed while"):
        run_rank(case, Device(), monkeypatch)
