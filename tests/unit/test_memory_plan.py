"""Parts of memory leave the device and come back by the plan."""

import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.offload.device_memory import DeviceMemory, device_memory
from rltrain.offload.host_memory import HostRegion
from rltrain.offload.memory_parts import MemoryPart, OverlayPart, PartOnHost, memory_saver
from rltrain.offload.offload import Offloader
from rltrain.schedule.memory_plan import MemoryPlan, leaving_roles
from rltrain.schedule.order import Order
from rltrain.tasks.roles import DECLARED, needs_of

CPU = torch.device("cpu")
TASKS = sorted([*(task.name for role in DECLARED.values() for task in role.tasks), "weight_sync", "checkpoint"])
ROLES = ("actor", "critic", "reference", "rollout")
NEEDS = {name: needs for name in TASKS if (needs := needs_of(name).of(ROLES)).parts or needs.keeps}
"""The needs of all tasks with any need of memory."""


@dataclass(frozen=True)
class Entry:
    name: str
    step: int = 0
    final: bool = False
    kind: str = "task"

    @property
    def roles(self):
        parts = NEEDS[self.name].parts | NEEDS[self.name].keeps if self.name in NEEDS else {("reward", "")}
        return tuple(sorted({role for role, _ in parts}))


STEP = ("weight_sync", "generate", "score", "reference_logprobs", "actor_logprobs", "advantages", "update")
PARTS = {
    "actor": ("weights", "master_weights", "optimizer", "gradients"),
    "critic": ("weights", "master_weights", "optimizer", "gradients"),
    "reference": ("weights",),
    "rollout": ("weights", "kv_cache", "base"),
}


def order_of(num_steps, names=STEP, final="save_hf"):
    entries = [Entry(name, step) for step in range(num_steps) for name in names]
    return [*entries, Entry(final, num_steps, final=True)]


class RoomyMemory(DeviceMemory):
    """A memory with room to fetch ahead. It records the order of finished moves."""

    def __init__(self, spare):
        super().__init__(CPU)
        self.spare = spare

    def spare_bytes(self, task):
        return self.spare


def tensors_of(role):
    """Returns two storages per part, the second with a view. The values are always the same."""
    torch.manual_seed(len(role))
    return {part: [torch.randn(7), (matrix := torch.randn(3, 5)), matrix.view(5, 3)[2:]] for part in PARTS[role]}


class Tensors(dict):
    """Tensors by (role, part) with a safe repr. Printing a tensor with an empty storage ends the process."""

    def __repr__(self):
        return f"<tensors of {sorted(self)}>"


def make(roles, order, *, offload="auto", spare=0):
    """Returns the offloader, its tensors by (role, part), and a list of its later moves."""
    tensors, moves = Tensors(), []

    def span(name, category):
        moves.append((category, name))
        return DeviceMemory(CPU).copies()

    residency = Offloader(Order.of(order), dict.fromkeys(roles, offload), RoomyMemory(spare), span=span)
    for role in roles:
        mine = tensors_of(role)
        tensors.update({(role, part): mine[part] for part in mine})
        residency.admit(role, {part: MemoryPart(lambda kept=kept: kept) for part, kept in mine.items()})
    return residency, tensors, moves


def on_device(tensors):
    """Returns the parts with filled storages. Asserts that no part is only half there."""
    sizes = {key: [tensor.untyped_storage().nbytes() for tensor in kept] for key, kept in tensors.items()}
    assert all(all(size) or not any(size) for size in sizes.values())
    return {key for key, size in sizes.items() if all(size)}


def test_a_task_has_what_it_needs_and_nothing_else_is_there():
    order = order_of(2)
    residency, tensors, _ = make(("actor", "reference", "rollout"), order)
    assert on_device(tensors) == set(), "a role leaves once it is built, to make room for the next"
    for position, entry in enumerate(order):
        before = on_device(tensors)
        residency.enter(position)
        assert on_device(tensors) == (NEEDS[entry.name].parts if entry.name in NEEDS else before)


