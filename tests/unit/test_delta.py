"""Tests of finding and sending the changes since the last sync, and of the checksums of the result."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.errors import SyncError
from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.offload.memory_parts import MemoryPart
from rltrain.reshard import changes as changes_cuda
from rltrain.reshard import copy_table, native
from rltrain.reshard.changes import CudaChanges, Extent, Marks, Packing, TorchChanges, changes_on, mark
from rltrain.reshard.checksums import BOX, checksum_of, checksums
from rltrain.reshard.copies import Steps, make_steps
from rltrain.reshard.copy_table import PRESENT, RUN, CopyTable, TorchCopies
from rltrain.reshard.delta import (
    CHANGES,
    DENSE_SHARE,
    FIRST_REST,
    HEADER_BYTES,
    LONGEST_REST,
    WHOLE,
    Coder,
    DeltaSettings,
    DeltaTurn,
    DeltaTurns,
    headers_of,
)
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.native import DELTA_BLOCK, PAIRS, SLICE, quantises
from rltrain.reshard.plan import plan
from rltrain.reshard.rounds import STAGES, choose_rounds, stage_streams
from rltrain.reshard.wires import Memory
from rltrain.roles.weight_sync import WeightSyncTask
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import tiny_architecture
from tests.support.slice_examples import BITS, DTYPES, SOURCE_ELEMENTS, make_sources
from tests.unit.test_copies import (
    IMPLEMENTATIONS,
    EmulatedCopies,
    emulation,
    one_slice,
    runs_here,
    using,
)

__all__ = ["emulation"]


CPU = torch.device("cpu")
PROPERTY = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDENING = sorted((source, kind) for source, kind in PAIRS if ITEM_BYTES[source] <= ITEM_BYTES[kind])


class EmulatedChanges(CudaChanges):
    """Change detection with launches on the host."""

    def _ordinal_of(self, device: torch.device) -> int:
        return 0

    @contextmanager
    def _current_stream(self) -> Iterator[int]:
        yield 0


@pytest.fixture(params=[*IMPLEMENTATIONS, "CUDA threads on the host"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, emulation: ctypes.CDLL
) -> Iterator[str]:
    if request.param.startswith("CUDA"):
        monkeypatch.setattr(native, "cuda_library", lambda: emulation)
        monkeypatch.setattr(native, "backend", lambda kind: "torch" if native.mode() == "off" else "cuda")
        monkeypatch.setattr(changes_cuda, "CudaChanges", EmulatedChanges)
        yield request.param
        return
    if not runs_here(request.param):
        pytest.skip("this processor lacks the instructions")
    with using(request.param):
        yield request.param


@dataclass(frozen=True, eq=False)
class Case:
    """The bytes `packed` and the earlier bytes `kept`. `slices` [SLICE] unpack them into base 1, from element `begin`
    on."""

    packed: Tensor
    kept: Tensor
    item: int
    begin: int
    slices: Array
    destination_bytes: int

    def unpacked(self, section: Tensor) -> Tensor:
        """Returns the destination after a whole unpack."""
        destination = torch.full((self.destination_bytes,), 0x55, dtype=torch.uint8)
        before = torch.zeros(self.begin * self.item, dtype=torch.uint8)
        copies = TorchCopies(self.slices, CPU)
        copies.bind([torch.cat([before, section]), destination])
        copies.launch(0, len(self.slices))
        return destination


@st.composite
def cases(draw: st.DrawFn) -> Case:
    source, kind = draw(st.sampled_from(WIDENING))
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), min_size=1, max_size=4))
    slices, begin = np.zeros(len(shapes), SLICE), draw(st.integers(0, 50))
    read, written = begin, 0
    for entry, (rows, cols) in zip(slices, shapes, strict=True):
        entry["rows"], entry["cols"], entry["src_stride"] = rows, cols, cols
        entry["dst_stride"] = cols + draw(st.integers(0, 9))
        entry["src_offset"], entry["dst_offset"] = read, written
        entry["dst_base"], entry["src_type"], entry["dst_type"], entry["amax_base"] = 1, source, kind, -1
        read, written = read + rows * cols, written + rows * int(entry["dst_stride"])
    item, elements = int(ITEM_BYTES[source]), min(read - begin, SOURCE_ELEMENTS)
    tensor = make_sources(draw(st.integers(0, 2**32 - 1)), specials=draw(st.booleans()))[source]
    packed = tensor.view(torch.uint8).repeat(3)[: (read - begin) * item].clone()
    kept = packed.clone()
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.3, 0.6, 1.0]))
    changed = torch.from_numpy(rng.random(read - begin) < share)
    if draw(st.booleans()):  # in one place only, so that some blocks stay unchanged
        changed[elements // 2 :] = False
    # One bit of each element flips, because signs of zeros and payloads of NaNs count.
    flips = torch.from_numpy(1 << rng.integers(0, 8, read - begin)).to(torch.uint8)
    kept.view(-1, item)[changed, rng.integers(0, item)] ^= flips[changed]
    return Case(packed, kept, item, begin, slices, written * int(ITEM_BYTES[kind]) + 7)


def encoded(case: Case, kept: Tensor) -> tuple[Extent, Tensor]:
    changes = changes_on(CPU)
    marks = mark(changes, case.packed, kept, case.item)
    out = torch.zeros(marks.extent.num_bytes, dtype=torch.uint8)
    if marks.extent.values:
        changes.write(case.packed, kept, marks, marks.extent.parts(out))
    return marks.extent, out


@PROPERTY
@given(case=cases())
def test_changes_applied_equal_a_whole_unpack_bit_for_bit(implementation: str, case: Case) -> None:
    kept, destination = case.kept.clone(), case.unpacked(case.kept)
    extent, out = encoded(case, kept)
    assert torch.equal(kept, case.packed)
    differing = (case.packed.view(-1, case.item) != case.kept.view(-1, case.item)).any(1)
    assert int(differing.sum()) <= extent.values
    assert (extent.values == 0) == torch.equal(case.packed, case.kept)
    blocks = -(-len(differing) // DELTA_BLOCK)
    assert extent.num_bytes <= case.packed.numel() + blocks + 48
    if extent.values:
        bases = [torch.empty(0), destination]
        assert changes_on(CPU).apply(case.slices, case.begin, extent, extent.parts(out), bases)
    assert torch.equal(destination, case.unpacked(case.packed))
    with using("torch"):
        assert isinstance(changes_on(CPU), TorchChanges)
        expected_extent, expected = encoded(case, case.kept.clone())
    assert (extent, out.tolist()) == (expected_extent, expected.tolist()), "every implementation writes the same bytes"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (ElementType.FLOAT32, ElementType.FLOAT8_E4M3),
        (ElementType.BFLOAT16, ElementType.BFLOAT16),
        (ElementType.FLOAT32, ElementType.BFLOAT16),
        (ElementType.FLOAT32, ElementType.FLOAT32),
    ],
)
def test_what_is_packed_while_it_is_compared_is_what_is_packed_before(
    implementation: str, source: ElementType, kind: ElementType
) -> None:
    """The data spans several tiles. Their edges fall within rows of slices, and within blocks of one scale."""
    changes = changes_on(CPU)
    if not changes.packs:
        pytest.skip("this implementation packs before it compares")
    item, begin = int(ITEM_BYTES[kind]), 64
    shapes = [(3, 50_001), (201, 1_300), (1, 7), (90, 3_001), (300, 1_024 // item)]
    slices, at, entries = np.zeros(len(shapes), SLICE), begin, 0
    for entry, (rows, cols) in zip(slices, shapes, strict=True):
        entry["rows"], entry["cols"], entry["src_stride"], entry["dst_stride"] = rows, cols, cols + 5, cols
        entry["dst_base"], entry["dst_offset"], entry["src_offset"] = 1, at, len(shapes) * rows
        entry["src_type"], entry["dst_type"], entry["amax_base"] = source, kind, -1
        if quantises(entry):
            entry["amax_base"], entry["row_phase"], entry["col_phase"] = 2, 100, 77
            entry["amax_stride"], entry["amax_offset"] = -(-(77 + cols) // 128), entries
            entries += int(entry["amax_stride"]) * -(-(100 + rows) // 128)
        at += rows * cols
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400_000, generator=generator).to(DTYPES[source])
    amax = torch.rand(entries + 1, generator=generator) + 0.5
    expected, packed = torch.zeros(at * item, dtype=torch.uint8), torch.zeros(at * item, dtype=torch.uint8)
    table = CopyTable(slices, CPU)
    table.bind([values, expected, amax])
    table.launch(0, len(slices))
    table.bind([values, packed, amax])
    section = slice(begin * item, at * item)
    kept = expected[section].clone()
    assert len(kept) > 3 * 2**18, "more than a tile"
    kept[::1000] ^= 1
    kept_too = kept.clone()
    found = mark(changes, packed[section], kept, item, Packing(table, 0, len(slices), begin))
    wanted = mark(changes, expected[section], kept_too, item)
    assert torch.equal(packed, expected) and torch.equal(kept, kept_too)
    assert found.extent == wanted.extent and found.changed == wanted.changed == -(-len(kept) // 1000)
    assert torch.equal(found.lengths, wanted.lengths)


def one_block(places: list[int], elements: int = 300) -> tuple[Extent, Tensor, Array]:
    """Returns bytes with changes at `places` of the last block, and a slice over all `elements`."""
    extent = Extent(elements, 1, len(places), len(places))
    out = torch.zeros(extent.num_bytes, dtype=torch.uint8)
    lengths, where, _ = extent.parts(out)
    lengths[-1] = len(places)
    where.copy_(torch.tensor(places))
    kind = ElementType.FLOAT8_E4M3
    return extent, out, one_slice(rows=1, cols=elements, dst_base=0, src_type=kind, dst_type=kind)


@pytest.mark.parametrize("wrong", ["place", "count", "slice", "none"])
def test_what_does_not_fit_is_not_written_past_the_destination(implementation: str, wrong: str) -> None:
    extent, out, slices = one_block([3, 44 if wrong == "place" else 43])
    if wrong == "count":
        extent.parts(out)[0][-1] = 1
    if wrong == "slice":
        slices["cols"] = 290
    destination = torch.full((300,), 7, dtype=torch.uint8)
    fits = changes_on(CPU).apply(slices, 0, extent, extent.parts(out), [destination])
    assert fits == (wrong == "none")
    if wrong == "none":
        assert destination.nonzero().view(-1).tolist() == sorted({*range(300)} - {259, 299})


def test_blocks_are_sent_whole_where_that_takes_no_more() -> None:
    packed, kept = torch.arange(512, dtype=torch.int16).view(torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    kept.view(torch.int16)[256:] = torch.arange(256, 512)
    kept.view(torch.int16)[300:400] += 1
    marks: Marks = mark(changes_on(CPU), packed, kept, 2)
    assert (marks.lengths.tolist(), marks.extent) == ([255, 100], Extent(512, 2, 100, 356))


WORD, HALF = 2**64 - 1, 2**32 - 1
LARGEST = dict(zip(ElementType, (0x7F800000, 0x7F80, 0x7C00, 0x7E), strict=True))
FEW_EXAMPLES = settings(PROPERTY, max_examples=25)


@pytest.fixture
def checksum_implementation(implementation: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if implementation.startswith("CUDA"):
        monkeypatch.setattr(copy_table, "backend_class", lambda device: EmulatedCopies)
    return implementation


def key_of_place(place: int) -> int:
    x = (place + 0x9E3779B9) & HALF
    x = (x ^ x >> 16) * 0x7FEB352D & HALF
    x = (x ^ x >> 15) * 0x846CA68B & HALF
    return x ^ x >> 16


def key_of_run(run: int) -> int:
    x = (run + 1) * 0x9E3779B97F4A7C15 & WORD
    x = (x ^ x >> 32) * 0xB4B82F3A5F574E53 & WORD
    return (x ^ x >> 32) | 1


def by_hand(boxes: Array, tensors: list[Tensor], num_entries: int) -> list[int]:
    """Returns the checksums defined by csrc/reshard.h, element by element."""
    sums = [0] * num_entries
    for box in boxes:
        dtype = tensors[box["base"]].dtype
        bits = tensors[box["base"]].view(BITS[dtype.itemsize]).tolist()
        kind = next(kind for kind in DTYPES if DTYPES[kind] == dtype)
        all_bits = 2 ** (8 * dtype.itemsize) - 1
        for i in range(box["rows"]):
            for j in range(box["cols"]):
                x = bits[int(box["offset"] + i * box["stride"]) + j] & all_bits
                if not box["exact"] and x & all_bits >> 1 > LARGEST[kind]:
                    x = LARGEST[kind] + 1
                run, within = divmod(int(box["place"] + i * box["width"]) + j, RUN)
                sums[box["entry"]] += key_of_run(run) * key_of_place(within) * (x ^ PRESENT)
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


@st.composite
def some_boxes(draw: st.DrawFn) -> Array:
    """Draws boxes in tensors of all four types. Some places are beyond 2**32."""
    boxes = np.zeros(draw(st.integers(0, 4)), dtype=BOX)
    for box in boxes:
        rows, cols = draw(st.sampled_from([(1, 0), (1, 2100), (3, 1), (40, 16), (17, 96), (5, 33)]))
        box["base"], box["entry"] = draw(st.integers(0, 3)), draw(st.integers(0, 2))
        box["rows"], box["cols"], box["exact"] = rows, cols, draw(st.booleans())
        box["stride"] = cols + draw(st.sampled_from([0, 0, 1, 16]))
        box["width"] = cols + draw(st.sampled_from([0, 0, 7, 2**20]))
        box["offset"] = draw(st.sampled_from([0, 16, 5]))
        box["place"] = draw(st.sampled_from([0, 1, 1023, 2**32 - 5, 2**41 + 3]))
    return boxes


@FEW_EXAMPLES
@given(boxes=some_boxes(), seed=st.integers(0, 2**32 - 1), specials=st.booleans())
def test_every_implementation_gives_the_sum_that_the_header_says(
    checksum_implementation: str, boxes: Array, seed: int, specials: bool
) -> None:
    tensors = list(make_sources(seed, specials=specials))
    assert checksums(boxes, tensors, 3).tolist() == by_hand(boxes, tensors, 3)


def box_of(tensor: Tensor, *, place: int = 0) -> Array:
    box = np.zeros(1, dtype=BOX)
    box["rows"], box["cols"] = tensor.shape
    box["stride"] = box["width"] = tensor.shape[1]
    box["place"], box["exact"] = place, True
    return box


def test_a_checksum_is_the_sum_of_those_of_its_parts(checksum_implementation: str) -> None:
    whole = torch.randn(70, 33, generator=torch.Generator().manual_seed(3))
    (expected,) = checksums(box_of(whole), [whole], 1)
    for row, col in ((1, 1), (69, 32), (40, 20)):
        parts = np.repeat(box_of(whole), 4)
        parts["rows"], parts["cols"] = [row, row, 70 - row, 70 - row], [col, 33 - col, col, 33 - col]
        parts["offset"] = parts["place"] = [0, col, row * 33, row * 33 + col]
        assert checksums(parts, [whole], 1).tolist() == [expected]


def test_every_bit_every_place_and_every_pair_of_rows_counts(checksum_implementation: str) -> None:
    values = torch.arange(4000, dtype=torch.int32).view(torch.float32).reshape(500, 8)
    changed = [values]
    for bit in range(32):
        changed.append(values.clone())
        changed[-1].view(torch.int32)[200, 3] ^= -(2**31) if bit == 31 else 1 << bit
    for row in (0, 127, 128, 300):  # within a run and across its edge
        changed.append(values.clone())
        changed[-1][[row, row + 1]] = values[[row + 1, row]]
    changed.append(values.roll(1, 0))
    changed.append(values.roll(RUN // 8, 0))
    sums = {int(checksums(box_of(values), [one], 1)[0]) for one in changed}
    sums |= {int(checksums(box_of(values, place=place), [values], 1)[0]) for place in (1, 8, RUN)}
    assert len(sums) == len(changed) + 3
    assert checksums(box_of(torch.zeros(1, 1)), [torch.zeros(1, 1)], 1)[0] != 0, "a missing zero is noticed"


def test_two_elements_that_change_places_are_always_noticed() -> None:
    """No two places within a run have the same key."""
    keys = {key_of_place(place) for place in range(RUN)}
    assert len(keys) == RUN and 0 not in keys


def test_a_box_that_leaves_its_tensor_is_refused(checksum_implementation: str) -> None:
    values = torch.zeros(4, 8)
    box = box_of(values)
    box["offset"] = 1
    with pytest.raises(ValueError, match="it leaves base src_base, of 128 bytes: it ends 132 bytes"):
        checksums(box, [values], 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.int32])
def test_a_tensor_of_any_type_has_the_checksum_of_its_bits(checksum_implementation: str, dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, (3000 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator()).view(dtype)
    kind = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[dtype.itemsize]
    assert checksum_of(values) == by_hand(box_of(values[None]), [values.view(kind)], 1)[0]
    assert checksum_of(values[:0]) == 0


def steps_of(rank: int) -> Steps:
    """Returns the steps of a sync from rank 0 to rank 1, without shared native memory."""
    architecture = tiny_architecture("llama")
    layouts = megatron_layout(architecture, Grid((0,))), engine_layout(architecture, Grid((1,)))
    planned = plan(*layouts, rank, 2)
    exchanged, headers = stage_streams(planned), headers_of(DeltaSettings())
    largest = (max(made.sends.total_bytes, made.receives.total_bytes) for made in exchanged)
    rounds = tuple(choose_rounds(num_bytes, 1, 2**16) for num_bytes in largest)
    return make_steps(planned, exchanged, rounds, headers=headers)


@pytest.fixture
def receiver() -> tuple[Coder, Steps, Memory]:
    """Returns a receiver with zeroed memory for all its data."""
    steps = steps_of(1)
    coder = Coder(steps, CPU, DeltaSettings())
    coder.begin(whole=True)
    used = steps.slices["src_base"].max() + 1
    memory = Memory([torch.zeros(2**18, dtype=torch.uint8) for _ in range(max(used, steps.bases.slots))])
    coder.use(memory, CopyTable(steps.slices, CPU))
    return coder, steps, memory


HEADERS = {
    "of no kind": [0, 0],
    "whole, and too short": [WHOLE, 64],
    "longer than the message": [CHANGES, 2**40, 0, 2**38],
    "of fewer values than it has": [CHANGES, 0, 0, 5],
    "with a negative count": [CHANGES, 0, -1, 0],
    "whose lengths say otherwise": [CHANGES, 0, 5, 5],
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_message_that_does_not_fit_is_refused_by_name(header: str, receiver: tuple[Coder, Steps, Memory]) -> None:
    coder, steps, memory = receiver
    stage = steps.stages[0]
    message = stage.receives[0][0]
    numbers = HEADERS[header] + [0] * (HEADER_BYTES // 8 - len(HEADERS[header]))
    if header == "whose lengths say otherwise":
        numbers[1] = Extent((message.num_bytes - HEADER_BYTES) // 4, 4, 5, 5).num_bytes
    header_of = memory.bytes(message.base)[message.offset : message.offset + HEADER_BYTES]
    header_of.view(torch.int64).copy_(torch.tensor(numbers))
    with pytest.raises(SyncError, match="does not fit the plan.*weight_sync.delta=null sends everything"):
        coder.decode(stage, 0)


def test_a_sender_keeps_as_many_bytes_as_it_sends() -> None:
    sender, receiver = (Coder(steps_of(rank), CPU, DeltaSettings()) for rank in (0, 1))
    sends = [message for stage in steps_of(0).stages for messages in stage.sends for message in messages]
    total = sum(message.num_bytes - HEADER_BYTES for message in sends)
    assert receiver.kept_bytes == 0 and total <= sender.kept_bytes < total + 16 * len(sends)


def test_headers_are_of_messages_that_are_compared() -> None:
    assert [bool(size) for size in headers_of(DeltaSettings())] == [not kind.shared for kind in STAGES]
    assert all(headers_of(DeltaSettings(in_shared_memory=True)))


def test_what_changed_since_a_run_that_failed_is_not_sent() -> None:
    coder = Coder(steps_of(0), CPU, DeltaSettings())
    coder.begin(whole=True)
    coder.finish()
    coder.begin(whole=False)  # does not finish
    with pytest.raises(SyncError, match="did not finish"):
        coder.begin(whole=False)


def test_an_engine_has_lost_its_weights_where_another_version_or_empty_memory_is_found() -> None:
    part = MemoryPart(lambda: [weights])
    weights = torch.ones(8)
    engine = SimpleNamespace(policy_version=4, num_restarts=0)
    sync = SimpleNamespace(engine=engine, weights=part, left=None)

    def lost() -> bool:
        return WeightSyncTask.has_lost_weights(sync)  # type: ignore[arg-type]

    assert lost(), "no update has arrived yet"
    sync.left = 4, 0, 0
    assert not lost()
    engine.policy_version = None
    assert lost(), "an update failed"
    engine.policy_version, engine.num_restarts = 4, 1
    assert lost(), "its process restarted"
    engine.num_restarts = 0
    part.save()
    part.leave()
    part.allocate()
    part.fill()
    assert not lost(), "its memory was only on the host for a while"
    part.leave(drop=True)
    part.allocate()
    part.fill(rewritten=True)
    assert lost()
    sync.engine = None
    assert not lost(), "a rank with only the actor"


PLAIN, WHOLE_TURN, CHANGES_TURN = DeltaTurn.PLAIN, DeltaTurn.WHOLE, DeltaTurn.CHANGES


def taken(turns: DeltaTurns, count: int, share: float = 0.1) -> list[DeltaTurn]:
    found = []
    for _ in range(count):
        found.append(turns.next(lost=False))
        turns.finished(found[-1], share)
    return found


def test_everything_is_sent_first_every_so_often_and_where_it_was_lost() -> None:
    turns = DeltaTurns(3)
    assert taken(turns, 5) == [WHOLE_TURN, CHANGES_TURN, CHANGES_TURN, WHOLE_TURN, CHANGES_TURN]
    assert turns.next(lost=True) is WHOLE_TURN
    turns.finished(WHOLE_TURN)
    assert turns.next(lost=False) is CHANGES_TURN  # does not finish
    assert turns.next(lost=False) is WHOLE_TURN


def test_where_comparing_saves_nothing_it_is_tried_ever_more_seldom() -> None:
    turns, found = DeltaTurns(1000), []
    while len(found) < 400:
        found += taken(turns, 1, share=DENSE_SHARE)
    tried = [number for number, turn in enumerate(found) if turn is CHANGES_TURN]
    rests = [later - earlier - 2 for earlier, later in zip(tried, tried[1:], strict=False)]
    assert rests[:4] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST, 8 * FIRST_REST]
    assert max(rests) == LONGEST_REST and found.count(PLAIN) == sum(rests) + LONGEST_REST - (tried[-1] + 65 - 400)
    sparse = taken(turns, LONGEST_REST + 3)
    assert sparse[-2:] == [CHANGES_TURN, CHANGES_TURN], "the change detection notices when few elements change again"


def test_where_every_sync_finds_its_destination_lost_nothing_is_remembered_for_long() -> None:
    turns, found = DeltaTurns(50), []
    for _ in range(40):
        found.append(turns.next(lost=True))
        turns.finished(found[-1])
    assert CHANGES_TURN not in found and found.count(WHOLE_TURN) <= 4


@pytest.mark.parametrize(("every", "expected"), [(0, [1]), (3, [1, 3, 6, 9])])
def test_the_first_and_every_nth_sync_of_changes_is_compared(every: int, expected: list[int]) -> None:
    turns, compared, count = DeltaTurns(100, every), [], 0
    for _ in range(11):
        turn = turns.next(lost=False)
        count += turn is CHANGES_TURN
        compared += [count] if turns.compares else []
        turns.finished(turn, 0.1)
    assert compared == expected


def test_behind_a_difference_all_are_compared() -> None:
    turns = DeltaTurns(100)
    taken(turns, 5)
    assert turns.next(lost=False) is CHANGES_TURN and not turns.compares
    turns.differed()
    turns.finished(WHOLE_TURN)
    assert turns.next(lost=False) is CHANGES_TURN and turns.compares


@given(
    st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), max_size=60)
)
def test_changes_are_sent_only_to_those_that_have_all_of_the_sync_before(
    full_every: int, events: list[tuple[bool, bool, float]]
) -> None:
    """Covers lost weights, failed syncs and all shares of changed elements."""
    turns, remembers, since = DeltaTurns(full_every), False, 0
    for lost, fails, share in events:
        turn = turns.next(lost=lost)
        if turn is CHANGES_TURN:
            since += 1
            assert remembers and not lost and since < full_every
        else:
            since = 0
        remembers = turn is not PLAIN and not fails
        if not fails:
            turns.finished(turn, share)
