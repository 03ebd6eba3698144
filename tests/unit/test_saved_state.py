"""Optimizer states as boxes of whole tensors, in files and in the memory of other nodes."""

import errno
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.checkpoint import memory_files
from rltrain.checkpoint.memory_files import (
    SPANS_SUFFIX,
    ByteSpan,
    FetchedFile,
    FileServer,
    FileSource,
    merged,
    spans_of,
    spans_there,
    without,
)
from rltrain.checkpoint.run_files import AnyFile, Contents, TensorRows, read_contents, write_files
from rltrain.checkpoint.saved_state import MASTER, Counts, Destination, SavedState, contents, flat_name
from rltrain.errors import CheckpointError
from rltrain.models import canonical_tensors
from rltrain.models.table import Array
from rltrain.reshard.layout import PIECE, Layout, elements
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.world import LOOPBACK
from rltrain.training.shards import answered_for, sharing_groups, within
from tests.support.checkpoint_files import COUNTS, PADDING, flats_of, places, random_cuts, ranges_of, save
from tests.support.model_shards import tiny_architecture

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
    """Draws two boxes in each of some parameters, and a range of every parameter."""
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
    """Returns the rank's flattened parameters, read from the files."""
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
    """Ranks with shares of one parameter's states cut it alike, wherever their shares begin and end."""
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


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda files: files.clear(), "no files of this role's training state"),
        (lambda files: files[1].unlink(), r"rank_00003.safetensors does not exist"),
        (lambda files: files.pop(), r"hold 192 elements of model.embed_tokens.*expected each of 252 once"),
        (lambda files: files.append(files[0]), "missing or duplicated"),
        (lambda files: os.truncate(files[0], files[0].stat().st_size // 2), r"rank_00002.* is damaged or cut short"),
        (lambda files: save_file({"x": torch.zeros(1)}, files[0]), "format None; expected 'rltrain training state 1'"),
    ],
    ids=["no files", "a missing file", "too few ranks", "a file twice", "a damaged file", "something else"],
)
def test_files_that_are_not_a_whole_state_are_refused(saved: Saved, harm: Any, message: str) -> None:
    harm(saved.files)
    with pytest.raises(CheckpointError, match=message):
        saved.load()


def test_a_file_without_what_it_promises_is_refused(saved: Saved) -> None:
    state = SavedState(saved.files, saved.layout.tensors)
    tensors = load_file(saved.files[0])
    name = flat_name(MASTER, "decoder.layers.0.mlp.linear_fc1.weight")
    for changed in ({k: v for k, v in tensors.items() if k != name}, {**tensors, name: tensors[name][:-1]}):
        save_file(changed, saved.files[0])
        with pytest.raises(CheckpointError, match=f"rank_00002.safetensors: {name} does not match the table pieces"):
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


MOMENT = "exp_avg"
NAME = "a/x.safetensors"
VALUES = torch.arange(90_000, dtype=torch.float32)

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda ends: ByteSpan(*ends)), max_size=6)


def numbers(spans: Sequence[ByteSpan]) -> set[int]:
    return {number for span in spans for number in range(span.begin, span.end)}


@given(SPANS, SPANS, st.integers(0, 5))
def test_spans_are_joined_and_what_is_there_is_not_asked_for(spans, others, gap) -> None:
    joined, there = merged(spans, gap), merged(others)
    assert numbers(merged(spans)) == numbers(spans) <= numbers(joined)
    assert all(before.end + gap < after.begin for before, after in pairwise(joined))
    assert numbers(without(joined, there)) == numbers(joined) - numbers(there)
    assert all(span.begin < span.end for span in without(joined, there))


@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 5), st.integers(0, 4), st.integers(0, 20))
def test_rows_are_spans_of_their_own_where_they_lie_far_apart(first, rows, cols, between, gap) -> None:
    found = [*spans_of(TensorRows("x", first, rows, cols, cols + between), 100, 4, gap)]
    elements = {first + row * (cols + between) + col for row in range(rows) for col in range(cols)}
    wanted = {100 + 4 * element + byte for element in elements for byte in range(4)}
    assert wanted <= numbers(found)
    if between * 4 > gap:
        assert numbers(found) == wanted and len(found) == rows


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FileServer]:
    """Yields the server of another node with one file."""
    (tmp_path / "other").mkdir()
    tensors = {"first": VALUES, "second": torch.ones(9, dtype=torch.uint8)}
    write_files(tmp_path / "other", {NAME: Contents(tensors, {"said": "something"})})
    server = FileServer(tmp_path / "other", LOOPBACK)
    yield server
    with suppress(OSError):  # a test may have closed it
        server.close()


@pytest.fixture
def file(served: FileServer, tmp_path: Path) -> FetchedFile:
    return made(served, tmp_path)


