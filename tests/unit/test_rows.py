"""Files of rows: formats, errors, and the index of large ones."""

import bz2
import gzip
import json
import lzma
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import feather, ipc, parquet

from rltrain.config import schema
from rltrain.data import prompts, row_index
from rltrain.data.columns import read_columns
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompts import Needs, PromptDataset, load_prompts
from rltrain.data.row_index import IndexedFile, IndexedRows, IndexFolder, TableAccess
from rltrain.data.rows import BadRow, count_lines, parse_line, read_rows, read_source
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import DataError
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.world import World
from tests.support.shared_store import on_ranks, open_store
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

ROWS = [{"prompt": f"{number}+1=", "meta": {"level": number}} for number in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
Write = Callable[[Path, list[dict[str, Any]]], None]


def text(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_zstd(path: Path, rows: list[dict[str, Any]]) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(text(rows))


def write_arrow(path: Path, rows: list[dict[str, Any]], new: Any = ipc.new_stream) -> None:
    table = pa.Table.from_pylist(rows)
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


KINDS: dict[str, Write] = {
    "rows.jsonl": lambda path, rows: path.write_bytes(text(rows)) and None,
    "rows.ndjson.gz": lambda path, rows: path.write_bytes(gzip.compress(text(rows))) and None,
    "rows.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(text(rows))) and None,
    "rows.jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(text(rows))) and None,
    "rows.jsonl.zst": write_zstd,
    "lines.json": lambda path, rows: path.write_bytes(text(rows)) and None,
    "list.json": lambda path, rows: path.write_bytes(b"\n" + json.dumps(rows, indent=1).encode()) and None,
    "list.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())) and None,
    "rows.parquet": lambda path, rows: parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2),
    "stream.arrow": write_arrow,
    "file.arrow": lambda path, rows: write_arrow(path, rows, ipc.new_file),
    "rows.feather": lambda path, rows: feather.write_feather(pa.Table.from_pylist(rows), str(path)),
}


def rows_of(path: Any, **asked: Any) -> list[Any]:
    return [row for _, row in read_rows(path, None, "data.train.path", **asked)]


def prompts_of(path: Any, **asked: Any) -> list[str]:
    return [row["prompt"] for row in rows_of(path, **asked)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name, ROWS)
    assert rows_of(tmp_path / name) == ROWS
    assert rows_of(f"{tmp_path / name}@[1:3]") == ROWS[1:3]
    first, _ = next(iter(read_rows(tmp_path / name, ["meta.level"], "data.train.path")))
    assert first.startswith(str(tmp_path / name)), "the place begins with the file"


@pytest.mark.parametrize("name", [name for name in KINDS if "jsonl" not in name or name.count(".") > 1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    if name == "lines.json":
        return  # every line is a row
    KINDS[name](tmp_path / name, [{"prompt": f"{number} {'é' * number}"} for number in range(300)])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"data.train.path: '.*' (cannot be read|is no readable|begins as a JSON list)"):
        rows_of(tmp_path / name)


def test_items_of_a_list_that_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('[{"prompt": "a"}, 3]')
    good, bad = rows_of(tmp_path / "list.json")
    assert good == {"prompt": "a"} and isinstance(bad, BadRow) and "is a JSON int" in str(bad)


def test_a_number_with_too_many_digits_spoils_its_own_row(tmp_path: Path) -> None:
    rows = ['{"prompt": "a", "label": [' + "9" * 5000 + "]}", '{"prompt": "b", "label": 7}']
    lines, items = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n".join(rows))
    items.write_text(f"[{', '.join(rows)}]")
    for path in (lines, items):
        first, second = rows_of(path)
        assert isinstance(first, BadRow)
        assert str(first) == "cannot be read: it has a whole number of more than 4300 digits"
        assert second == {"prompt": "b", "label": 7}


CALL_TYPE = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.float32())})
TYPED_COLUMNS: dict[str, tuple[pa.DataType, list[Any], list[Any]]] = {
    "float32": (pa.float32(), [1.1, None, 3.0], [1.1, None, 3.0]),
    "large": (pa.float32(), [1e30, 123456792.0, math.inf], [1e30, 123456792.0, math.inf]),
    "float16": (pa.float16(), [np.float16(1.1), None, np.float16(65504)], [1.1, None, 65504.0]),
    "list": (pa.list_(pa.float32()), [[1.1, None], None, []], [[1.1, None], None, []]),
    "coded": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"], ["a", None, "a"]),
    "map": (
        pa.map_(pa.string(), pa.float32()),
        [[("a", 1.1), ("b", None)], None, []],
        [{"a": 1.1, "b": None}, None, {}],
    ),
    "numbered": (pa.map_(pa.int8(), pa.float32()), [[(1, 1.1)], None, []], [[(1, 1.1)], None, []]),
    "calls": (
        pa.list_(CALL_TYPE),
        [[{"name": "f", "arguments": [("x", 0.1)]}], None, [{"name": "g", "arguments": None}]],
        [[{"name": "f", "arguments": {"x": 0.1}}], None, [{"name": "g", "arguments": None}]],
    ),
}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_values_of_a_table_are_those_that_json_would_have(tmp_path: Path, name: str) -> None:
    table = pa.table({column: pa.array(given, kind) for column, (kind, given, _) in TYPED_COLUMNS.items()})
    if name == "rows.parquet":
        parquet.write_table(table, tmp_path / name)
    else:
        with ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    rows = rows_of(tmp_path / name)
    assert {column: [row[column] for row in rows] for column in TYPED_COLUMNS} == {
        column: expected for column, (*_, expected) in TYPED_COLUMNS.items()
    }
    stat = (tmp_path / name).stat()
    reads = "parquet" if name == "rows.parquet" else "arrow"
    file = IndexedFile(str(tmp_path / name), "", reads, 3, stat.st_size, stat.st_mtime_ns)
    assert [TableAccess(file).at(place, None) for place in range(3)] == rows


