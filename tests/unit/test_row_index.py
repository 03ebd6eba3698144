"""Rows that are not held: an index says where they stand, and they are those that reading the files would hold."""

import gzip
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rltrain.config import schema
from rltrain.data import prompts, row_index
from rltrain.data.columns import read_columns
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompts import Needs, PromptDataset, load_prompts
from rltrain.data.row_index import IndexedRows, IndexFolder
from rltrain.data.rows import count_lines
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import DataError
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.unit.shared_store import on_ranks, open_store
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

PART_BYTES = 50
"""Of files here: a line or a few."""


@pytest.fixture(autouse=True)
def small_parts() -> Any:
    """What is large: every file."""
    with mock.patch.object(prompts, "INDEXED_BYTES", 1), mock.patch.object(row_index, "PART_BYTES", PART_BYTES):
        yield


tokenizer = cache(byte_tokenizer)


def alone() -> JobStore:
    """Of a job of one process."""
    return JobStore(World(0, 1, 0, 1, torch.device("cpu"), dist.HashStore(), timeout_s=10))


def load(
    file: schema.PromptFile,
    folder: Path | IndexFolder | None,
    template: Any = None,
    needs: Needs = "label",
    **data: Any,
) -> PromptDataset:
    section = schema.Data(train=file, **data)
    encoder = PromptEncoder(tokenizer(template), section)
    indexes = IndexFolder(folder, alone()) if isinstance(folder, Path) else folder
    return load_prompts(file, section, encoder, needs=needs, config_key="data.train", indexes=indexes)


def told(file: schema.PromptFile, folder: Path | None, **data: Any) -> Any:
    """Rows with their origins and what was left out of each source; or the refusal."""
    try:
        dataset = load(file, folder, **data)
    except DataError as refusal:
        return str(refusal)
    assert all(isinstance(rows, IndexedRows) == (folder is not None) for rows in dataset.rows_of_sources)
    difficulties = [source.difficulties.tolist() for source in dataset.sources]
    return [*dataset.rows], [source.dropped for source in dataset.sources], difficulties


@pytest.mark.parametrize("what", ["skip", "cut", "refuse"])
def test_rows_with_long_responses_are_told_apart_as_in_held_files(tmp_path: Path, what: str) -> None:
    rows = [{"prompt": "p", "response": "r" * number} for number in range(1, 12)]
    file = schema.PromptFile(path=str(jsonl(tmp_path, *rows)))
    limits: dict[str, Any] = {"needs": "response", "on_long_row": what}
    for limit, num_long in ((6, 6), (7, 5)):  # another limit has an index of its own
        found, held = (told(file, folder, max_response_tokens=limit, **limits) for folder in (tmp_path, None))
        assert found == held
        if what == "refuse":
            assert f"rows.jsonl:{limit}: in the row the response has {limit + 1} tokens" in found
        else:
            kept, (dropped,), _ = found
            assert (dropped.num_long, dropped.num_cut) == ((num_long, 0) if what == "skip" else (0, num_long))
            assert len(kept) == 11 - dropped.num_long


PROMPTS = st.one_of(st.text(max_size=12), st.just([{"role": "user", "content": "é"}]), st.none(), st.just("x" * 5000))
GOOD = st.fixed_dictionaries({"prompt": PROMPTS}, optional={"label": st.integers(), "level": st.integers()})
LINES = st.one_of(
    GOOD.map(lambda row: json.dumps(row).encode()),
    GOOD.map(lambda row: b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode(errors="ignore") + b"\r"),
    st.sampled_from([b"", b"  ", b"{", b"[1]", b"\xff", b'{"prompt": "p", "label": "l", "level": 1}']),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max_prompt_tokens": st.just(8),
        "min_prompt_tokens": st.just(2),
        "curriculum": st.just({"key": "level", "steps": 2}),
        "chat_template": st.just("never"),
    },
)


