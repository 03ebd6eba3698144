"""Training states in files, by layouts alone: every element is saved once and found again in any other layout."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.errors import CheckpointError
from rltrain.models import canonical_tensors
from rltrain.models.table import Array
from rltrain.reshard.layout import PIECE, Layout, elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.training.shards import answered_for, sharing_groups, within
from tests.model_shards import tiny_architecture
from tests.state_files import COUNTS, PADDING, flats_of, places, random_cuts, ranges_of, save

GRIDS = [(1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 2, 2), (4, 1, 1), (1, 1, 4)]
EXPERT_GRIDS = [
    {"ranks": 4, "ep": 2},
    {"ranks": 4, "tp": 2, "etp": 1},
    {"ranks": 8, "tp": 2, "ep": 2, "etp": 1},
    {"ranks": 8, "tp": 2, "pp": 2, "ep": 2},
    {"ranks": 6, "ep": 1, "etp": 2},
    {"ranks": 8, "tp": 4, "ep": 4, "etp": 1},
]
SHAPES = st.tuples(st.sampled_from(GRIDS), st.booleans(), st.sampled_from(["qwen3", "qwen2", "qwen3_moe"]))


@st.composite
def cut_pieces(draw: st.DrawFn) -> tuple[Array, np.ndarray, np.ndarray]:
    """Two boxes in each of some parameters, and a range of every parameter."""
    count = draw(st.integers(1, 4))
    pieces = np.zeros(2 * count, dtype=PIECE)
    starts, stops = np.zeros((2, count), dtype=np.int64)
    for number in range(count):
        rows, left, right, gap = (draw(st.integers(1, 5)) for _ in range(4))
        stride = left + gap + right
        common = (number, rows, stride)
        for index, (cols, offset) in enumerate([(left, 0), (right, left + gap)]):
            piece = pieces[2 * number + index]
            piece["parameter"], piece["rows"], piece["stride"] = common
            piece["tensor"], piece["cols"], piece["offset"] = 2 * number + index, cols, offset
            piece["row"], piece["col"] = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        limits = st.integers(0, rows * stride)
        starts[number], stops[number] = sorted([draw(limits), draw(limits)])
    return pieces, starts, stops


@given(cut_pieces())
def test_a_range_of_a_piece_is_at_most_three_boxes(cut: tuple[Array, np.ndarray, np.ndarray]) -> None:
    pieces, starts, stops = cut
    found = within(pieces, starts, stops)
    expected = {
        element: (parameter, position - starts[parameter])
        for element, (parameter, position) in places(pieces)
        if starts[parameter] <= position < stops[parameter]
    }
    assert dict(places(found)) == expected
    assert elements(found).sum() == len(expected)
    assert np.unique(found["tensor"], return_counts=True)[1].max(initial=0) <= 3


@cache
def layout_of(shape: tuple[int, int, int], tied: bool, family: str) -> Layout:
    tp, pp, dp = shape
    architecture = tiny_architecture(family, tied_embeddings=tied, num_layers=2)
    return megatron_layout(architecture, Grid(tuple(range(2, 2 + tp * pp * dp)), tp=tp, pp=pp))


def load(layout: Layout, rank: int, files: list[Path]) -> list[Tensor]:
    """The rank's flattened parameters as they are found in the files."""
    flats = [torch.full((int(np.prod(shape)),), PADDING) for _, shape in layout.on(rank).parameters]
    SavedState(files, layout.tensors).read([Destination(MASTER, layout.on(rank).pieces, flats)])
    return flats


@given(SHAPES, st.integers(0, 9))
@settings(max_examples=30)
def test_every_element_is_saved_once(shape: tuple[tuple[int, int, int], bool, str], seed: int) -> None:
    layout = layout_of(*shape)
    saved = [
        element
        for rank in layout.ranks
        for element, _ in places(
            within(answered_for(layout, rank), *ranges_of(layout, rank, random_cuts(seed, layout, rank)))
        )
    ]
    assert len(saved) == len(set(saved)) == layout.tensors.matrix_shapes.prod(axis=1).sum()


