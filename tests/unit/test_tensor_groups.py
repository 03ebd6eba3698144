"""A layout in groups of tensors: each piece is in one of them, at its place in its parameter."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.models.table import ITEM_BYTES
from rltrain.reshard.layout import Layout, holding, tensor_groups
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import MOE, tiny_architecture

GRIDS = (Grid((0,)), Grid((0, 1), tp=2), Grid((0, 1), pp=2), Grid((0, 1, 2, 3), tp=2, pp=2))


def pieces_of(layout: Layout, rank: int) -> Counter[tuple[object, ...]]:
    """Parameter, shape, box and place of each."""
    mine = layout.on(rank)
    return Counter(
        (*mine.parameters[piece["parameter"]], *(int(piece[name]) for name in piece.dtype.names if name != "parameter"))
        for piece in mine.pieces
    )


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "llama", *MOE]),
    tied=st.booleans(),
    grid=st.sampled_from(GRIDS),
    engine=st.booleans(),
    max_bytes=st.sampled_from([1, 3000, 20_000, 10**9]),
)
def test_the_groups_of_a_layout_have_all_of_it_once(
    family: str, tied: bool, grid: Grid, engine: bool, max_bytes: int
) -> None:
    architecture = tiny_architecture(family, tied_embeddings=tied)
    grid = Grid(grid.ranks, tp=grid.tp) if engine else grid
    layout = engine_layout(architecture, grid) if engine else megatron_layout(architecture, grid)
    groups = list(tensor_groups(layout.tensors, layout.types, max_bytes))
    assert np.array_equal(np.sum(groups, axis=0), np.ones(len(layout.types)))
    for rank in grid.ranks:
        found = sum((pieces_of(holding(layout, group), rank) for group in groups), start=Counter())
        assert found == pieces_of(layout, rank)
        for group in groups:
            held = holding(layout, group).on(rank)
            assert set(held.pieces["parameter"].tolist()) == set(range(len(held.parameters)))


def test_a_group_has_whole_layers_and_no_more_than_it_may_but_for_one() -> None:
    architecture = tiny_architecture("qwen3", num_layers=6)
    layout = megatron_layout(architecture, Grid((0,)))
    sizes = layout.tensors.matrix_shapes.prod(axis=1) * ITEM_BYTES[layout.types]
    names = np.array(layout.tensors.names)
    of_layers = [np.char.find(names, f".layers.{number}.") >= 0 for number in range(6)]
    of_one = int(sizes[of_layers[0]].sum())
    for count in (1, 2, 4):
        groups = list(tensor_groups(layout.tensors, layout.types, count * of_one))
        assert len(groups) == -(-6 // count)
        assert all(sum(group[layer].all() for group in groups) == 1 for layer in of_layers)
