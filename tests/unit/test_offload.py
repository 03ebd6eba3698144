"""Copies between device and host: pinned memory, activations, waiting copies, and the order of their streams."""

import gc
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rltrain.checkpoint.run_files import Contents, read_contents
from rltrain.checkpoint.run_writer import FilesWriter, Target, Written
from rltrain.offload import activations, host_memory
from rltrain.offload.activations import ActivationOffload, _unpack
from rltrain.offload.device_memory import CudaMemory, DeviceMemory
from rltrain.offload.host_memory import ALIGNMENT_BYTES, HostTensors, equals_on_node
from rltrain.offload.memory_parts import (
    LateCopies,
    LateTensors,
    MemoryPart,
    OverlayPart,
    PausedRegion,
    RemotePart,
    ResizedStorages,
    SizedStorages,
)
from rltrain.offload.offload import Offloader
from rltrain.roles.reference import ReferenceRole
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from rltrain.schedule.order import Order
from tests.support.cuda_streams import Device, Operators, RaceError, Stream
from tests.support.shared_store import on_ranks, open_store
from tests.unit.test_memory_plan import NEEDS, PARTS, Entry, order_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIKE = {
    "norm.weight": torch.empty(5, dtype=torch.bfloat16),
    "bias": torch.empty(3, dtype=torch.float32),
    "empty": torch.empty(0, 4),
    "mlp.weight": torch.empty(7, 33, dtype=torch.bfloat16),
}
BYTES = sum(tensor.nbytes for tensor in LIKE.values())


class Cudart:
    """A record of the memory pinned by the CUDA runtime. Like the runtime, it refuses already pinned memory."""

    def __init__(self, status: int = 0) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.status = status

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 1 and num_bytes > 0
        assert not any(first < pointer + num_bytes and pointer < first + size for first, size in self.pinned)
        self.pinned.append((pointer, num_bytes))
        return self.status


def fill(tensors: dict[str, Tensor], value: float) -> None:
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(value + number)


def test_tensors_lie_end_to_end_and_are_pinned_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    host = HostTensors(LIKE, CUDA)
    assert {name: (t.shape, t.dtype) for name, t in host.tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in LIKE.items()
    }
    fill(host.tensors, 3)
    assert [float(t.float().mean()) for t in host.tensors.values() if t.numel()] == [3, 4, 6], "none overlaps another"
    [(first, num_bytes)] = cudart.pinned
    assert BYTES <= num_bytes < BYTES + ALIGNMENT_BYTES * len(LIKE), "no rounding to a power of two"
    for tensor in host.tensors.values():
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0 or not tensor.numel()
        assert first <= tensor.data_ptr() <= first + num_bytes - tensor.nbytes or not tensor.numel()


def test_nothing_is_pinned_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is no CUDA"))
    assert HostTensors(LIKE, CPU).is_own


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(status=2))
    with pytest.raises(RuntimeError, match=r"could not pin \d+ bytes .* returned 2\)"):
        HostTensors(LIKE, CUDA)


def test_another_process_has_the_same_memory() -> None:
    """The other process is this one here. tests/unit/test_messages.py has real ones."""
    own = HostTensors(LIKE, CPU)
    fill(own.tensors, 1)
    other = HostTensors.of_another(own.place, LIKE, CPU)
    assert not other.is_own
    assert all(torch.equal(other.tensors[name], own.tensors[name]) for name in LIKE)
    own.tensors["bias"][1] = 9
    assert other.tensors["bias"].tolist() == [2, 9, 2]
    with pytest.raises(ValueError, match="shared memory has"):
        HostTensors.of_another(own.place, {"bias": LIKE["bias"]}, CPU)
    with pytest.raises(OSError, match="that process is on elsewhere"):
        HostTensors.of_another(("elsewhere", *own.place[1:]), LIKE, CPU)


def test_ranks_with_an_equal_share_on_the_node() -> None:
    ranks, parts = (1, 2, 3, 4, 5, 6, 7), (0, 1, 0, 1, 0, 1, 0)
    equals = {rank: equals_on_node(ranks, parts, rank, ranks_per_node=4) for rank in ranks}
    assert equals == {1: (1, 3), 2: (2,), 3: (1, 3), 4: (4, 6), 5: (5, 7), 6: (4, 6), 7: (5, 7)}


