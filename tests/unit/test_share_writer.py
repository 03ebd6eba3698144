"""A rank's share of a checkpoint folder, written while it arrives."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rltrain.checkpoint.durable_file import DurableFile
from rltrain.checkpoint.hf_files import HfFile, StoredPredictionLayers, planned_files
from rltrain.checkpoint.hf_writer import ShareWriter, writing_share, written_rows
from rltrain.checkpoint.safetensors_file import TensorEntry, in_file_order
from rltrain.errors import CheckpointError
from rltrain.models.table import ITEM_BYTES
from rltrain.reshard.layout import Layout, hf_layout, hf_rows, holding_rows
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import MOE, tiny_architecture

ENTRIES = (
    TensorEntry("first", torch.bfloat16, (3, 2)),
    TensorEntry("wide", torch.float32, (2,)),
    TensorEntry("last", torch.bfloat16, (5,)),
)
VALUES = {entry.name: torch.arange(1, 1 + np.prod(entry.shape)).to(entry.dtype).view(entry.shape) for entry in ENTRIES}


def elements_of(layout: Layout, rank: int) -> set[tuple[str, int, int, int, int]]:
    """(parameter, its element, tensor, row, column) of all."""
    mine = layout.on(rank)
    found = set()
    for piece in mine.pieces:
        name = mine.parameters[piece["parameter"]][0]
        for row in range(piece["rows"]):
            for col in range(piece["cols"]):
                place = piece["offset"] + row * piece["stride"] + col
                found.add((name, int(place), int(piece["tensor"]), int(piece["row"] + row), int(piece["col"] + col)))
    return found


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(["qwen3", *MOE]),
    num_writers=st.sampled_from([1, 2, 4]),
    max_bytes=st.sampled_from([1, 700, 20_000, 10**9]),
    max_file_bytes=st.sampled_from([9000, 10**9]),
)
def test_every_row_is_written_once_in_the_order_of_the_files(
    family: str, num_writers: int, max_bytes: int, max_file_bytes: int
) -> None:
    layout = hf_layout(tiny_architecture(family), tuple(range(num_writers)), dtype="bfloat16")
    files = planned_files(layout, max_file_bytes)
    shapes, item = layout.tensors.matrix_shapes, ITEM_BYTES[layout.types]
    turns = list(written_rows(layout, files, max_bytes))
    for writer in layout.ranks:
        names = [entry.name for file in files if file.writer == writer for entry in in_file_order(file.entries)]
        of_writer = [layout.tensors.numbers[name] for name in names]
        found = []
        for rows in turns:
            taken = [(number, *rows[number].tolist()) for number in of_writer if rows[number, 1]]
            sizes = [(end - first) * int(shapes[number, 1] * item[number]) for number, first, end in taken]
            assert sum(sizes) <= max_bytes or len(taken) == 1 == taken[0][2] - taken[0][1]
            assert dict(hf_rows(layout, rows).on(writer).parameters) == {
                layout.tensors.names[number]: (end - first, shapes[number, 1]) for number, first, end in taken
            }
            found += taken
        expected = [(number, row) for number in of_writer for row in range(shapes[number, 0])]
        assert [(number, row) for number, first, end in found for row in range(first, end)] == expected


@settings(max_examples=8, deadline=None)
@given(
    family=st.sampled_from(["qwen3", *MOE]),
    grid=st.sampled_from([Grid((0,)), Grid((0, 1), tp=2), Grid((0, 1), pp=2)]),
    max_bytes=st.sampled_from([2000, 50_000]),
)
def test_rows_of_a_layout_are_all_of_it_at_its_places(family: str, grid: Grid, max_bytes: int) -> None:
    architecture = tiny_architecture(family)
    layout = megatron_layout(architecture, grid)
    saved = hf_layout(architecture, grid.ranks)
    turns = list(written_rows(saved, planned_files(saved, 10**9), max_bytes))
    for rank in grid.ranks:
        parts = [elements_of(holding_rows(layout, rows), rank) for rows in turns]
        assert set.union(*parts) == elements_of(layout, rank)
        assert sum(map(len, parts)) == len(elements_of(layout, rank))


def writer_in(folder: Path) -> AbstractContextManager[ShareWriter]:
    (folder / "config.json").write_text("{}")
    files = [HfFile("a.safetensors", 0, ENTRIES[:2]), HfFile("b.safetensors", 0, ENTRIES[2:])]
    return writing_share(folder, files, StoredPredictionLayers(folder), torch.device("cpu"))


@pytest.mark.parametrize("order", [["wide", "first", "last"], ["last", "first", "wide"], ["first", "wide", "last"]])
def test_what_is_not_due_waits(order: list[str], tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        for name in order:
            memory = writer.memory_for(((name, VALUES[name].shape),))[name]
            memory.copy_(VALUES[name])
            writer.write({name: memory})
    written = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    assert written.keys() == VALUES.keys() and all(torch.equal(written[name], VALUES[name]) for name in VALUES)


def test_rows_come_one_after_the_other_in_memory_that_is_used_again_once_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(file: DurableFile, block: memoryview) -> None:
        time.sleep(0.02)
        write(file, block)

    write, places = DurableFile._write, set()
    monkeypatch.setattr(DurableFile, "_write", slowly)
    with writer_in(tmp_path) as writer:
        writer.write({"wide": VALUES["wide"]})
        for first, end in ((0, 1), (1, 2), (2, 3)):
            memory = writer.memory_for((("first", (end - first, 2)),))["first"]
            memory.copy_(VALUES["first"][first:end])
            places.add(memory.data_ptr())
            writer.write({"first": memory})
        writer.write({"last": VALUES["last"]})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["first"], VALUES["first"]) and len(places) == 2


def test_what_did_not_come_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="a.safetensors: 6 elements of first did not come"),
        writer_in(tmp_path) as w,
    ):
        w.write({"wide": VALUES["wide"]})