def test_nothing_moves_for_a_task_that_needs_nothing():
    residency, _, moves = make(("actor", "rollout"), order_of(1, ("generate", "score")))
    residency.enter(0)
    moves.clear()
    residency.enter(1)
    assert moves == []


def test_a_role_alone_on_its_rank_stays():
    residency, tensors, moves = make(("actor",), order_of(2))
    for position in range(len(order_of(2))):
        residency.enter(position)
    assert moves == [] and on_device(tensors) == set(tensors)


@pytest.mark.parametrize(("offload", "leaves"), [(True, True), (False, False)])
def test_the_config_decides_over_the_placement(offload, leaves):
    order = order_of(1)
    roles = ("actor",) if leaves else ("actor", "rollout")
    residency, tensors, _ = make(roles, order, offload=offload)
    residency.enter(STEP.index("actor_logprobs"))
    stays = {("actor", "weights")} if leaves else set(tensors)
    assert on_device(tensors) == stays


def test_a_role_that_stays_beside_one_that_leaves():
    order = order_of(1)
    kept = tensors_of("rollout")["weights"]
    residency = Offloader(Order.of(order), {"actor": False, "rollout": True}, DeviceMemory(CPU))
    residency.admit("actor", {})
    residency.admit("rollout", {"weights": MemoryPart(lambda: kept)})
    assert residency.leaving == {"rollout"} and residency.parts["rollout", "weights"].place != "device"


def test_contents_come_back_bit_for_bit_after_five_steps_and_views_stay_valid():
    order = order_of(5)
    residency, tensors, _ = make(("actor", "rollout"), order)
    expected = tensors_of("actor")
    for position, entry in enumerate(order):
        residency.enter(position)
        if entry.name == "update":
            for part in ("weights", "master_weights", "optimizer"):
                for tensor, value in zip(tensors["actor", part], expected[part], strict=True):
                    assert torch.equal(tensor, value)
                for values in (tensors["actor", part], expected[part]):
                    for tensor in values[:2]:
                        tensor.add_(1)


def test_what_a_task_rewrites_is_dropped_and_comes_back_as_zeros():
    order = order_of(2)
    residency, tensors, _ = make(("actor", "rollout"), order)
    for position, entry in enumerate(order):
        residency.enter(position)
        for key in {"weight_sync": [("rollout", "weights")], "update": [("actor", "gradients")]}.get(entry.name, ()):
            assert all(not tensor.any() for tensor in tensors[key])
            tensors[key][0].fill_(float("nan"))
    for role, part in [("rollout", "weights"), ("rollout", "kv_cache"), ("actor", "gradients")]:
        assert residency.parts[role, part].host_bytes == 0


def test_rollout_weights_are_copied_where_a_generate_without_a_sync_comes_next():
    order = [Entry("weight_sync"), Entry("generate"), Entry("update"), Entry("generate", 1), Entry("weight_sync", 2)]
    residency, tensors, _ = make(("actor", "rollout"), order)
    weights = tensors["rollout", "weights"][0]
    residency.enter(0)
    weights.fill_(3)
    for position in (1, 2):
        residency.enter(position)
    assert residency.parts["rollout", "weights"].place == "host"
    residency.enter(3)
    assert torch.equal(weights, torch.full((7,), 3.0))


def test_gradients_between_two_uses_in_one_step_are_kept():
    order = [Entry("accumulate"), Entry("generate"), Entry("update"), Entry("generate", 1), Entry("accumulate", 1)]
    residency, tensors, _ = make(("actor", "rollout"), order)
    gradient = tensors["actor", "gradients"][0]
    residency.enter(0)
    gradient.fill_(5)
    residency.enter(1)
    residency.enter(2)
    assert torch.equal(gradient, torch.full((7,), 5.0))
    residency.enter(3)
    residency.enter(4)
    assert not gradient.any()


def test_what_the_host_has_is_not_copied_again():
    tensor = torch.ones(4)
    part = MemoryPart(lambda: [tensor])
    part.save()
    host = part._region.slabs[0]
    host.zero_()
    part.save()
    assert not host.any()
    part.changed()
    part.save()
    assert torch.equal(host[:16].view(torch.float32), tensor)