@pytest.mark.parametrize(
    ("part", "expected"),
    [("", [0, 1, 2, 3, 4]), ("@[:2]", [0, 1]), ("@[3:]", [3, 4]), ("@[1:4]", [1, 2, 3]), ("@[:]", [0, 1, 2, 3, 4])],
)
def test_slices(tmp_path: Path, part: str, expected: list[int]) -> None:
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    assert rows_of(f"{tmp_path}/rows.jsonl{part}") == [ROWS[number] for number in expected]
    assert rows_of(f"{tmp_path}{part}") == [ROWS[number] for number in expected], (
        "a slice of a folder has the same rows"
    )


@pytest.mark.parametrize("part", ["@[1]", "@[-3:]", "@[a:b]", "@[0:10:2]"])
def test_what_is_no_slice(tmp_path: Path, part: str) -> None:
    with pytest.raises(DataError, match=r"data.train.path: got '.*'; expected rows as @\[first:end\]"):
        rows_of(f"rows.jsonl{part}")


def write_folder(folder: Path, **files: str) -> Path:
    """Writes files of one row each. The prompt is the given text."""
    for name, prompt in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jsonl").write_bytes(text([{"prompt": prompt}]))
    return folder


def test_lists_folders_and_patterns(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", b="2", a="1", sub__c="3")
    (tmp_path / "one/notes.md").write_text("no rows")
    (tmp_path / "one/.hidden.jsonl").write_text("{}")
    assert prompts_of(tmp_path / "one") == ["1", "2", "3"]
    assert prompts_of(f"{tmp_path}/one/[ab].jsonl") == ["1", "2"]
    assert prompts_of(f"{tmp_path}/**/*.jsonl") == ["1", "2", "3"]
    assert prompts_of([f"{tmp_path}/one/b.jsonl", f"{tmp_path}/one/a.jsonl", f"{tmp_path}/one@[1:2]"]) == [
        "2",
        "1",
        "2",
    ]
    for wrong, match in (
        ("nothing/*.jsonl", "no file fits"),
        ("gone.jsonl", "there is no file"),
        ("one/notes.md", "of"),
    ):
        with pytest.raises(DataError, match=f"data.train.path: .*{match}"):
            rows_of(f"{tmp_path}/{wrong}")


def test_a_folder_with_several_splits_needs_the_one_that_is_meant(tmp_path: Path) -> None:
    write_folder(tmp_path, train__part_0="a", train__part_1="b", test__part_0="c")
    assert prompts_of(tmp_path, split="train") == ["a", "b"]
    assert prompts_of(tmp_path, split="test") == ["c"]
    with pytest.raises(DataError, match=r"data.train.split: got nothing; expected one of those in .*: test, train"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match=r"has no file of rows for the split 'dev'"):
        rows_of(tmp_path, split="dev")
    named = write_folder(tmp_path / "by name", **{"train-00000": "d", "train-00001": "e", "test-00000": "f"})
    assert prompts_of(named, split="train") == ["d", "e"]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """The folder has the form of save_to_disk, of one data set and of a data set with several splits."""
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        folder = tmp_path / split
        folder.mkdir()
        parts = [part for part in (rows[:3], rows[3:]) if part]
        names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            write_arrow(folder / name, part)
        state = {"_data_files": [{"filename": name} for name in names], "_split": split, "_fingerprint": "0"}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text('{"features": {}}')
    assert rows_of(tmp_path / "train") == ROWS
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows_of(tmp_path, split="train") == ROWS and rows_of(tmp_path, split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"data.train.split: got 'dev'; expected one of those in .*: train, test"):
        rows_of(tmp_path, split="dev")
    (tmp_path / "train/state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}')
    with pytest.raises(DataError, match="has an index of rows"):
        rows_of(tmp_path, split="train")


README = """---
license: mit
configs:
- config_name: easy
  data_files: easy/*.jsonl
- config_name: hard
  data_files:
  - split: train
    path: [hard/a.jsonl, hard/b.jsonl]
  - split: test
    path: hard/test.jsonl
---
# Sums
"""


def test_a_copy_of_a_repository_of_the_hub(tmp_path: Path) -> None:
    write_folder(tmp_path, easy__x="0", hard__a="1", hard__b="2", hard__test="3", other="4")
    (tmp_path / "README.md").write_text(README)
    assert prompts_of(tmp_path, subset="easy") == ["0"]
    assert prompts_of(tmp_path, subset="hard", split="train") == ["1", "2"]
    with pytest.raises(DataError, match=r"data.train.subset: got nothing; expected one of .*: easy, hard"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match=r"data.train.split: got nothing; expected one of .*: train, test"):
        rows_of(tmp_path, subset="hard")
    (tmp_path / "README.md").write_text(README.replace("- config_name: easy", "- config_name: easy\n  default: true"))
    assert prompts_of(tmp_path) == ["0"], "the default subset"
    (tmp_path / "README.md").write_text("# No head\n")
    assert prompts_of(tmp_path, subset="easy") == ["0"]


def test_sources_take_what_they_do_not_say_from_the_section_around_them() -> None:
    file = schema.PromptFile(
        prompt_key="question",
        label_key=None,
        sources=(
            schema.PromptSource(path="a.jsonl", weight=2.0),
            schema.PromptSource(path=("dir/b.jsonl@[0:5]", "c"), prompt_key="problem", label_key="answer"),
        ),
    )
    first, second = file.parts()
    assert (first.prompt_key, first.label_key, first.weight, first.title) == ("question", None, 2.0, "a")
    assert (second.prompt_key, second.label_key, second.weight, second.title) == ("problem", "answer", None, "b")
    assert [source.title for source in schema.PromptFile(path="hf:owner/some-name@main").parts()] == ["some_name"]


def test_a_source_is_read_by_its_keys(tmp_path: Path) -> None:
    write_folder(tmp_path, train="1", test="2")
    source = schema.PromptSource(path=str(tmp_path), split="test")
    assert [row["prompt"] for _, row in read_source(source, {"prompt"}, "data.train.path")] == ["2"]  # type: ignore[index]


OBJECTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.none(), max_size=3)
AROUND = st.sampled_from([b"", b" ", b"\t", b"\r\n", b"\xef\xbb\xbf", b"{}", b"x", b"\x00", b"\xe9"])


@given(
    st.tuples(AROUND, AROUND, OBJECTS.map(lambda row: json.dumps(row, ensure_ascii=False)) | st.text(), AROUND, AROUND)
)
@example((b"\xef\xbb\xbf", b"  ", '{"a": 1}', b" ", b"\r\n"))
@example((b"", b"", '{"a": 1} {}', b"", b""))
def test_a_line_is_read_as_the_standard_reader_does(parts: tuple[bytes, bytes, str, bytes, bytes]) -> None:
    before, space, text, after, end = parts
    line = before + space + text.encode(errors="replace") + after + end
    try:
        expected = json.loads(line.rstrip().decode("utf-8-sig"))
    except ValueError as error:
        found = parse_line(line)
        assert isinstance(found, BadRow)
        if isinstance(error, json.JSONDecodeError) and "BOM" not in error.msg:  # the message for a second BOM differs
            assert str(found) == f"is not JSON: {error.msg} at column {error.colno}"
        return
    found = parse_line(line)
    assert found == expected if isinstance(expected, dict) else isinstance(found, BadRow)


PART_BYTES = 50
"""Bytes of a part in these tests: one line or a few."""


@pytest.fixture
def small_parts() -> Any:
    """Makes every file count as large."""
    with mock.patch.object(prompts, "INDEXED_BYTES", 1), mock.patch.object(row_index, "PART_BYTES", PART_BYTES):
        yield


tokenizer = cache(byte_tokenizer)


def alone() -> JobStore:
    """Returns the store of a job with one process."""
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
    """Returns rows with their origins and the dropped rows of each source, or the refusal."""
    try:
        dataset = load(file, folder, **data)
    except DataError as refusal:
        return str(refusal)
    assert all(isinstance(rows, IndexedRows) == (folder is not None) for rows in dataset.rows_of_sources)
    difficulties = [source.difficulties.tolist() for source in dataset.sources]
    return [*dataset.rows], [source.dropped for source in dataset.sources], difficulties


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("what", ["skip", "cut", "refuse"])
def test_rows_with_long_responses_are_told_apart_as_in_held_files(tmp_path: Path, what: str) -> None:
    rows = [{"prompt": "p", "response": "r" * number} for number in range(1, 12)]
    file = schema.PromptFile(path=str(jsonl(tmp_path, *rows)))
    limits: dict[str, Any] = {"needs": "response", "on_long_row": what}
    for limit, num_long in ((6, 6), (7, 5)):  # another limit has a separate index
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
RANDOM_LINES = st.one_of(
    GOOD.map(lambda row: json.dumps(row).encode()),
    GOOD.map(lambda row: b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode(errors="ignore") + b"\r"),
    st.sampled_from([b"", b"  ", b"{", b"[1]", b"\xff", b'{"prompt": "p", "label": "l", "level": 1}']),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max_prompt_tokens": st.just(8),
        "curriculum": st.just({"key": "level", "steps": 2}),
        "chat_template": st.just("never"),
    },
)


