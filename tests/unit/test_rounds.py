"""Rounds of a reshard: their sizes, their agreement between ranks, their order by streams."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType, IntArray
from rltrain.reshard import execute, wires
from rltrain.reshard.agreement import all_reduce, rounds
from rltrain.reshard.copies import Steps, make_steps
from rltrain.reshard.execute import Resharding
from rltrain.reshard.layout import elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.native import SLICE
from rltrain.reshard.plan import TRANSFER, RankPlan, plan
from rltrain.reshard.rounds import (
    ALIGNMENT,
    Cut,
    ReadPlaces,
    Rounds,
    checksums,
    choose_rounds,
    cut,
    distinct,
    fixed_places,
    shared_places,
    stage_streams,
    streams,
)
from rltrain.reshard.wires import DeviceStreams, _CudaEvent, _CudaStream
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.cuda_streams import Actor, Device, RaceError, Region, Stream, region
from tests.support.model_shards import tiny_architecture
from tests.support.shared_store import on_ranks, open_store

TYPES = np.array([0, 1, 3, 2, 0], dtype=np.uint8)
"""Element types of five tensors on the wire."""
SENDER = 9


@dataclass
class End:
    """One end of some streams: its transfers, and its parameters as bytes with padding around boxes."""

    transfers: np.ndarray
    parameters: list[np.ndarray]

    def bytes_of(self, box: np.void) -> np.ndarray:
        """Returns the [rows, cols * item] view of a box in its parameter."""
        item = int(ITEM_BYTES[TYPES[box["tensor"]]])
        start = self.parameters[box["parameter"]][int(box["offset"]) * item :]
        return np.lib.stride_tricks.as_strided(
            start, (int(box["rows"]), int(box["cols"]) * item), (int(box["stride"]) * item, 1)
        )


@st.composite
def placed(draw: st.DrawFn, boxes: np.ndarray) -> End:
    """Puts `boxes` into parameters, each into its own or several without a gap into one."""
    transfers = boxes.copy()
    sizes: list[int] = []
    for number, box in enumerate(transfers):
        stride = int(box["cols"]) + draw(st.sampled_from([0, 0, 3]))
        item = int(ITEM_BYTES[TYPES[box["tensor"]]])
        alike = number > 0 and TYPES[transfers["tensor"][number - 1]] == TYPES[box["tensor"]]
        joined = alike and draw(st.booleans())
        box["parameter"] = len(sizes) - 1 if joined else len(sizes)
        box["offset"] = sizes[-1] // item if joined else draw(st.integers(0, 2))
        box["stride"] = stride
        end = (int(box["offset"]) + int(box["rows"]) * stride) * item
        if joined:
            sizes[-1] = end
        else:
            sizes.append(end)
    return End(transfers, [np.zeros(size, dtype=np.uint8) for size in sizes])


@st.composite
def transfers_to_peers(draw: st.DrawFn) -> np.ndarray:
    peers = draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    boxes = np.zeros(len(peers), dtype=TRANSFER)
    for box, peer in zip(boxes, sorted(peers), strict=True):
        box["peer"], box["tensor"] = peer, draw(st.integers(0, len(TYPES) - 1))
        box["rows"], box["cols"] = draw(st.integers(1, 7)), draw(st.integers(1, 40))
        box["row"], box["col"] = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    return boxes[np.lexsort([boxes[name] for name in ("col", "row", "tensor", "peer")])]


def spread(made: Cut, number: int, end: End, staging: np.ndarray, *, pack: bool) -> None:
    """Copies the staged boxes of a round from their parameters to the staging buffer, or back."""
    for i in range(made.starts[number], made.starts[number + 1]):
        box, item = made.boxes[i], int(ITEM_BYTES[made.types[i]])
        inside = end.bytes_of(box)
        part = staging[made.staged[i] * item :][: inside.size].reshape(inside.shape)
        (part if pack else inside)[:] = inside if pack else part


def message_bytes(made: Cut, i: int, end: End, staging: np.ndarray) -> np.ndarray:
    messages = made.messages
    memory = staging if messages.parameters[i] < 0 else end.parameters[messages.parameters[i]]
    found = memory[messages.offsets[i] :][: messages.sizes[i]]
    assert len(found) == messages.sizes[i], "the message must fit in its memory"
    return found


@settings(max_examples=75)
@given(st.data())
def test_every_element_arrives_once_through_bounded_buffers(data: st.DataObject) -> None:
    boxes = data.draw(transfers_to_peers())
    held = data.draw(st.sampled_from([TYPES, np.roll(TYPES, 1)]))
    large_bytes = data.draw(st.sampled_from([None, 1, 64, 500]))
    sender = data.draw(placed(boxes))
    for number, parameter in enumerate(sender.parameters):
        parameter[:] = np.random.default_rng(number).integers(1, 255, len(parameter))
    sending = streams(sender.transfers, TYPES)
    bucket_bytes = data.draw(st.sampled_from([2 * ALIGNMENT * len(sending.peers) + 1, 600, 10_000]))
    rounds = choose_rounds(sending.total_bytes, len(sending.peers), bucket_bytes)
    packs = cut(sending, rounds, held, large_bytes)
    receivers = {}
    for peer in sending.peers.tolist():
        mine = boxes[boxes["peer"] == peer]
        mine["peer"] = SENDER
        end = data.draw(placed(mine))
        receiving = streams(end.transfers, TYPES)
        assert checksums(receiving)[0] == checksums(sending)[sending.peers.tolist().index(peer)]
        receivers[peer] = end, cut(receiving, rounds, held, large_bytes)
    assert large_bytes is not None or (packs.messages.parameters == -1).all()
    cast, staged = (x[(held != TYPES)[x["tensor"]]] for x in (boxes, packs.boxes))
    assert elements(staged).sum() == elements(cast).sum(), "all cast elements are staged"
    for number in range(rounds.count):
        out = np.zeros(bucket_bytes, dtype=np.uint8)
        into = {peer: np.zeros(bucket_bytes, dtype=np.uint8) for peer in receivers}
        spread(packs, number, sender, out, pack=True)
        theirs = {peer: made.messages.starts[number] for peer, (_, made) in receivers.items()}
        used = 0
        for i in range(packs.messages.starts[number], packs.messages.starts[number + 1]):
            peer = int(packs.messages.peers[i])
            end, made = receivers[peer]
            other = theirs[peer]
            theirs[peer] += 1
            assert made.messages.numbers[other] == packs.messages.numbers[i]
            assert made.messages.sizes[other] == packs.messages.sizes[i] > 0
            message_bytes(made, other, end, into[peer])[:] = message_bytes(packs, i, sender, out)
            used += int(packs.messages.sizes[i])
        assert used <= bucket_bytes
        for peer, (end, made) in receivers.items():
            assert theirs[peer] == made.messages.starts[number + 1]
            spread(made, number, end, into[peer], pack=False)
    assert packs.messages.staged_bytes <= bucket_bytes
    for peer, (end, _) in receivers.items():
        of_peer = sender.transfers[boxes["peer"] == peer]
        for sent, received in zip(of_peer, end.transfers, strict=True):
            assert np.array_equal(sender.bytes_of(sent), end.bytes_of(received))
        arrived = sum(int((parameter > 0).sum()) for parameter in end.parameters)
        num_bytes = int((elements(of_peer) * ITEM_BYTES[TYPES[of_peer["tensor"]]]).sum())
        assert arrived == num_bytes, "padding is not written"


def test_a_large_box_does_not_share_its_message() -> None:
    boxes = np.zeros(4, dtype=TRANSFER)
    boxes["rows"], boxes["cols"], boxes["stride"] = 1, [1, 2, 100, 3], 100
    boxes["parameter"], boxes["offset"] = [0, 0, 1, 2], [0, 50, 0, 0]
    made = cut(streams(boxes, TYPES), Rounds(1, ALIGNMENT), TYPES, large_bytes=400)
    assert made.messages.sizes.tolist() == [12, 400, 12]
    assert made.messages.parameters.tolist() == [-1, 1, 2]
    assert made.boxes["cols"].tolist() == [1, 2]


def test_rounds_are_the_fewest_that_fit() -> None:
    assert choose_rounds(0, 0, 1).count == 0
    assert choose_rounds(2**20, 1, 2**20 + 2**18) == Rounds(1, 2**16)
    assert choose_rounds(2**30, 7, 2**26).count == 17
    with pytest.raises(ValueError, match="buckets of 64 bytes are too small for 2 peers: expected more than 64"):
        choose_rounds(1, 2, 64)


def test_streams_that_exchange_little_do_it_in_few_messages() -> None:
    rounds = choose_rounds(2**30, 2, 2**24)
    num_bytes = np.array([2**30 - 1000, 1000])
    assert rounds.count > 60
    assert np.count_nonzero(np.diff(rounds.bounds(num_bytes)), axis=1).tolist() == [rounds.count, 1]


def test_cuts_of_very_long_streams_do_not_wrap_around() -> None:
    bounds = Rounds(100_000, 2**16).bounds(np.array([2**50]))[0]
    assert (np.diff(bounds) >= 0).all() and bounds[-1] == 2**50
    assert np.diff(bounds).max() <= 2**50 // 100_000 + 2**16 + 1


def test_checksums_tell_order_type_and_place() -> None:
    boxes = np.zeros(2, dtype=TRANSFER)
    boxes["tensor"], boxes["rows"], boxes["cols"] = [0, 4], 2, 3
    one = checksums(streams(boxes, TYPES))
    assert one == checksums(streams(boxes, TYPES))
    changed = boxes.copy()
    changed["col"][1] = 1
    others = [checksums(streams(boxes[::-1].copy(), TYPES)), checksums(streams(changed, TYPES))]
    others.append(checksums(streams(boxes, TYPES[[1, 1, 2, 3, 4]])))
    assert one not in others and len({int(other[0]) for other in others}) == 3


@settings(max_examples=50)
@given(transfers_to_peers(), st.integers(1, 5))
def test_runs_at_fixed_places_do_not_meet(boxes: np.ndarray, count: int) -> None:
    made = streams(boxes, TYPES)
    rounds = Rounds(count, ALIGNMENT)
    places = fixed_places(made.num_bytes, rounds)
    packs = cut(made, rounds, TYPES, places=places)
    end = np.append(places[1:], packs.messages.staged_bytes)
    for number in range(count):
        for i in range(packs.messages.starts[number], packs.messages.starts[number + 1]):
            stream = made.peers.tolist().index(packs.messages.peers[i])
            assert packs.messages.offsets[i] == places[stream], "a receiver reads at this place in every round"
            assert packs.messages.offsets[i] + packs.messages.sizes[i] <= end[stream]


@settings(max_examples=50)
@given(transfers_to_peers(), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_equal_streams_are_kept_once(boxes: np.ndarray, same_as: list[int]) -> None:
    """Peers 3 to 8 get copies of the streams of peers 0 to 2, or nothing if these get nothing."""
    copies = [boxes[boxes["peer"] < 3]]
    for peer, original in enumerate(same_as, start=3):
        copies.append(boxes[boxes["peer"] == original].copy())
        copies[-1]["peer"] = peer
    made = streams(np.concatenate(copies), TYPES)
    kept, number = distinct(made)
    sums = checksums(made)
    assert len(kept.peers) == len(set(sums.tolist()))
    assert np.array_equal(checksums(kept)[number], sums)
    assert np.array_equal(kept.num_bytes[number], made.num_bytes)
    assert set(kept.peers.tolist()) <= {0, 1, 2}


def steps_of_third_rank(neighbours: tuple[int, ...]) -> Steps:
    """Returns the steps of rank 2 in a sync from ranks 0 and 1 to 2 and 3. Rank 2 forwards to rank 3."""
    architecture = tiny_architecture("llama")
    made = plan(
        megatron_layout(architecture, Grid((0, 1), tp=2)),
        engine_layout(architecture, Grid((2, 3)), dtype="bfloat16"),
        2,
        ranks_per_node=2,
    )
    exchanged = stage_streams(made, neighbours)
    rounds = tuple(choose_rounds(stage.receives.total_bytes, 2, 1000) for stage in exchanged)
    ours = shared_places(exchanged, rounds, [0, 1, 2, 3])
    assert ours.shape == (4, len(exchanged)) and not ours[[0, 1, 2]].any()
    theirs = np.full((len(neighbours), len(exchanged)), 96)
    return make_steps(made, exchanged, rounds, read=ReadPlaces(neighbours, theirs))


def test_two_stages_take_turns_between_buffers_and_keep_their_tags_apart() -> None:
    steps = steps_of_third_rank(neighbours=())
    assert steps.slices.dtype == SLICE
    wired = [stage for stage in steps.stages if not stage.kind.shared]
    assert all(stage.num_rounds == 0 for stage in steps.stages if stage.kind.shared)
    assert all(stage.num_rounds > 1 and not stage.receives_in_place for stage in wired)
    tags: list[set[int]] = []
    for stage in wired:
        for number, messages in enumerate(stage.receives):
            assert {message.base for message in messages} <= {steps.bases.receive + number % 2}
            rows = steps.slices[stage.unpack[number] : stage.unpack[number + 1]]
            assert set(rows["src_base"].tolist()) == {steps.bases.receive + number % 2}
            assert (rows["src_type"] == ElementType.BFLOAT16).all(), "cast before the wire"
        tags.append({message.tag for messages in stage.receives for message in messages})
    assert tags[0] and tags[1] and not tags[0] & tags[1]


def test_what_a_neighbour_has_packed_is_unpacked_from_its_slots() -> None:
    steps = steps_of_third_rank(neighbours=(3,))
    direct, direct_shared, fan_out, shared = steps.stages
    assert direct.num_rounds > 1 and shared.num_rounds > 1
    assert direct_shared.num_rounds == fan_out.num_rounds == 0
    assert shared.receive_bytes == 0 < shared.send_bytes <= steps.slot_bytes
    for number in range(shared.num_rounds):
        packed = steps.slices[shared.pack[number] : shared.pack[number + 1]]
        read = steps.slices[shared.unpack[number] : shared.unpack[number + 1]]
        assert set(packed["dst_base"].tolist()) == {steps.bases.slots + number % 2}
        assert set(read["src_base"].tolist()) == {steps.bases.slots + 2 + number % 2}
        assert (read["src_offset"] * 2).min() == 96, "read in bfloat16 from the place of the neighbour's write"


@given(st.integers(1, 300))
def test_rounds_are_few_and_both_sides_of_each_know_of_it(num_ranks: int) -> None:
    of_all = [[*rounds(rank, num_ranks)] for rank in range(num_ranks)]
    assert max(map(len, of_all)) <= num_ranks.bit_length() + 1
    answers = {"exchange": "exchange", "give": "take", "take": "give"}
    for rank, mine in enumerate(of_all):
        for what, peer in mine:
            with_me = [(theirs, who) for theirs, who in of_all[peer] if who == rank]
            assert (answers[what], rank) in with_me and len(with_me) == sum(who == peer for _, who in mine)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_rank_has_the_sum_and_the_largest(num_ranks: int) -> None:
    numbers = [torch.tensor([rank + 1, -rank, 2**62, 7 * rank % 5]) for rank in range(num_ranks)]

    def of_rank(rank: int, store: dist.Store) -> list[list[int]]:
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, num_ranks)  # type: ignore[attr-defined]
        try:
            return [all_reduce(numbers[rank], how, group).tolist() for how in (torch.add, torch.maximum) * 2]
        finally:
            group.barrier().wait()

    whole = torch.stack(numbers)
    expected = [whole.sum(0).tolist(), whole.max(0).values.tolist()] * 2  # the sum wraps around, like in _imbalance
    with open_store() as store:
        assert on_ranks(store, of_rank, num_ranks) == [expected] * num_ranks


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
    """A stand-in for Agreement with the results of all ranks."""

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
    """A stand-in for CopyTable. A launch reads and writes the places in its slices."""

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
    """A stand-in for dist.P2POp."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any
    tag: int


class StreamWork:
    """Work of NCCL: the current stream waits for it."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._clock = device, dict(stream.clock)

    def wait(self) -> None:
        self._device.current.join(self._clock)


class HostWork:
    """Work of gloo: the host waits for it."""

    def __init__(self, device: Device, message: Actor) -> None:
        self._device, self._message = device, message

    def wait(self) -> None:
        self._device.host.join(self._message.clock)


class Group:
    """A process group with messages that read and write on `device`, but move nothing."""

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
    """Runs two syncs of one rank between an update of its weights and a use of the result. Returns the rounds of one
    sync."""
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

    def allocate(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        made = wires.allocate(*arguments, **named)
        for buffer in {id(buffer): buffer for buffer in made}.values():
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
    """Returns a patch that leaves out a wait, of all streams or of one."""
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