def test_only_what_changed_is_copied_again(monkeypatch):
    saved = []
    save = MemoryPart.save
    monkeypatch.setattr(MemoryPart, "save", lambda part: (saved.append(part.host_is_current), save(part)))
    order = order_of(3)
    residency, _, _ = make(("actor", "reference", "rollout"), order)
    changes = defaultdict(list)
    for position, entry in enumerate(order):
        saved.clear()
        residency.enter(position)
        changes[entry.name].append(saved.count(False))
    assert changes["weight_sync"] == [0, 2, 2], "after an update: master weights and optimizer states"
    assert changes["generate"] == [0, 1, 1], "weights too, since the sync needed them"
    assert changes["actor_logprobs"] == [0, 0, 0], "the reference never changes"


def test_pinned_memory_is_taken_once():
    order = order_of(5)
    residency, _, _ = make(("actor", "rollout"), order)
    addresses = []
    for position, entry in enumerate(order):
        residency.enter(position)
        if entry.name == "generate":
            part = residency.parts["actor", "optimizer"]
            addresses.append([slab.data_ptr() for slab in part._region.slabs])
    assert len(addresses[0]) == 1 and addresses == [addresses[0]] * 5


def test_a_part_that_grows_after_the_first_use_is_kept_whole():
    states = []
    part = MemoryPart(lambda: states)
    leave(part)
    come_back(part)
    states += [torch.arange(5.0), torch.arange(9.0)]
    part.changed()
    leave(part)
    assert [state.untyped_storage().nbytes() for state in states] == [0, 0]
    come_back(part)
    assert torch.equal(states[0], torch.arange(5.0)) and torch.equal(states[1], torch.arange(9.0))


def test_tensors_that_share_a_storage_are_moved_once():
    flat = torch.arange(12.0)
    part = MemoryPart(lambda: [flat[:4], flat[4:].view(2, 4), flat])
    assert part.size_bytes == flat.nbytes
    leave(part)
    assert part.allocated_bytes == 0 and part.size_bytes == flat.nbytes
    come_back(part)
    assert torch.equal(flat, torch.arange(12.0)) and part.host_bytes == 64


def test_a_dropped_part_that_a_task_reads_is_refused():
    part = MemoryPart(lambda: [torch.ones(2)])
    with pytest.raises(RuntimeError, match="cannot leave"):
        part.leave()
    part.leave(drop=True)
    part.allocate()
    with pytest.raises(RuntimeError, match="a dropped part is needed by a task that does not overwrite it"):
        part.fill()


def test_what_only_its_owner_can_free_is_forgotten_when_dropped():
    cache = [torch.ones(8)]
    part = MemoryPart(lambda: cache, forget=cache.clear)
    assert part.device_bytes == 32
    part.leave(drop=True)
    part.allocate()
    part.fill(rewritten=True)
    assert cache == [] and part.device_bytes == 0


def test_an_overlay_takes_the_place_of_a_part_and_leaves_it_as_it_was():
    flat = torch.arange(10.0)
    tensors = [flat[:4].view(2, 2), flat[5:]]
    order = order_of(2, ("actor_logprobs", "reference_logprobs", "update"))
    residency = Offloader(
        Order.of(order), {"actor": "auto", "reference": "auto"}, DeviceMemory(CPU), guests=["reference"]
    )
    weights = MemoryPart(lambda: tensors)
    residency.admit("actor", {"weights": weights, **{part: MemoryPart(list) for part in PARTS["actor"][1:]}})
    residency.admit("reference", {"weights": OverlayPart(weights, tensors, [-torch.ones(2, 2), -torch.ones(5)])})
    for position, entry in enumerate(order):
        residency.enter(position)
        if entry.name == "reference_logprobs":
            assert flat.tolist() == [-1.0] * 4 + [0.0] + [-1.0] * 5
        else:
            step = entry.step
            assert torch.equal(flat, torch.arange(10.0) + step)
            if entry.name == "update":
                flat.add_(1)