def write_lines(path: Path, lines: Sequence[bytes], ends: bool) -> Path:
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=25)
@given(
    files=st.lists(
        st.tuples(st.lists(RANDOM_LINES, max_size=12), st.booleans(), st.sampled_from(["", "", ".gz"])),
        min_size=1,
        max_size=3,
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
        assert told(file, folder / "indexes", **asked) == held, "the second load uses the existing index"
        assert {path.suffix for path in (folder / "indexes").iterdir()} <= {".index", ".copies"}


@pytest.mark.usefixtures("small_parts")
@settings(max_examples=20)
@given(lines=st.lists(RANDOM_LINES, max_size=20), ends=st.booleans(), part=st.integers(1, 40))
def test_lines_of_parts_are_those_of_the_file(tmp_path_factory: Any, lines: Any, ends: bool, part: int) -> None:
    path = write_lines(tmp_path_factory.mktemp("lines") / "rows.jsonl", lines, ends)
    content = path.read_bytes()
    bounds = [*range(0, len(content), part), len(content)]
    begins = [0, *(place + 1 for place, byte in enumerate(content) if byte == 0x0A)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        assert count_lines(path, begin, end) == sum(begin <= place < end for place in begins)


TABLE = st.lists(st.tuples(st.text(min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 9))), min_size=1)


@pytest.mark.usefixtures("small_parts")
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


@pytest.mark.usefixtures("small_parts")
def test_what_decides_which_rows_are_usable_decides_which_index_is_found(tmp_path: Path) -> None:
    file, folder = large_file(tmp_path), tmp_path / "indexes"
    path = Path(str(file.path))

    def is_made(file: schema.PromptFile = file, **asked: Any) -> bool:
        with mock.patch.object(row_index, "index_part", wraps=row_index.index_part) as made:
            load(file, folder, **asked)
        return made.called

    assert is_made() and not is_made()
    assert is_made(max_prompt_tokens=5) and is_made(on_bad_row="skip")
    assert is_made(template=CHAT_TEMPLATE) and is_made(template=CHAT_TEMPLATE, system_prompt="s")
    assert is_made(file.model_copy(update={"label_key": "level"})) and is_made(curriculum={"key": "level", "steps": 1})
    os.utime(path, ns=(0, 1))
    assert is_made() and not is_made()
    path.write_text(path.read_text() * 2)
    assert is_made() and len(load(file, folder)) == 80


@pytest.mark.usefixtures("small_parts")
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


@pytest.mark.usefixtures("small_parts")
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


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_changes_while_its_rows_are_checked_is_refused(tmp_path: Path) -> None:
    file, index_part = large_file(tmp_path), row_index.index_part

    def meanwhile(*arguments: Any) -> None:
        index_part(*arguments)
        os.utime(str(file.path), ns=(0, 1))

    with mock.patch.object(row_index, "index_part", meanwhile):
        dataset = load(file, tmp_path / "indexes")
    with pytest.raises(DataError, match="has changed since its rows were checked"):
        dataset[0]


@pytest.mark.usefixtures("small_parts")
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


@pytest.mark.usefixtures("small_parts")
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
