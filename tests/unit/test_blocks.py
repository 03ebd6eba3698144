"""Tests of scales as parts of layouts, and of maxima of blocks shared by several ranks."""

import math
import time
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.models import Architecture
from rltrain.models.table import Array, CanonicalTensors, ElementType, uniform
from rltrain.reshard.copy_table import block_amax, inverse_scales_of, per_element, quantize_blocks, quantize_elements
from rltrain.reshard.fp8_blocks import SCALES_PARAMETER, QuantizedLayouts, quantized
from rltrain.reshard.fp8_scales import BlockScales, BlockTable, SplitBlocks
from rltrain.reshard.layout import PIECE, Layout, RankLayout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.support.model_shards import tiny_architecture

CPU = torch.device("cpu")
Box = tuple[int, ...]


def matrices(layout: Layout) -> np.ndarray:
    return np.array([len(shape) == 2 for shape in layout.tensors.shapes])


def layouts(architecture: Architecture, training: tuple[int, int, int], tp: int) -> QuantizedLayouts:
    """Returns layouts from Megatron on (tp, pp, replicas) to engines of `tp`, with every matrix quantised."""
    source = megatron_layout(architecture, Grid(tuple(range(math.prod(training))), tp=training[0], pp=training[1]))
    return quantized(source, engine_layout(architecture, Grid(tuple(range(tp)), tp=tp)), matrices(source))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    num_kv_heads = draw(st.sampled_from([1, 2, 4]))
    return tiny_architecture(
        draw(st.sampled_from(["llama", "qwen2"])),
        hidden_size=draw(st.integers(1, 300)),
        num_kv_heads=num_kv_heads,
        num_heads=4 * draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([2, 48, 64, 100, 128])),
        ffn_hidden_size=4 * draw(st.integers(1, 150)),
        vocab_size=draw(st.integers(1, 400)),
        tied_embeddings=draw(st.booleans()),
    )


Case = tuple[Architecture, tuple[int, int, int], int]
CASES = st.tuples(
    architectures(), st.sampled_from([(1, 1, 1), (2, 1, 2), (4, 1, 1), (2, 2, 1)]), st.sampled_from([1, 2, 4])
)


def boxes_by_tensor(layout: Layout) -> dict[int, set[Box]]:
    """Returns the distinct boxes (row, col, rows, cols) of every tensor."""
    found: dict[int, set[Box]] = {}
    for part in set(layout.parts):
        for piece in layout.part(part).pieces.tolist():
            found.setdefault(piece[0], set()).add(piece[1:5])
    return found


def covered(boxes: set[Box], shape: tuple[int, int]) -> np.ndarray:
    """Returns for each element of a matrix the number of boxes around it."""
    count = np.zeros(shape, dtype=np.int64)
    for row, col, rows, cols in boxes:
        assert row >= 0 and row + rows <= shape[0] and col >= 0 and col + cols <= shape[1]
        count[row : row + rows, col : col + cols] += 1
    return count