def test_an_overlay_is_never_written_to():
    flat = torch.zeros(4)
    overlay = OverlayPart(MemoryPart(lambda: [flat]), [flat], [torch.ones(4)])
    with pytest.raises(RuntimeError, match="constant"):
        overlay.changed()
    with pytest.raises(RuntimeError, match="needs the storages of another part"):
        overlay.allocate()


def test_the_next_tasks_parts_are_fetched_while_there_is_room():
    order = order_of(1, ("generate", "score", "reference_logprobs", "actor_logprobs"))
    for spare, early in ((0, set()), (88, {("reference", "weights")})):
        residency, tensors, _ = make(("actor", "reference", "rollout"), order, spare=spare)
        residency.enter(0)
        assert on_device(tensors) - NEEDS["generate"].parts == early
        residency.enter(1)
        residency.enter(2)
        assert ("reference", "weights") in on_device(tensors)


def test_fetching_ahead_changes_no_content():
    order = order_of(3)
    results = []
    for spare in (0, 2**40):
        residency, tensors, _ = make(("actor", "reference", "rollout"), order, spare=spare)
        seen = []
        for position, entry in enumerate(order):
            residency.enter(position)
            for key in sorted(NEEDS[entry.name].parts if entry.name in NEEDS else ()):
                seen.append([tensor.tolist() for tensor in tensors[key]])
            for key in sorted(NEEDS[entry.name].writes if entry.name in NEEDS else ()):
                tensors[key][0].add_(position)
        results.append(seen)
    assert results[0] == results[1]


def test_nothing_is_fetched_over_what_is_in_use():
    flat = torch.arange(4.0)
    order = order_of(1, ("actor_logprobs", "reference_logprobs"))
    residency = Offloader(
        Order.of(order), {"actor": "auto", "reference": "auto"}, RoomyMemory(2**40), guests=["reference"]
    )
    weights = MemoryPart(lambda: [flat])
    residency.admit("actor", {"weights": weights})
    residency.admit("reference", {"weights": OverlayPart(weights, [flat], [torch.ones(4)])})
    residency.enter(0)
    assert torch.equal(flat, torch.arange(4.0))


@given(st.lists(st.tuples(st.sampled_from(TASKS), st.integers(0, 2)), max_size=12), st.data())
def test_a_part_is_dropped_only_if_whoever_uses_it_next_rewrites_it(tasks, data):
    """The next user is the next in the order or, after an early end, the next to be executed. A task is also a user if
    it reads a part in place."""
    users_of = {name: needs.parts | needs.keeps for name in TASKS if (needs := needs_of(name).of(ROLES))}
    order = [Entry(name, step, final=data.draw(st.booleans())) for name, step in sorted(tasks, key=lambda t: t[1])]
    plan = MemoryPlan(Order.of(order), PARTS)
    keys = {key for needs in NEEDS.values() for key in needs.parts}
    for position in range(len(order)):
        for key in keys:
            rest = [(i, e) for i, e in enumerate(order) if i > position and key in users_of[e.name]]
            readers = []
            for users in (rest, [(i, e) for i, e in rest if e.final]):
                if users:
                    i, user = users[0]
                    before = [e for e in order[:i] if key in users_of[e.name]]
                    fresh = key[1] == "gradients" and (not before or before[-1].step != user.step)
                    readers.append(key not in needs_of(user.name).rewrites and not fresh)
            assert plan.may_drop(key, position) == (not any(readers))


def test_a_task_whose_needs_nobody_wrote_down_is_refused():
    with pytest.raises(ValueError, match="task dream"):
        MemoryPlan(Order.of([Entry("dream")]), ["reward"])