def weights_over(rank: int, store: dist.Store, log: list[int]) -> dict[str, Any]:
    """Returns host bytes and sums of the weights of a rank. Two nodes have two ranks each, all with equal weights."""
    world = World(rank, 4, rank % 2, 2, CPU, store, timeout_s=10)

    def load(layout: Any, tensors: dict[str, Tensor]) -> None:
        log.append(rank)
        fill(tensors, 2)

    made = ReferenceRole.__new__(ReferenceRole)
    made.job = SimpleNamespace(
        world=world, job_store=JobStore(world), model_site=lambda role: SimpleNamespace(load_weights=load), resumed=None
    )
    actor = SimpleNamespace(
        parameters={name: torch.zeros_like(tensor) for name, tensor in LIKE.items()},
        layout=SimpleNamespace(ranks=(0, 1, 2, 3), parts=(0, 0, 0, 0)),
        parts={"weights": None},
    )
    overlay = made._weights_over(actor, made._host_weights(actor))
    return {"bytes": overlay.host_bytes, "values": [float(host.float().sum()) for _, host in overlay._pairs]}


@pytest.mark.parametrize("reachable", [True, False])
def test_a_node_reads_and_keeps_equal_weights_once(reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reachable:
        machines = iter(f"machine {number}" for number in range(99))
        monkeypatch.setattr(host_memory, "this_machine", lambda: next(machines))
    read: list[int] = []
    with open_store() as store:
        ranks = on_ranks(store, lambda rank, own: weights_over(rank, own, read), 4)
    assert sorted(read) == ([0, 2] if reachable else [0, 1, 2, 3])
    assert len({tuple(rank["values"]) for rank in ranks}) == 1
    assert [rank["bytes"] for rank in ranks] == [BYTES, 0 if reachable else BYTES] * 2


class Server:
    """A record of the parts on a server and of the requests to it."""

    def __init__(self) -> None:
        self.holds = {"weights", "kv_cache"}
        self.asked: list[str] = []

    def part(self, name: str, *, restores: bool) -> RemotePart:
        return RemotePart(
            release=lambda: self._release(name),
            resume=lambda: self._resume(name),
            num_bytes=lambda: 100,
            restore=(lambda: self.asked.append(f"restore {name}")) if restores else None,
        )

    def _release(self, name: str) -> None:
        self.holds.remove(name)
        self.asked.append(f"release {name}")

    def _resume(self, name: str) -> None:
        assert name not in self.holds
        self.holds.add(name)
        self.asked.append(f"resume {name}")


def residency_of(server: Server, names: tuple[str, ...]) -> Offloader:
    order = order_of(2, names)
    residency = Offloader(Order.of(order), {"actor": "auto", "rollout": "auto"}, DeviceMemory(torch.device("cpu")))
    parts = ("weights", "master_weights", "optimizer", "gradients")
    tensor = torch.ones(3)
    residency.admit("actor", {name: MemoryPart(lambda: [tensor]) for name in parts})
    parts = {name: server.part(name, restores=name == "weights") for name in server.holds.copy()}
    residency.admit("rollout", {"base": MemoryPart(tuple), **parts})
    return residency


def test_weights_come_back_for_the_sync_and_the_cache_for_generate():
    server = Server()
    residency = residency_of(server, ("weight_sync", "generate", "score", "update"))
    assert server.holds == set(), "it shares the device, so it leaves at once"
    residency.enter(0)
    assert server.holds == {"weights"}, "a sync needs no keys and values"
    residency.enter(1)
    assert server.holds == {"weights", "kv_cache"}
    residency.enter(2)
    assert server.holds == {"weights", "kv_cache"}, "scoring needs nothing of the device"
    residency.enter(3)
    assert server.holds == set()
    assert "restore weights" not in server.asked, "the next sync rewrites them"


def test_weights_that_no_sync_renews_are_restored():
    server = Server()
    residency = residency_of(server, ("weight_sync", "generate", "actor_logprobs", "generate", "update"))
    for position in range(4):
        residency.enter(position)
    assert server.asked.count("restore weights") == 1
    assert server.asked.index("restore weights") > server.asked.index("resume weights")


def test_a_part_of_which_nothing_is_kept_can_only_be_dropped():
    part = Server().part("kv_cache", restores=False)
    with pytest.raises(RuntimeError, match="only be dropped"):
        part.save()
    part.leave(drop=True)
    assert part.device_bytes == part.allocated_bytes == 0


SIZE = 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(torch.nn.functional.silu(x)))


