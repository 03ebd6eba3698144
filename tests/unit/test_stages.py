"""How layers are shared out over a pipeline's stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.runtime.grid import Grid, planned_layers


@given(st.integers(1, 16), st.integers(0, 100))
def test_every_chunk_has_layers_and_none_has_much_more_than_another(num_chunks: int, more: int) -> None:
    counts = planned_layers(num_chunks + more, num_chunks)
    assert len(counts) == num_chunks and sum(counts) == num_chunks + more and min(counts) >= 1
    if (num_chunks + more) % num_chunks == 0:
        assert len(set(counts)) == 1
        return
    work = [count + (number == 0) + (number == num_chunks - 1) for number, count in enumerate(counts)]
    assert max(work) - min(work) <= 1
    assert max(work) == -(-(num_chunks + more + 2) // num_chunks), "the slowest chunk is as fast as it can be"


def test_the_last_chunk_has_the_fewest() -> None:
    assert planned_layers(61, 8) == (7, 8, 8, 8, 8, 8, 8, 6)  # DeepSeek-V3
    assert planned_layers(3, 2) == (2, 1)


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be shared out over 4 chunks"):
        planned_layers(3, 4)
    with pytest.raises(ValueError, match=r"layers_per_stage is \[1, 1\]; expected 4 numbers \(pp 2 x vpp 2\)"):
        Grid((0, 1), pp=2, vpp=2, layers_per_stage=(1, 1)).layers_of_chunks(2)