def made(served: FileServer, tmp_path: Path) -> FetchedFile:
    (tmp_path / "here" / "a").mkdir(parents=True, exist_ok=True)
    source = FileSource(served.address, NAME, (tmp_path / "other" / NAME).stat().st_size, lambda: None)
    file = FetchedFile(tmp_path / "here" / NAME, source)
    file.begin()
    return file


def bytes_of(folder: Path) -> int:
    return sum(span.end - span.begin for path in folder.rglob(f"*{SPANS_SUFFIX}") for span in spans_there(path))


def test_all_of_it_is_what_it_is_there(file: FetchedFile, tmp_path: Path) -> None:
    found = read_contents(file)
    assert found.tensors["first"].equal(VALUES) and found.metadata == {"said": "something"}
    assert file.place.read_bytes() == (tmp_path / "other" / NAME).read_bytes() and not file.path.exists()


def test_the_ranks_of_a_node_fetch_a_byte_once(served: FileServer, tmp_path: Path, monkeypatch) -> None:
    asked: list[ByteSpan] = []
    send = memory_files._send_spans

    def counted(peer: Any, path: Any, spans: Sequence[ByteSpan]) -> None:
        asked.extend(spans)
        send(peer, path, spans)

    monkeypatch.setattr(memory_files, "_send_spans", counted)
    files = [made(served, tmp_path) for _ in range(4)]
    rows = TensorRows("first", 30_000, 2, 1_000, 30_000)
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(lambda file: file.ask_for_rows([rows]), files))
    assert sum(span.end - span.begin for span in asked) == bytes_of(tmp_path) == memory_files.HEAD_BYTES + 2 * 4_000


def test_where_the_folder_has_no_room_a_rank_keeps_it_itself(file: FetchedFile, tmp_path: Path, monkeypatch) -> None:
    write = os.pwrite

    def into_memory_alone(descriptor: int, block: memoryview, offset: int) -> int:
        if "memfd" in os.readlink(f"/proc/self/fd/{descriptor}"):
            return write(descriptor, block, offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", into_memory_alone)
    before = bytes_of(tmp_path)
    file.ask_for_tensor("second")
    assert read_contents(file).tensors["first"].equal(VALUES)
    assert bytes_of(tmp_path) == before
    with pytest.raises(CheckpointError, match=r"checkpoint\.memory\.folder: cannot write .*fetched: No space left"):
        FetchedFile(tmp_path / "here" / "a" / "y.safetensors", file.source).begin()


def test_what_has_changed_on_its_way_is_refused_and_asked_for_again(file: FetchedFile, monkeypatch) -> None:
    with monkeypatch.context() as wrong:
        wrong.setattr(memory_files, "crc32", lambda block, crc: 7 + len(threading.current_thread().name))
        with pytest.raises(CheckpointError, match=f"{NAME} from {LOOPBACK}: bytes .* have changed on their way"):
            file.ask_for_all()
    assert read_contents(file).tensors["first"].equal(VALUES)


def test_who_has_it_no_more_is_named(file: FetchedFile, served: FileServer, tmp_path: Path) -> None:
    with (tmp_path / "other" / NAME).open("ab") as grown:
        grown.write(b"1")
    with pytest.raises(CheckpointError, match=rf"{NAME} from {LOOPBACK}: it has \d+ bytes there; expected"):
        file.ask_for_all()
    (tmp_path / "other" / NAME).unlink()
    with pytest.raises(CheckpointError, match=f"{NAME} from {LOOPBACK}: the server does not have it"):
        file.ask_for_all()
    served.close()
    with pytest.raises(CheckpointError, match=f"{NAME} from {LOOPBACK}: Connection refused"):
        file.ask_for_all()


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"token": "a", "file": "b", "spans": [[1e999, 2]]}', b"[" * 9999])
def test_who_asks_for_nonsense_gets_nothing_and_ends_no_job(served: FileServer, monkeypatch, line: bytes) -> None:
    failed: list[object] = []
    monkeypatch.setattr("threading.excepthook", failed.append)
    with socket.create_connection((served.address.host, served.address.port), timeout=20) as peer:
        peer.sendall(line + b"\n")
        assert peer.recv(1) == b""
    assert not failed