def write_lines(path: Path, lines: Sequence[bytes], ends: bool) -> Path:
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@settings(max_examples=25)
@given(
    files=st.lists(
        st.tuples(st.lists(LINES, max_size=12), st.booleans(), st.sampled_from(["", "", ".gz"])), min_size=1, max_size=3
    ),
    rows=st.sampled_from(["", "", "", "@[1:5]"]),
    max_rows=st.sampled_from([None, None, None, 1, 3]),
    data=SETTINGS,
    on_bad_row=st.sampled_from(["skip", "skip", "refuse"]),
)
def test_indexed_rows_are_those_that_are_held(
    tmp_path_factory: Any, files: Any, rows: str, max_rows: int | None, data: Any, on_bad_row: str
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    paths = [
        str(write_lines(folder / f"{number}.jsonl{suffix}", lines, ends))
        for number, (lines, ends, suffix) in enumerate(files)
    ]
    file = schema.PromptFile(path=(*(path + rows for path in paths), *paths[:1]), max_rows=max_rows)
    asked = {"template": CHAT_TEMPLATE, "on_bad_row": on_bad_row, **data}
    held, indexed = told(file, None, **asked), told(file, folder / "indexes", **asked)
    assert indexed == held
    if not isinstance(held, str):
        assert told(file, folder / "indexes", **asked) == held, "as it was found"
        assert {path.suffix for path in (folder / "indexes").iterdir()} <= {".index", ".copies"}


@settings(max_examples=20)
@given(lines=st.lists(LINES, max_size=20), ends=st.booleans(), part=st.integers(1, 40))
def test_lines_of_parts_are_those_of_the_file(tmp_path_factory: Any, lines: Any, ends: bool, part: int) -> None:
    path = write_lines(tmp_path_factory.mktemp("lines") / "rows.jsonl", lines, ends)
    content = path.read_bytes()
    bounds = [*range(0, len(content), part), len(content)]
    begins = [0, *(place + 1 for place, byte in enumerate(content) if byte == 0x0A)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        assert count_lines(path, begin, end) == sum(begin <= place < end for place in begins)


TABLE = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 9))), min_size=1)


@settings(max_examples=15)
@given(table=TABLE, group=st.integers(1, 5), kind=st.sampled_from(["parquet", "file", "stream", "list"]))
def test_rows_of_tables_are_those_that_are_held(tmp_path_factory: Any, table: Any, group: int, kind: str) -> None:
    folder = tmp_path_factory.mktemp("tables")
    rows = [{"prompt": prompt, "label": label, "level": number} for number, (prompt, label) in enumerate(table)]
    path = folder / {"parquet": "rows.parquet", "list": "rows.json"}.get(kind, "rows.arrow")
    columns = pa.Table.from_pylist(rows)
    if kind == "list":
        path.write_text(json.dumps([*rows, 1]))
    elif kind == "parquet":
        parquet.write_table(columns, path, row_group_size=group)
    else:
        write = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with write(str(path), columns.schema) as sink:
            sink.write_table(columns, max_chunksize=group)
    file = schema.PromptFile(path=str(path))
    curriculum = {"key": "level", "steps": 1}
    held = told(file, None, on_bad_row="skip", curriculum=curriculum)
    assert told(file, folder / "indexes", on_bad_row="skip", curriculum=curriculum) == held
    if not isinstance(held, str):
        asked: dict[str, Any] = {"config_key": "data.train", "required": {"level": "f"}, "every": kind == "list"}
        of_held = read_columns(load(file, None, on_bad_row="skip"), file, **asked)
        of_index = read_columns(load(file, folder / "indexes", on_bad_row="skip"), file, **asked)
        assert [of_index[row] for row in range(len(of_index))] == [of_held[row] for row in range(len(of_held))]


def large_file(folder: Path, num_rows: int = 40) -> schema.PromptFile:
    rows = ({"prompt": f"{n}+1=", "label": n + 1, "level": -n % 7} for n in range(num_rows))
    return schema.PromptFile(path=str(jsonl(folder, *rows)))


