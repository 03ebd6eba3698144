"""The checksum of checkpoints' files equals zlib's, however the bytes are cut and wherever they lie."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.reshard import native

BYTES = bytes(range(251)) * 80


@pytest.fixture(autouse=True)
def every_length_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SHORT_BYTES", 0)


@given(first=st.integers(0, 200), lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_pieces_give_what_zlib_gives_of_the_whole(first: int, lengths: list[int]) -> None:
    found, at = 0, first
    for length in lengths:
        found = native.crc32(memoryview(BYTES)[at : at + length], found)
        at += length
    assert found == zlib.crc32(BYTES[first:at])
