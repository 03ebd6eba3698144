"""What changed of packed bytes, encoded and applied: every implementation against a whole unpack, as bits."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import ITEM_BYTES, Array, ElementType
from rltrain.reshard import changes as changes_cuda
from rltrain.reshard import native
from rltrain.reshard.changes import CudaChanges, Extent, Marks, Packing, TorchChanges, changes_on, mark
from rltrain.reshard.copy_table import CopyTable, TorchCopies
from rltrain.reshard.native import DELTA_BLOCK, PAIRS, SLICE, quantises
from tests.slice_examples import DTYPES, SOURCE_ELEMENTS, make_sources
from tests.unit.test_cuda_tiles import emulation
from tests.unit.test_kernels import IMPLEMENTATIONS, runs_here, using

__all__ = ["emulation"]

CPU = torch.device("cpu")
PROPERTY = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
WIDENING = sorted((source, kind) for source, kind in PAIRS if ITEM_BYTES[source] <= ITEM_BYTES[kind])


class EmulatedChanges(CudaChanges):
    """Launches on the host."""

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
    """`packed` and what was `kept`, bytes; `slices` [SLICE] unpack them, from element `begin` on, into base 1."""

    packed: Tensor
    kept: Tensor
    item: int
    begin: int
    slices: Array
    destination_bytes: int

    def unpacked(self, section: Tensor) -> Tensor:
        """The destination after a whole unpack."""
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
    if draw(st.booleans()):  # in one place alone, so that some blocks are as they were
        changed[elements // 2 :] = False
    # One bit of each: signs of zeros and payloads of NaNs count.
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


@PROPERTY
@given(case=cases())
def test_every_implementation_encodes_to_the_same_bytes(implementation: str, case: Case) -> None:
    extent, out = encoded(case, case.kept.clone())
    with using("torch"):
        assert isinstance(changes_on(CPU), TorchChanges)
        expected_extent, expected = encoded(case, case.kept.clone())
    assert (extent, out.tolist()) == (expected_extent, expected.tolist())


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
    """Several tiles long; their edges lie within rows of slices, and within blocks that share a scale."""
    changes = changes_on(CPU)
    if not changes.packs:
        pytest.skip("what is compared is packed before")
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
    """Bytes that say that `places` of the last block changed, and a slice that takes all `elements`."""
    extent = Extent(elements, 1, len(places), len(places))
    out = torch.zeros(extent.num_bytes, dtype=torch.uint8)
    lengths, where, _ = extent.parts(out)
    lengths[-1] = len(places)
    where.copy_(torch.tensor(places))
    made = np.zeros(1, SLICE)
    made["rows"], made["cols"], made["src_stride"], made["dst_stride"] = 1, elements, elements, elements
    made["src_type"] = made["dst_type"] = ElementType.FLOAT8_E4M3
    made["amax_base"] = -1
    return extent, out, made


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


def test_widening_pairs_are_what_arrives() -> None:
    pairs = np.zeros(len(WIDENING), SLICE)
    pairs["src_type"], pairs["dst_type"] = np.array(WIDENING).T
    assert len(WIDENING) == 6 and not quantises(pairs).any()
