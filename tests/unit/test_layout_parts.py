"""A layout split into layouts of some parameters each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.models.table import ITEM_BYTES, ElementType
from rltrain.reshard.layout import BOX_FIELDS, Layout, parameter_types, split
from rltrain.reshard.plan import Planner
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import Tensors, tiny_architecture
from tests.unit.plan_simulation import Side, execute_all, reshard, side, simulated_rank
from tests.unit.test_plan import KINDS, architectures, grids


def held_boxes(layout: Layout, rank: int) -> list[tuple[object, ...]]:
    """Every piece with the name and shape of the parameter that it lies in."""
    on = layout.on(rank)
    fields = [*BOX_FIELDS, "offset", "stride"]
    return [(*on.parameters[piece["parameter"]], *(int(piece[name]) for name in fields)) for piece in on.pieces]


def sizes(layout: Layout, rank: int) -> list[int]:
    elements = [int(np.prod(shape)) for _, shape in layout.on(rank).parameters]
    types = parameter_types(layout, layout.parts[layout.ranks.index(rank)])
    return [count * int(ITEM_BYTES[kind]) for count, kind in zip(elements, types, strict=True)]


@settings(max_examples=25)
@given(st.data())
def test_parts_together_are_the_layout_and_each_can_be_planned_and_executed_alone(data: st.DataObject) -> None:
    architecture = data.draw(architectures())
    kinds = data.draw(KINDS)
    source, destination = (side(kind, architecture, data.draw(grids(architecture, kind))) for kind in kinds)
    max_bytes = data.draw(st.integers(1, 20_000))
    ranks_per_node = data.draw(st.sampled_from([1, 4, 14]))
    parts = split(destination.layout, max_bytes)
    for rank in destination.layout.ranks:
        of_parts = [part.on(rank).parameters for part in parts]
        assert sum(of_parts, ()) == destination.layout.on(rank).parameters
        boxes = [box for part in parts for box in held_boxes(part, rank)]
        assert sorted(boxes, key=repr) == sorted(held_boxes(destination.layout, rank), key=repr)
        for part in parts:
            assert sum(sizes(part, rank)) <= max_bytes or len(part.on(rank).parameters) == 1
    whole = reshard(source, destination, ranks_per_node)
    written: dict[int, Tensors] = {rank: {} for rank in whole}
    for part in parts:
        planner = Planner(source.layout, part, ranks_per_node)
        ranks = {rank: simulated_rank(planner.plan(rank), source.shards.get(rank, {})) for rank in whole}
        execute_all(ranks)
        for number, rank in ranks.items():
            for (name, _), values in zip(rank.plan.destination_parameters, rank.destination, strict=True):
                assert name not in written[number]
                written[number][name] = values
    for number, rank in whole.items():
        expected = dict(zip([name for name, _ in rank.plan.destination_parameters], rank.destination, strict=True))
        assert written[number].keys() == expected.keys()
        assert all(np.array_equal(written[number][name], expected[name]) for name in expected)


def test_as_many_parameters_per_part_as_fit() -> None:
    layout = engine_layout(tiny_architecture(num_layers=2), Grid((0,)))
    every = sizes(layout, 0)
    assert len(split(layout, sum(every))) == 1
    assert [len(part.on(0).parameters) for part in split(layout, 1)] == [1] * len(every)
    parts = split(layout, max(every))
    for part, following in zip(parts, parts[1:], strict=False):
        assert sum(sizes(part, 0)) + sizes(following, 0)[0] > max(every), "the next one would have fitted"


def test_a_parameter_of_padding_alone_has_the_type_of_its_namesakes() -> None:
    """64 rows of vocabulary over four ranks, of which the first alone has any."""
    architecture = tiny_architecture("qwen2", vocab_size=9, num_heads=4, num_kv_heads=4)
    layout = engine_layout(architecture, Grid((0, 1, 2, 3), tp=4), dtype="bfloat16")
    layout.types[layout.tensors.numbers["model.embed_tokens.weight"]] = ElementType.FLOAT32
    names = [name for name, _ in layout.part(3).parameters]
    number = names.index("model.embed_tokens.weight")
    assert number not in layout.part(3).pieces["parameter"], "this share has rows, and the test shows nothing"
    kinds = parameter_types(layout, 3)
    assert kinds[number] == ElementType.FLOAT32
    assert kinds[names.index("lm_head.weight")] == ElementType.BFLOAT16
    assert np.array_equal(kinds, parameter_types(layout, 0))


def test_shares_with_different_parameters() -> None:
    """Stages of a pipeline: those with fewer parameters have none in the last parts."""
    architecture = tiny_architecture("qwen3", num_layers=3)
    grid = Grid((0, 1), pp=2, layers_per_stage=(2, 1))
    destination = side("megatron", architecture, grid)
    source = side("engine", architecture, Grid((0,)))
    parts = split(destination.layout, 1)
    assert parts[-1].on(0).parameters and not parts[-1].on(1).parameters
    for part in parts:
        shards = {
            rank: {name: destination.shards[rank][name] for name, _ in part.on(rank).parameters} for rank in grid.ranks
        }
        reshard(source, Side(part, shards), 2)


def test_no_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes is 0"):
        split(engine_layout(tiny_architecture(), Grid((0,))), 0)