@pytest.mark.parametrize("offload", [True, False, "auto"])
@pytest.mark.parametrize("with_guest", [False, True])
def test_what_is_where_can_be_told_without_a_device(offload, with_guest):
    order = order_of(3)
    residency, tensors, _ = make(("actor", "rollout"), order, offload=offload)
    guests = {("reference", "weights"): ("actor", "weights")} if with_guest else {}
    roles = dict.fromkeys(("actor", "rollout", *(role for role, _ in guests)), offload)
    residency.plan, residency.leaving = (
        MemoryPlan(Order.of(order), roles),
        leaving_roles(roles, {role for role, _ in guests}),
    )
    for (role, part), beneath in guests.items():
        host = tensors_of(beneath[0])[beneath[1]]
        residency.admit(role, {part: OverlayPart(residency.parts[beneath], tensors[beneath], host)})
    told = dict(residency.plan.places(residency.leaving, guests))
    assert list(told) == [i for i in range(len(order)) if residency.plan.needs(i).parts]
    used = residency.parts.keys() & told[0].keys()
    for position in range(len(order)):
        residency.enter(position)
        if position in told:
            assert told[position] == {key: residency.parts[key].place for key in used}


def test_peak_and_residue_per_role_are_reported_once():
    order = order_of(1)
    residency, _, _ = make(("actor", "rollout"), order)
    residency.metrics()
    for position in range(len(STEP)):
        residency.enter(position)
    metrics = residency.metrics()
    part_bytes = 4 * (7 + 15)
    assert metrics["memory/actor_resident_bytes"] == 4 * part_bytes
    assert metrics["memory/rollout_resident_bytes"] == 3 * part_bytes
    assert metrics["memory/actor_residue_bytes"] == metrics["memory/rollout_residue_bytes"] == 0
    assert metrics["memory/host_bytes"] == 4 * (64 + 64), "weights, master weights and optimizer of the actor, the base"
    assert metrics["memory/offload_s"] > 0 and metrics["memory/onload_s"] > 0
    again = residency.metrics()
    assert again["memory/offload_s"] == 0 and "memory/actor_residue_bytes" not in again


class FakeSaver:
    """A record of the calls of torch_memory_saver."""

    def __init__(self):
        self.calls = []

    def pause(self, tag):
        self.calls.append(("pause", tag))

    def resume(self, tag):
        self.calls.append(("resume", tag))

    @contextmanager
    def region(self, tag):
        self.calls.append(("region", tag))
        yield


def test_torch_memory_saver_pauses_what_was_allocated_in_a_region_of_the_part():
    """The first departure frees storages outside the region. Later ones keep the addresses."""
    saver, order = FakeSaver(), [Entry(name, step) for step in range(4) for name in ("generate", "reference_logprobs")]
    weights = [torch.arange(6.0)]
    residency = Offloader(Order.of(order), {"reference": True, "rollout": True}, DeviceMemory(CPU), memory_saver=saver)
    residency.admit("reference", {"weights": MemoryPart(lambda: weights)})
    residency.admit("rollout", {part: MemoryPart(list) for part in PARTS["rollout"]})
    assert weights[0].untyped_storage().nbytes() == 0
    addresses = []
    for position, entry in enumerate(order):
        residency.enter(position)
        away = entry.name == "generate"
        assert residency.parts["reference", "weights"].allocated_bytes == (0 if away else 24)
        if not away:
            addresses.append(weights[0].data_ptr())
            assert torch.equal(weights[0], torch.arange(6.0))
    calls = [call for call, tag in saver.calls if tag == "reference.weights"]
    assert calls == ["region", *["pause", "resume", "region"] * 3]
    assert len(set(addresses)) == 1


def test_torch_memory_saver_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    with pytest.raises(ConfigError, match=r"residency.allocator is torch_memory_saver, which is not installed"):
        memory_saver()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.data())
def test_a_host_region_grows_and_keeps_its_bytes_in_order(sizes, data):
    region = HostRegion(CPU)
    whole: list[int] = []
    for size in sizes:
        region.reserve(len(whole) + size)
        content = torch.randint(256, (size,), dtype=torch.uint8)
        first = 0
        for piece in region.pieces(len(whole), size):
            piece.copy_(content[first : first + len(piece)])
            first += len(piece)
        whole += content.tolist()
    begin = data.draw(st.integers(0, len(whole)))
    size = data.draw(st.integers(0, len(whole) - begin))
    assert [int(b) for piece in region.pieces(begin, size) for b in piece] == whole[begin : begin + size]
    with pytest.raises(ValueError, match="host region"):
        list(region.pieces(len(whole), 1))


