"""Checksums of boxes: every implementation against a plain sum in Python, and what they notice."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models.table import Array, ElementType
from rltrain.reshard import copy_table, native
from rltrain.reshard.checksums import BOX, checksum_of, checksums
from rltrain.reshard.copy_table import PRESENT, RUN
from tests.slice_examples import BITS, DTYPES, make_sources
from tests.unit.test_cuda_tiles import EmulatedCopies, emulation
from tests.unit.test_kernels import INSTRUCTIONS, native_library

__all__ = ["emulation"]

WORD, HALF = 2**64 - 1, 2**32 - 1
LARGEST = dict(zip(ElementType, (0x7F800000, 0x7F80, 0x7C00, 0x7E), strict=True))
PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["torch", *INSTRUCTIONS, "CUDA threads on the host"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, emulation: ctypes.CDLL
) -> Iterator[str]:
    monkeypatch.setenv(native.VARIABLE, "off" if request.param == "torch" else "require")
    if request.param.startswith("CUDA"):
        monkeypatch.setattr(native, "cuda_library", lambda: emulation)
        monkeypatch.setattr(copy_table, "backend_class", lambda device: EmulatedCopies)
    if request.param not in INSTRUCTIONS:
        yield request.param
        return
    library, wanted = native_library(), INSTRUCTIONS[request.param]
    if library.rs_cpu_limit_instructions(wanted) != wanted:  # type: ignore[attr-defined]
        pytest.skip("this processor lacks the instructions")
    yield request.param
    library.rs_cpu_limit_instructions(2)  # type: ignore[attr-defined]


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
    """What csrc/reshard.h says, element by element."""
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
    """In tensors of all four types, places beyond 2**32 among them."""
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


@PROPERTY
@given(boxes=some_boxes(), seed=st.integers(0, 2**32 - 1), specials=st.booleans())
def test_every_implementation_gives_the_sum_that_the_header_says(
    implementation: str, boxes: Array, seed: int, specials: bool
) -> None:
    tensors = list(make_sources(seed, specials=specials))
    assert checksums(boxes, tensors, 3).tolist() == by_hand(boxes, tensors, 3)


def box_of(tensor: Tensor, *, place: int = 0) -> Array:
    box = np.zeros(1, dtype=BOX)
    box["rows"], box["cols"] = tensor.shape
    box["stride"] = box["width"] = tensor.shape[1]
    box["place"], box["exact"] = place, True
    return box


def test_a_checksum_is_the_sum_of_those_of_its_parts(implementation: str) -> None:
    whole = torch.randn(70, 33, generator=torch.Generator().manual_seed(3))
    (expected,) = checksums(box_of(whole), [whole], 1)
    for row, col in ((1, 1), (69, 32), (40, 20)):
        parts = np.repeat(box_of(whole), 4)
        parts["rows"], parts["cols"] = [row, row, 70 - row, 70 - row], [col, 33 - col, col, 33 - col]
        parts["offset"] = parts["place"] = [0, col, row * 33, row * 33 + col]
        assert checksums(parts, [whole], 1).tolist() == [expected]


def test_every_bit_every_place_and_every_pair_of_rows_counts(implementation: str) -> None:
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
    """Within a run, because no two places have the same key."""
    assert len({key_of_place(place) for place in range(RUN)}) == RUN
    assert 0 not in {key_of_place(place) for place in range(RUN)}


def test_a_box_that_leaves_its_tensor_is_refused(implementation: str) -> None:
    values = torch.zeros(4, 8)
    box = box_of(values)
    box["offset"] = 1
    with pytest.raises(ValueError, match="it leaves base src_base, of 128 bytes: it ends 132 bytes"):
        checksums(box, [values], 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int16, torch.float16, torch.int32])
def test_a_tensor_of_any_type_has_the_checksum_of_its_bits(implementation: str, dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, (3000 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator()).view(dtype)
    kind = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[dtype.itemsize]
    assert checksum_of(values) == by_hand(box_of(values[None]), [values.view(kind)], 1)[0]
    assert checksum_of(values[:0]) == 0