def touched(box: Box) -> tuple[slice, slice]:
    row, col, rows, cols = box
    return slice(row // 128, (row + rows - 1) // 128 + 1), slice(col // 128, (col + cols - 1) // 128 + 1)


@settings(max_examples=25)
@given(CASES)
def test_scales_of_the_source_tile_and_those_of_the_destination_cover_what_it_holds(case: Case) -> None:
    made = layouts(*case)
    names, shapes = made.source.tensors.names, made.source.tensors.shapes
    source = boxes_by_tensor(made.source)
    for tensor in np.flatnonzero(made.which).tolist():
        scale = int(made.scale_of[tensor])
        assert names[scale] == f"{names[tensor]}_scale_inv"
        assert shapes[scale] == tuple(-(-size // 128) for size in shapes[tensor])
        assert (covered(source[scale], shapes[scale]) == 1).all(), names[scale]
        assert {made.source.types[scale], made.destination.types[scale]} == {ElementType.FLOAT32}
        assert made.destination.types[tensor] == ElementType.FLOAT8_E4M3 != made.source.types[tensor]
    for part in set(made.destination.parts):
        pieces = made.destination.part(part).pieces.tolist()
        held = {(piece[0], piece[1:5]) for piece in pieces}
        for tensor, box in held:
            if tensor < made.num_tensors and made.which[tensor]:
                rows, cols = touched(box)
                scales = (rows.start, cols.start, rows.stop - rows.start, cols.stop - cols.start)
                assert (int(made.scale_of[tensor]), scales) in held


@settings(max_examples=20)
@given(CASES)
def test_scales_fill_parameters_of_their_own(case: Case) -> None:
    made = layouts(*case)
    for layout in (made.source, made.destination):
        for part in set(layout.parts):
            on = layout.part(part)
            written = [np.zeros(int(np.prod(shape)), dtype=np.int64) for _, shape in on.parameters]
            for piece in on.pieces:
                rows = np.arange(piece["rows"])[:, None] * piece["stride"]
                written[piece["parameter"]][piece["offset"] + rows + np.arange(piece["cols"])] += 1
            for (name, _), counts in zip(on.parameters, written, strict=True):
                assert counts.max(initial=0) <= 1, name
                # A source rank's share of a block is in no box if another rank has the block's first element.
                assert counts.all() or name == SCALES_PARAMETER or not name.endswith("_scale_inv"), name


@settings(max_examples=25)
@given(CASES)
def test_split_blocks_are_those_that_several_boxes_touch(case: Case) -> None:
    made = layouts(*case)
    expected, first = [], 0
    boxes = boxes_by_tensor(made.source)
    for tensor, shape in enumerate(made.source.tensors.matrix_shapes[: made.num_tensors].tolist()):
        touches = np.zeros([-(-size // 128) for size in shape], dtype=np.int64)
        for box in boxes[tensor] if made.which[tensor] else ():
            touches[touched(box)] += 1
        expected += (first + np.flatnonzero(touches > 1)).tolist()
        first += touches.size
    assert made.split_blocks.tolist() == expected
    assert {BlockTable(made, rank).num_split for rank in range(made.source.ranks[-1] + 2)} == {len(expected)}


def filled(on: RankLayout, full: list[Tensor]) -> dict[str, Tensor]:
    """Returns the parameters of a rank of the layout without scales, with its pieces cut from the matrices `full`."""
    parameters = {name: torch.full(shape, torch.inf, dtype=full[0].dtype) for name, shape in on.parameters}
    flats = [parameters[name].view(-1) for name, _ in on.parameters]
    for piece in on.pieces:
        tensor, row, col, rows, cols, parameter, offset, stride = piece.tolist()
        flats[parameter][offset:].as_strided((rows, cols), (stride, 1)).copy_(
            full[tensor][row : row + rows, col : col + cols]
        )
    return parameters


def special_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns values of different magnitudes per block. Some blocks are zero, some contain an infinity or a NaN."""
    x = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)
    for value in (0.0, torch.inf, -torch.inf, torch.nan):
        if torch.rand((), generator=generator) < 0.5:
            row, col = (int(torch.randint(0, size, (), generator=generator)) for size in shape)
            where = (slice(row, row + 140), slice(col, col + 140)) if value == 0 else (row, col)
            x[where] = value
    return x


@settings(max_examples=15)
@given(CASES, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_shares_quantise_as_the_whole(case: Case, dtype: torch.dtype, seed: int) -> None:
    """Every rank quantises its pieces with its own table, after one maximum over the ranks."""
    made, generator = layouts(*case), torch.Generator().manual_seed(seed)
    shapes = made.source.tensors.matrix_shapes[: made.num_tensors].tolist()
    full = [special_values(tuple(shape), generator).to(dtype) for shape in shapes]
    base = megatron_layout(case[0], Grid(made.source.ranks, tp=case[1][0], pp=case[1][1]), dtype=str(dtype)[6:])
    expected = [(block_amax(matrix), quantize_blocks(matrix)[0]) for matrix in full]
    made = quantized(base, engine_layout(case[0], Grid(tuple(range(case[2])), tp=case[2])), made.which)
    tables = {rank: BlockTable(made, rank) for rank in made.source.ranks}
    held = {rank: filled(base.on(rank), full) for rank in tables}
    scales, split = {}, {}
    for rank, table in tables.items():
        scales[rank], split[rank] = BlockScales(table, CPU), SplitBlocks(table, CPU)
        scales[rank].prepare(held[rank], None)  # without the maximum over the other ranks
    largest = reduce(torch.maximum, [split[rank].collect(scales[rank].amax) for rank in tables])
    for rank, table in tables.items():
        split[rank].spread(largest, scales[rank].amax)
        boxes = np.concatenate([table.pieces, parts_of(table.pieces, np.random.default_rng(seed))])
        places = table.places(boxes)
        flats = [scales[rank].scales, *(held[rank][name].view(-1) for name, _ in base.on(rank).parameters)]
        for piece, place in zip(boxes, places, strict=True):
            check_piece(piece, place, flats[piece["parameter"]], scales[rank].amax, *expected[piece["tensor"]])


def parts_of(pieces: Array, random: np.random.Generator) -> Array:
    """Cuts one random box out of each of `pieces`, like a plan."""
    parts = pieces.copy()
    for start, extent in (("row", "rows"), ("col", "cols")):
        skipped = random.integers(0, pieces[extent])
        parts[start] += skipped
        parts[extent] = random.integers(1, pieces[extent] - skipped + 1)
        parts["offset"] += skipped * (pieces["stride"] if start == "row" else 1)
    return parts


def check_piece(piece: np.void, place: np.void, flat: Tensor, amax: Tensor, whole_amax: Tensor, whole: Tensor) -> None:
    _, row, col, rows, cols, _, offset, stride = piece.tolist()
    box = slice(row, row + rows), slice(col, col + cols)
    blocks = touched((row, col, rows, cols))
    entries = amax[place["amax_offset"] :].as_strided(
        (blocks[0].stop - blocks[0].start, blocks[1].stop - blocks[1].start), (int(place["amax_stride"]), 1)
    )
    assert torch.equal(entries.view(torch.int32), whole_amax[blocks].view(torch.int32))
    phases = {"row_phase": int(place["row_phase"]), "col_phase": int(place["col_phase"])}
    inverse = per_element(inverse_scales_of(entries), torch.Size((rows, cols)), **phases)
    found = quantize_elements(flat[offset:].as_strided((rows, cols), (stride, 1)), inverse)
    assert torch.equal(found.view(torch.uint8), whole[box].view(torch.uint8))


def one_rank(tensors: CanonicalTensors, parameters: list[tuple[str, tuple[int, ...]]], pieces: list[Box]) -> Layout:
    on = RankLayout(tuple(parameters), np.array(pieces, dtype=PIECE))
    return Layout((0,), (0,), tensors, uniform(len(tensors.names), "float32"), lambda part: on)


def stacked_experts(rows: tuple[int, ...], width: int, num_experts: int) -> tuple[CanonicalTensors, Layout]:
    """Returns one parameter [experts, rows, width]. Each expert stacks tensors of `rows` rows."""
    names = [f"expert{e}.part{i}" for e in range(num_experts) for i in range(len(rows))]
    tensors = CanonicalTensors(tuple(names), tuple((size, width) for size in rows) * num_experts)
    pieces, row = [], 0
    for number, (size, _) in enumerate(tensors.shapes):
        pieces.append((number, 0, 0, size, width, 0, row * width, width))
        row += size
    return tensors, one_rank(tensors, [("experts", (num_experts, sum(rows), width))], pieces)


def destination_parameters(tensors: CanonicalTensors, destination: Layout) -> dict[str, tuple[int, ...]]:
    pieces = [(i, 0, 0, *shape, i, 0, shape[1]) for i, shape in enumerate(tensors.shapes)]
    source = one_rank(tensors, [*zip(tensors.names, tensors.shapes, strict=True)], pieces)
    made = quantized(source, destination, np.ones(len(tensors.names), dtype=bool))
    return dict(made.destination.on(0).parameters)


def test_scales_of_stacked_experts_are_stacked() -> None:
    found = destination_parameters(*stacked_experts((256, 256), 300, num_experts=3))
    assert found == {"experts": (3, 512, 300), "experts_scale_inv": (3, 4, 3)}
    found = destination_parameters(*stacked_experts((200, 100), 128, num_experts=2))
    assert found["experts_scale_inv"] == (2, 3, 1)


def test_scales_that_do_not_stack_are_flat() -> None:
    """In the first case two tensors lie side by side. In the second case a tensor touches two columns of blocks, and
    the tensor below it touches one."""
    tensors = CanonicalTensors(("left", "right"), ((10, 300), (10, 300)))
    pieces = [(0, 0, 0, 10, 300, 0, 0, 600), (1, 0, 0, 10, 300, 0, 300, 600)]
    found = destination_parameters(tensors, one_rank(tensors, [("both", (10, 600))], pieces))
    assert found["both_scale_inv"] == (6,)
    pieces = [(0, 0, 100, 10, 100, 0, 0, 100), (1, 0, 0, 10, 100, 0, 1000, 100)]
    found = destination_parameters(tensors, one_rank(tensors, [("both", (20, 100))], pieces))
    assert found["both_scale_inv"] == (3,)


def test_fused_rows_are_stacked_by_the_blocks_that_they_touch() -> None:
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 48}
    architecture = tiny_architecture("llama", hidden_size=192, ffn_hidden_size=200, **heads)
    on = layouts(architecture, (1, 1, 1), tp=2).destination.on(1)
    shapes = dict(on.parameters)
    # Rank 1 of 2 holds rows 192 to 384 of q (blocks 1 and 2), 96 to 192 of k and of v (blocks 0 and 1).
    assert shapes["model.layers.0.self_attn.qkv_proj.weight_scale_inv"] == (6, 2)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight_scale_inv"] == (4, 2)
    assert shapes["model.layers.1.mlp.down_proj.weight_scale_inv"] == (2, 2)


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    architecture = tiny_architecture("qwen2")
    source, destination = megatron_layout(architecture, Grid((0,))), engine_layout(architecture, Grid((0,)))
    with pytest.raises(ValueError, match=r"input_layernorm\.weight \(12,\) cannot be quantised: it is not a matrix"):
        quantized(source, destination, np.ones(len(source.tensors.names), dtype=bool))
    with pytest.raises(ValueError, match=r"has shape \(3,\); expected"):
        quantized(source, destination, np.ones(3, dtype=bool))
    only_keys = np.array([name.endswith("k_proj.weight") for name in source.tensors.names])
    made = quantized(source, destination, only_keys)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight holds both tensors to be quantised and others"):
        made.destination.on(0)
    with pytest.raises(ValueError, match="is float8_e4m3 in the destination already"):
        quantized(made.source, made.destination, made.destination.types == ElementType.FLOAT8_E4M3)


def test_boxes_outside_the_pieces_of_a_rank_are_refused() -> None:
    table = BlockTable(layouts(tiny_architecture(), (2, 1, 1), tp=1), 0)
    boxes: Array = table.pieces.copy()
    boxes["rows"] += 1
    with pytest.raises(ValueError, match="is not within one piece"):
        table.places(boxes)


def test_a_rank_of_the_destination_alone_has_no_blocks() -> None:
    made = layouts(tiny_architecture(), (2, 1, 1), tp=4)
    scales = BlockScales(BlockTable(made, 3), CPU)
    assert scales.table.num_entries == 0
    assert scales.prepare(None, None) is None


def test_45000_matrices_take_a_second() -> None:
    """The experts are separate matrices. 64 source parts share them, and one destination rank has all of them."""
    num_experts, num_parts = 45056, 64
    tensors = CanonicalTensors(tuple(f"expert{i}" for i in range(num_experts)), ((2048, 7168),) * num_experts)
    pieces = np.zeros(num_experts, dtype=PIECE)
    pieces["tensor"], pieces["parameter"] = np.arange(num_experts), np.arange(num_experts) % (num_experts // num_parts)
    pieces["rows"], pieces["cols"], pieces["stride"] = 2048, 7168, 7168
    parameters = tuple((f"expert{i}", (2048, 7168)) for i in range(num_experts // num_parts))
    per_part = [RankLayout(parameters, share) for share in np.split(pieces, num_parts)]
    types = uniform(num_experts, "bfloat16")
    source = Layout(tuple(range(num_parts)), tuple(range(num_parts)), tensors, types, lambda part: per_part[part])
    whole = pieces.copy()
    whole["parameter"], whole["offset"] = 0, np.arange(num_experts) * 2048 * 7168
    on = RankLayout((("experts", (num_experts, 2048, 7168)),), whole)
    destination = Layout((0,), (0,), tensors, types, lambda part: on)
    start = time.process_time()
    made = quantized(source, destination, np.ones(num_experts, dtype=bool))
    for part in range(num_parts):
        made.source.part(part)
    shapes = dict(made.destination.on(0).parameters)
    table = BlockTable(made, 5)
    assert len(table.slices) == num_experts // num_parts and table.num_split == 0
    assert time.process_time() - start < 3
    assert shapes["experts_scale_inv"] == (num_experts, 16, 56)