def test_what_decides_which_rows_are_usable_decides_which_index_is_found(tmp_path: Path) -> None:
    file, folder = large_file(tmp_path), tmp_path / "indexes"
    path = Path(str(file.path))

    def is_made(file: schema.PromptFile = file, **asked: Any) -> bool:
        with mock.patch.object(row_index, "index_part", wraps=row_index.index_part) as made:
            load(file, folder, **asked)
        return made.called

    assert is_made() and not is_made()
    assert is_made(max_prompt_tokens=5) and is_made(min_prompt_tokens=2) and is_made(on_bad_row="skip")
    assert is_made(template=CHAT_TEMPLATE) and is_made(template=CHAT_TEMPLATE, system_prompt="s")
    assert is_made(file.model_copy(update={"label_key": "level"})) and is_made(curriculum={"key": "level", "steps": 1})
    os.utime(path, ns=(0, 1))
    assert is_made() and not is_made()
    path.write_text(path.read_text() * 2)
    assert is_made() and len(load(file, folder)) == 80


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file, folder = large_file(tmp_path), tmp_path / "indexes"
    held = told(file, None)
    assert told(file, folder) == held
    (index,) = folder.iterdir()
    content = index.read_bytes()
    place = content.index(b'"num_rows"')
    changed = content[:place] + b'"mum_rows"' + content[place + 10 :]
    index.write_bytes({"cut": content[:-50], "changed": changed, "empty": b""}[damage])
    assert told(file, folder) == held and "is damaged" in caplog.text
    assert index.read_bytes() == content


@pytest.mark.parametrize("table", [False, True])
def test_a_row_of_a_file_that_has_changed_is_refused(tmp_path: Path, table: bool) -> None:
    file = large_file(tmp_path)
    if table:
        rows = [{"prompt": "p", "label": str(n)} for n in range(9)]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=3)
        file = schema.PromptFile(path=str(tmp_path / "rows.parquet"))
    dataset, origin = load(file, tmp_path / "indexes"), load(file, None)[5].origin
    assert dataset[0].label
    with Path(str(file.path)).open("ab") as end:
        end.write(b"\n")
    with pytest.raises(DataError, match=f"^{origin}: .* has changed since its rows were checked"):
        dataset[5]


def test_a_file_that_changes_while_its_rows_are_checked_is_refused(tmp_path: Path) -> None:
    file, index_part = large_file(tmp_path), row_index.index_part

    def meanwhile(*arguments: Any) -> None:
        index_part(*arguments)
        os.utime(str(file.path), ns=(0, 1))

    with mock.patch.object(row_index, "index_part", meanwhile):
        dataset = load(file, tmp_path / "indexes")
    with pytest.raises(DataError, match="has changed since its rows were checked"):
        dataset[0]


def test_ranks_make_an_index_together(tmp_path: Path) -> None:
    file, folder, num_ranks = large_file(tmp_path, 200), tmp_path / "indexes", 3
    checked = [0] * num_ranks

    class Counted(IndexFolder):
        def claim(self, key: str) -> int:
            checked[self.job_store.world.rank] += key.endswith("/checked")
            return super().claim(key)

    def of_rank(rank: int, store: dist.Store) -> Any:
        world = World(rank, num_ranks, rank, num_ranks, torch.device("cpu"), store, timeout_s=10)
        dataset = load(file, Counted(folder, JobStore(world)))
        return [*dataset.rows]

    with open_store() as store:
        found = on_ranks(store, of_rank, num_ranks)
    assert found == [[*load(file, None).rows]] * num_ranks
    num_parts = -(-Path(str(file.path)).stat().st_size // PART_BYTES)
    assert sum(checked) == num_parts, "each part was checked once"
    assert [path.suffix for path in folder.iterdir()] == [".index"]


def test_orders_are_the_same_by_an_index(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    weights = {one: 1.0, two: 2.0}
    sources = [schema.PromptSource(path=str(large_file(folder, 20).path), weight=weights[folder]) for folder in weights]
    file = schema.PromptFile(sources=tuple(sources))
    data: Any = {"curriculum": {"key": "level", "steps": 3, "easy": "high"}}
    config: Any = mock.Mock(seed=3, data=schema.Data(train=file, **data), batch=mock.Mock(prompts_per_step=4))
    held, indexed = (prompt_order(load(file, folder, **data), config) for folder in (None, tmp_path / "indexes"))
    assert [indexed.row(place) for place in range(60)] == [held.row(place) for place in range(60)]