def test_a_gpus_memory_is_not_taken_for_one_whose_copies_need_no_wait():
    with pytest.raises(ValueError, match=r"device_memory\(device\)"):
        DeviceMemory(torch.device("cuda", 0))
    assert type(device_memory(CPU)) is DeviceMemory


BUFFER = torch.arange(24.0)
"""The values of two views of one storage."""


class Held:
    """Tensors, and the part made of them."""

    def __init__(self) -> None:
        self.matrix = BUFFER.clone().view(6, 4)
        self.tail = self.matrix.view(-1)[10:]
        self.steps = torch.tensor(3.0, dtype=torch.float64)
        self.part = MemoryPart(lambda: [self.steps, self.matrix, self.tail])

    def check(self) -> None:
        assert torch.equal(self.part.read(self.matrix), BUFFER)
        assert torch.equal(self.part.read(self.tail), BUFFER[10:])
        assert torch.equal(self.part.read(self.matrix, 5, 7), BUFFER[5:12])
        assert torch.equal(self.part.read(self.tail, 2), BUFFER[12:])
        assert self.part.read(self.matrix, 3, 0).shape == (0,)
        assert self.part.read(self.steps).tolist() == [3.0]
        kept = torch.zeros(7)
        assert self.part.read(self.matrix, 5, 7, into=kept) is kept and torch.equal(kept, BUFFER[5:12])


@pytest.fixture
def held() -> Held:
    return Held()


def leave(part: MemoryPart) -> None:
    part.save()
    part.leave()


def come_back(part: MemoryPart) -> None:
    part.allocate()
    part.fill()


@pytest.mark.parametrize("away", [False, True])
def test_on_the_device_and_on_the_host(held: Held, away: bool) -> None:
    if away:
        leave(held.part)
    assert (held.matrix.untyped_storage().nbytes() == 0) == away
    held.check()
    held.part.read(held.matrix).zero_()
    held.check()  # the values read are a copy


def test_on_the_host_in_several_slabs(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRegion, "_slab_bytes", lambda self, missing: 12)
    leave(held.part)
    held.check()


def test_on_its_way_back_from_the_host(held: Held) -> None:
    leave(held.part)
    come_back(held.part)
    held.matrix.zero_()  # as if the copies had not arrived
    held.check()


def test_after_a_change_on_the_device(held: Held) -> None:
    leave(held.part)
    come_back(held.part)
    held.part.changed()
    held.matrix.neg_()
    assert torch.equal(held.part.read(held.tail), -BUFFER[10:])


def test_a_dropped_part_cannot_be_read(held: Held) -> None:
    held.part.leave(drop=True)
    with pytest.raises(RuntimeError, match="dropped"):
        held.part.read(held.matrix)


def test_a_foreign_tensor_is_refused(held: Held) -> None:
    leave(held.part)
    with pytest.raises(RuntimeError, match="none of the part's storages"):
        held.part.read(torch.zeros(3))


def test_what_lies_on_the_host_for_good_never_moves(held: Held) -> None:
    hosted = torch.arange(5.0)
    part = PartOnHost(lambda: [held.matrix, hosted], [hosted])
    assert (part.device_bytes, part.host_bytes) == (BUFFER.nbytes, hosted.nbytes)
    leave(part)
    assert part.device_bytes == 0 and part.host_bytes == 128 + hosted.nbytes  # in whole multiples of 64
    assert torch.equal(part.read(hosted, 1, 3), hosted[1:4]) and torch.equal(part.read(held.matrix), BUFFER)
    kept = torch.zeros(4)
    assert part.read(hosted, 1, into=kept) is kept and torch.equal(kept, hosted[1:])