@given(st.sampled_from(EXPERT_GRIDS), st.sampled_from(["qwen3_moe", "deepseek_v3"]), st.booleans(), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_every_element_is_saved_once_where_other_ranks_share_experts(
    sizes: dict[str, int], family: str, tied: bool, seed: int
) -> None:
    """Ranks that share out a parameter's states come to the same cuts of it, wherever they begin and end."""
    grid = Grid(tuple(range(sizes["ranks"])), **{name: size for name, size in sizes.items() if name != "ranks"})
    layout = megatron_layout(tiny_architecture(family, tied_embeddings=tied, num_layers=2), grid)
    saved = []
    for groups, of_experts in zip(sharing_groups(grid), (False, True), strict=True):
        for rank in layout.ranks:
            number, mine = next((number, ranks) for number, ranks in enumerate(groups) if rank in ranks)
            limits = []
            for index, (name, shape) in enumerate(layout.on(rank).parameters):
                size, parts = int(np.prod(shape)), len(mine) - 1
                cuts = np.random.default_rng((seed, number, index)).integers(0, size + 1, parts).tolist()
                edges = sorted([0, *cuts, size]) if (".experts." in name) == of_experts else [0] * (parts + 2)
                limits.append(edges[mine.index(rank) :][:2])
            pieces = within(answered_for(layout, rank, groups), *np.array(limits).T)
            saved += [element for element, _ in places(pieces)]
    assert len(saved) == len(set(saved)) == layout.tensors.matrix_shapes.prod(axis=1).sum()


@given(
    st.sampled_from(GRIDS),
    st.sampled_from(GRIDS),
    st.booleans(),
    st.sampled_from(["qwen3", "qwen3_moe"]),
    st.integers(0, 9),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_state_is_loaded_in_any_other_layout(
    tmp_path_factory: pytest.TempPathFactory,
    saved: tuple[int, int, int],
    loaded: tuple[int, int, int],
    tied: bool,
    family: str,
    seed: int,
) -> None:
    files = save(layout_of(saved, tied, family), tmp_path_factory.mktemp("state"), seed)
    layout = layout_of(loaded, tied, family)
    for rank in layout.ranks:
        for found, expected in zip(load(layout, rank, files), flats_of(layout, rank), strict=True):
            assert torch.equal(found, expected.where(expected != PADDING, 0))
    assert SavedState(files, layout.tensors).counts == COUNTS


@dataclass
class Saved:
    """Files of two ranks, and the layout to load them in."""

    files: list[Path]
    layout: Layout

    def load(self) -> None:
        load(self.layout, 2, self.files)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(save(layout_of((2, 1, 1), False, "qwen3"), tmp_path / "actor"), layout_of((1, 1, 1), False, "qwen3"))


def test_no_files_are_an_error(saved: Saved) -> None:
    saved.files = []
    with pytest.raises(CheckpointError, match="no files of this role's training state"):
        saved.load()


def test_a_missing_file_is_named(saved: Saved) -> None:
    saved.files[1].unlink()
    with pytest.raises(CheckpointError, match=r"rank_00003.safetensors does not exist"):
        saved.load()


def test_files_of_too_few_ranks_lack_a_tensor(saved: Saved) -> None:
    saved.files.pop()
    with pytest.raises(CheckpointError, match=r"hold 192 elements of model.embed_tokens.*expected each of 252 once"):
        saved.load()


def test_a_file_given_twice_is_an_error(saved: Saved) -> None:
    saved.files.append(saved.files[0])
    with pytest.raises(CheckpointError, match="missing or twice"):
        saved.load()


def test_a_damaged_file_is_named(saved: Saved) -> None:
    content = saved.files[0].read_bytes()
    saved.files[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"rank_00002.safetensors is damaged or cut short"):
        saved.load()


def test_a_file_of_something_else_is_refused(saved: Saved) -> None:
    save_file({"x": torch.zeros(1)}, saved.files[0])
    with pytest.raises(CheckpointError, match="format None; expected 'rltrain training state 1'"):
        saved.load()


def test_a_file_without_what_it_promises_is_refused(saved: Saved) -> None:
    state = SavedState(saved.files, saved.layout.tensors)
    tensors = load_file(saved.files[0])
    name = flat_name(MASTER, "decoder.layers.0.mlp.linear_fc1.weight")
    for changed in ({k: v for k, v in tensors.items() if k != name}, {**tensors, name: tensors[name][:-1]}):
        save_file(changed, saved.files[0])
        with pytest.raises(CheckpointError, match=f"rank_00002.safetensors: {name} is not what pieces says"):
            state.read([Destination(MASTER, saved.layout.on(2).pieces, flats_of(saved.layout, 2))])


def test_another_model_is_named_with_both_shapes(saved: Saved) -> None:
    saved.layout = megatron_layout(tiny_architecture("qwen3", num_layers=2, vocab_size=22), Grid((2,)))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has shape \[21, 12\] there.* shape \[22, 12\]"):
        saved.load()
    saved.layout = megatron_layout(tiny_architecture("qwen3", num_layers=3), Grid((2,)))
    with pytest.raises(CheckpointError, match=r"layers.2.*does not exist there"):
        saved.load()


def test_files_of_two_saves_are_refused(saved: Saved, tmp_path: Path) -> None:
    later = save(layout_of((2, 1, 1), False, "qwen3"), tmp_path / "later", counts=Counts(8, 6))
    saved.files[1] = later[1]
    with pytest.raises(CheckpointError, match="not saved together"):
        saved.load()


def test_ranks_without_a_share_have_no_say_in_the_counts(saved: Saved, tmp_path: Path) -> None:
    nothing = contents(
        canonical_tensors(tiny_architecture("qwen3", num_layers=2)), [], np.empty(0, PIECE), {}, Counts(7, 0)
    )
    empty = tmp_path / "rank_00000.safetensors"
    save_file(dict(nothing.tensors), empty, dict(nothing.metadata))
    saved.files.insert(0, empty)
    saved.load()
    assert SavedState(saved.files, saved.layout.tensors).counts == COUNTS