class Block(torch.nn.Module):
    def __init__(self, num_layers: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


def block(num_layers: int, *, recompute: bool = False, offload: bool = False) -> Block:
    torch.manual_seed(0)
    made = Block(num_layers, recompute=recompute)
    if offload:
        ActivationOffload(CPU, made.parameters, num_layers, least_bytes=0).attach(made, made.layers)
    return made


def gradients(model: Block, num_batches: int) -> list[Tensor]:
    """Computes all forwards before all backwards, like the first stage of a pipeline."""
    torch.manual_seed(1)
    batches = [torch.randn(3, SIZE, requires_grad=True) for _ in range(num_batches)]
    losses = [model(batch).square().sum() for batch in batches]
    for loss in losses:
        loss.backward()
    return [p.grad for p in (*model.parameters(), *batches)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_gradients_are_the_same_bit_for_bit(num_layers: int, num_batches: int, recompute: bool) -> None:
    found, expected = (
        gradients(block(num_layers, recompute=recompute, offload=offload), num_batches) for offload in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("learns", [True, False])
def test_nothing_that_is_kept_outlives_a_pass(learns: bool) -> None:
    model, counts = block(4, offload=True), []
    for _ in range(2):
        with torch.set_grad_enabled(learns):
            loss = model(torch.randn(3, SIZE, requires_grad=True)).sum()
        if learns:
            loss.backward()
        del loss
        counts.append(num_tensors())
    assert counts[0] == counts[1]


def test_a_second_backward_is_given_the_tensors_again() -> None:
    model, plain = block(3, offload=True), block(3)
    for one in (model, plain):
        x = torch.ones(2, SIZE, requires_grad=True)
        loss = one(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


class Pass:
    """Forward and backward of layers with kept tensors. The device records the order of operations. Freed memory is
    overwritten at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.device.install(monkeypatch)
        monkeypatch.setattr(CudaMemory, "pins", False)
        monkeypatch.setattr(activations, "memory_like", self.memory_like)
        self.operators = Operators(self.device)
        self.reused: list[Tensor] = []

    def memory_like(self, tensor: Tensor, device: torch.device) -> Tensor:
        made = torch.empty(tensor.shape)
        self.operators.holds([made])
        self.device.allocated(made.untyped_storage()._cdata, made.nbytes)
        return made

    def run(self, counts: list[int]) -> None:
        offload = ActivationOffload(CUDA, list, len(counts), least_bytes=0)
        offload._layers = []
        packed: list[list[Any]] = []
        with self.operators:
            for layer, count in enumerate(counts):
                offload._begin_layer()
                gone = layer - activations.AHEAD
                for _, tensor, _ in packed[gone] if gone >= 0 else ():
                    tensor.zero_()
                made = [torch.empty(8) for _ in range(count)]
                self.operators.holds(made)
                packed.append([(offload._pack(tensor.fill_(layer)), tensor, layer) for tensor in made])
            for tensors in offload._layers:
                tensors.leave()
            offload._layers = None
            for _, tensor, _ in (one for of_layer in packed[:-1] for one in of_layer):
                tensor.zero_()
            for of_layer in reversed(packed):
                for kept, _, value in of_layer:
                    given = _unpack(kept)
                    assert torch.equal(given.mul(1), torch.full((8,), float(value)))
                    if value < len(counts) - 1:
                        given.zero_()  # its memory is reused


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_copies_are_ordered_with_the_computation(counts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Pass(monkeypatch).run(counts)


@pytest.mark.parametrize("what", ["copies", "mark"])
def test_a_missing_wait_is_a_race(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    unordered = {"copies": lambda self: torch.cuda.stream(self._stream), "mark": lambda self: lambda: None}
    monkeypatch.setattr(CudaMemory, what, unordered[what])
    with pytest.raises(RaceError):
        Pass(monkeypatch).run([2, 1, 2, 1, 2])


ROLES = ("actor", "critic", "reference", "rollout")
TASKS = sorted(NEEDS)


class Saver:
    """A stand-in for torch_memory_saver that releases its pages at once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.regions: dict[str, PausedRegion] = {}

    def pause(self, tag: str) -> None:
        for storage in self.regions[tag]._inside.values():
            self.device.freed(storage._cdata, f"memory of {tag}", at_once=True)

    def resume(self, tag: str) -> None:
        for storage in self.regions[tag]._inside.values():
            self.device.allocated(storage._cdata, storage.nbytes())

    @contextmanager
    def region(self, tag: str) -> Any:
        yield


def tell_of_storages(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports every emptied or refilled storage to the device."""

    def free(self: ResizedStorages, storages: SizedStorages) -> None:
        for storage, size in storages:
            device.freed(storage._cdata, f"a storage of {size} bytes")
            storage.resize_(0)

    def allocate(self: ResizedStorages, storages: SizedStorages) -> None:
        for storage, size in storages:
            storage.resize_(size)
            device.allocated(storage._cdata, size)

    monkeypatch.setattr(ResizedStorages, "free", free)
    monkeypatch.setattr(ResizedStorages, "allocate", allocate)


def take_turns(names: list[str], stops: int | None, *, saver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes the named tasks. Each reads and writes its declared parts on the default stream. After position `stops`,
    only the final task runs."""
    device = Device()
    device.install(monkeypatch)
    tell_of_storages(device, monkeypatch)
    order = [Entry(name, step) for step, name in enumerate(names)]
    order.append(Entry("save_hf", len(order), final=True))
    pages = Saver(device)
    residency = Offloader(
        Order.of(order),
        dict.fromkeys(ROLES, "auto"),
        CudaMemory(CUDA),
        guests=("reference",),
        memory_saver=pages if saver else None,
    )
    with Operators(device) as operators:
        tensors = {
            (role, part): [torch.ones(40), torch.ones(3, 5)]
            for role in ROLES
            for part in PARTS[role]
            if role != "reference"
        }
        for kept in tensors.values():
            operators.holds(kept)
        parts = {key: MemoryPart(lambda kept=kept: kept) for key, kept in tensors.items()}
        beneath = "actor", "weights"
        on_host = [torch.zeros_like(tensor) for tensor in tensors[beneath]]
        parts["reference", "weights"] = OverlayPart(parts[beneath], tensors[beneath], on_host)
        tensors["reference", "weights"] = tensors[beneath]
        for role in ROLES:
            residency.admit(role, {part: parts[role, part] for part in PARTS[role]})
            if saver:
                pages.regions |= {f"{role}.{part}": parts[role, part].memory for part in PARTS[role]}
        for position, entry in enumerate(order):
            if stops is not None and position > stops and not entry.final:
                continue
            residency.enter(position)
            needs = NEEDS[entry.name]
            for key in sorted(needs.parts):
                for tensor in tensors[key]:
                    tensor.sum() if key in needs.reads else tensor.add_(1)
            for key in sorted(needs.keeps):
                parts[key].read(tensors[key][0])


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(TASKS), min_size=1, max_size=8).filter(lambda names: names[0] != "checkpoint"),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_nothing_races_in_any_order_of_tasks(names: list[str], stops: int | None, saver: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        take_turns(names, stops, saver=saver, monkeypatch=monkeypatch)


STEPS = ["weight_sync", "generate", "reference_logprobs", "update"] * 2
LEFT_OUT = {
    "copying what a task still writes": mock.patch.object(Stream, "wait_stream", lambda *_: None),
    "freeing what is still copied": mock.patch.object(CudaMemory, "finish_copies", lambda _: None),
    "copying on a stream that is not awaited": mock.patch.object(Stream, "synchronize", lambda _: None),
}


@pytest.mark.parametrize("saver", [False, True])
@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(fault: str, saver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with LEFT_OUT[fault], pytest.raises(RaceError, match="nothing orders|is freed while"):
        take_turns(STEPS, None, saver=saver, monkeypatch=monkeypatch)


class SlowPart(MemoryPart):
    """A part that is read only after a signal."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(lambda: tensors)
        self.reading, self.let = threading.Event(), threading.Event()

    def read(self, tensor: Tensor, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        self.reading.set()
        assert self.let.wait(60)
        return super().read(tensor, first, count, into=into)


@pytest.fixture
def late() -> LateCopies:
    return LateCopies(torch.device("cpu"))


def state_of(late: LateCopies, part: MemoryPart, values: list[Tensor]) -> LateTensors:
    late.begin()
    return LateTensors({str(i): late.add(part, one, 0, one.numel(), None) for i, one in enumerate(values)}, late)


def test_what_is_taken_is_copied_and_stays_what_it_was(late: LateCopies) -> None:
    values = [torch.full((4,), 1.0), torch.full((3,), 2.0)]
    saved = state_of(late, MemoryPart(lambda: values), values)
    assert list(saved) == ["0", "1"] and len(saved) == 2
    late.settle()
    for one in values:
        one.zero_()
    assert saved["0"].tolist() == [1.0] * 4 and saved["1"].tolist() == [2.0] * 3


def test_who_would_change_the_state_waits_for_the_writer(late: LateCopies, tmp_path: Path) -> None:
    values = [torch.full((4,), 1.0), torch.full((3,), 2.0)]
    part, reports, writer = SlowPart(values), list[Written](), FilesWriter(asynchronous=True)
    writer.start({"actor/file": Contents(state_of(late, part, values), {})}, Target(tmp_path, reports.append))
    assert part.reading.wait(60)
    timer = threading.Timer(0.05, part.let.set)
    timer.start()
    late.settle()
    assert part.let.is_set(), "settle returned before the current copy was done"
    for one in values:
        one.zero_()
    writer.join()
    timer.join()
    assert reports[0].problem is None
    assert read_contents(tmp_path / "actor/file").tensors["0"].tolist() == [1.0] * 4
    assert late.take_waited_s() > 0 and late.take_waited_s() == 0.0


@pytest.mark.parametrize("move", [MemoryPart.save, lambda part: part.leave(drop=True)], ids=["to the host", "dropped"])
def test_copies_are_made_before_a_part_moves(late: LateCopies, move: Callable[[MemoryPart], None]) -> None:
    values = [torch.full((4,), 1.0)]
    part = MemoryPart(lambda: values)
    part.settle = late.settle
    saved = state_of(late, part, values)
    move(part)
    assert saved["0"].tolist() == [1.0] * 4


def test_what_was_dropped_is_refused_at_once(late: LateCopies) -> None:
    values = [torch.ones(2)]
    part = MemoryPart(lambda: values)
    part.leave(drop=True)
    with pytest.raises(RuntimeError, match="a dropped part cannot be read"):
        late.add(part, values[0], 0, 2, None)


def test_a_failed_copy_fails_the_file(late: LateCopies, tmp_path: Path) -> None:
    values = [torch.ones(2)]
    late.begin()
    tensors = LateTensors({"a": late.add(MemoryPart(lambda: values), values[0], 0, 2, torch.empty(3))}, late)
    reports: list[Written] = []
    FilesWriter(asynchronous=False).start({"actor/file": Contents(tensors, {})}, Target(tmp_path, reports.append))
    assert reports[0].problem is not None and "size of tensor" in reports[0].problem


def test_copies_from_a_device_wait_for_the_update_before_and_for_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.install(monkeypatch)
    state, activations = torch.zeros(8), torch.zeros(8)
    late, operators = LateCopies(torch.device("cuda")), Operators(device)
    operators.holds([state, activations])
    with operators:
        state.add_(1)
        issued = device.default.clock[device.default.name]
        saved = state_of(late, MemoryPart(lambda: [state]), [state])
        activations.add_(1)
        late.settle()
        assert device.streams[-1].clock[device.default.name] == issued
        state.add_(1)
    assert saved["0"].tolist() == [1.0] * 8