class Nodes:
    """The nodes of a job with one optimized model. A node has the files of its ranks and of the previous node's ranks.
    Weights are of the kind MASTER, so a rank reads all weights of its part of the model."""

    def __init__(self, folder: Path, num_nodes: int, tp: int) -> None:
        self.folder, self.per_node, self.num_nodes = folder, 2, num_nodes
        self.layout: Layout = megatron_layout(tiny_architecture(), Grid(tuple(range(2 * num_nodes)), tp=tp))
        for rank in self.layout.ranks:
            of_node = rank // self.per_node
            for node in {of_node, (of_node + 1) % num_nodes}:
                write_files(self.at(node), {self.name(rank): self.saved(rank)})
        self.servers = [FileServer(self.at(node), LOOPBACK) for node in range(num_nodes)]

    def at(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def lose(self, node: int) -> None:
        """Replaces a node by an empty one."""
        shutil.rmtree(self.at(node) / "actor")
        (self.at(node) / "actor").mkdir()

    def having(self, rank: int) -> int:
        """Returns a node with the files of a rank."""
        of_node = rank // self.per_node
        return next(
            node for node in (of_node, (of_node + 1) % self.num_nodes) if (self.at(node) / self.name(rank)).exists()
        )

    def name(self, rank: int) -> str:
        return f"actor/rank_{rank:05d}.safetensors"

    def share(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        count = self.layout.parts.count(self.layout.parts[rank])
        sizes = [int(np.prod(shape)) for _, shape in self.layout.on(rank).parameters]
        return ranges_of(self.layout, rank, lambda number: [sizes[number] * i // count for i in range(1, count)])

    def saved(self, rank: int) -> Contents:
        starts, stops = self.share(rank)
        pieces = within(answered_for(self.layout, rank), starts, stops)
        names, flats = [name for name, _ in self.layout.on(rank).parameters], flats_of(self.layout, rank)
        tensors = {
            flat_name(kind, names[i]): flats[i][starts[i] : stops[i]] + (kind == MOMENT)
            for kind in (MASTER, MOMENT)
            for i in np.unique(pieces["parameter"])
        }
        return contents(self.layout.tensors, names, pieces, tensors, COUNTS)

    def files(self, node: int) -> list[AnyFile]:
        found: list[AnyFile] = []
        for rank in self.layout.ranks:
            path = self.at(node) / self.name(rank)
            if path.exists():
                found.append(path)
                continue
            source = FileSource(self.servers[self.having(rank)].address, self.name(rank), self.size(rank), lambda: None)
            found.append(FetchedFile(path, source))
            found[-1].begin()
        return found

    def size(self, rank: int) -> int:
        return (self.at(self.having(rank)) / self.name(rank)).stat().st_size

    def load(self, rank: int) -> None:
        """Reads weights, and moments of this rank's share, and compares them with the saved ones."""
        on, (starts, stops) = self.layout.on(rank), self.share(rank)
        weights = [torch.zeros(int(np.prod(shape))) for _, shape in on.parameters]
        moments = [torch.zeros(int(stop - start)) for start, stop in zip(starts, stops, strict=True)]
        wanted = [
            Destination(MASTER, on.pieces, weights),
            Destination(MOMENT, within(on.pieces, starts, stops), moments),
        ]
        SavedState(self.files(rank // self.per_node), self.layout.tensors).read(wanted)
        for flat, part, expected, start, stop in zip(
            weights, moments, flats_of(self.layout, rank), starts, stops, strict=True
        ):
            real = expected != PADDING
            assert flat[real].equal(expected[real])
            assert part[real[start:stop]].equal(expected[start:stop][real[start:stop]] + 1)

    def overlapped(self, node: int) -> int:
        """Returns the bytes of others' files with elements of this node's ranks, with headers and tables."""
        ranks = range(node * self.per_node, (node + 1) * self.per_node)
        weights = {element for rank in ranks for element, _ in places(self.layout.on(rank).pieces)}
        moments = {
            element for rank in ranks for element, _ in places(within(self.layout.on(rank).pieces, *self.share(rank)))
        }
        num_bytes = 0
        for rank in self.layout.ranks:
            if (self.at(node) / self.name(rank)).exists():
                continue
            saved = within(answered_for(self.layout, rank), *self.share(rank))
            held = {element for element, _ in places(saved)}
            tensors = self.saved(rank).tensors
            values = sum(values.nbytes for name, values in tensors.items() if name.split(".")[0] in (MASTER, MOMENT))
            num_bytes += self.size(rank) - values + 4 * (len(held & weights) + len(held & moments))
        return num_bytes

    def lacking(self, node: int) -> int:
        """Returns the bytes of all files missing on a node."""
        return sum(self.size(rank) for rank in self.layout.ranks if not (self.at(node) / self.name(rank)).exists())


@pytest.mark.parametrize(
    "num_nodes, tp, lost", [(2, 1, True), (4, 1, False), (4, 2, False), (4, 2, True), (8, 2, False)]
)
def test_a_node_fetches_what_its_ranks_overlap(
    tmp_path: Path, monkeypatch, num_nodes: int, tp: int, lost: bool
) -> None:
    monkeypatch.setattr(memory_files, "GAP_BYTES", 0)
    monkeypatch.setattr(memory_files, "HEAD_BYTES", 8)
    nodes, last = Nodes(tmp_path, num_nodes, tp), num_nodes - 1
    if lost:
        nodes.lose(last)
    overlapped, lacking = nodes.overlapped(last), nodes.lacking(last)
    for rank in (2 * last, 2 * last + 1):
        nodes.load(rank)
    for server in nodes.servers:
        server.close()
    assert bytes_of(nodes.at(last)) == overlapped < lacking
