"""Files of rows of every kind, and what a path of the config stands for."""

import bz2
import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, ipc, parquet

from rltrain.config import schema
from rltrain.data.row_index import IndexedFile, TableAccess
from rltrain.data.rows import BadRow, read_rows, read_source
from rltrain.errors import DataError

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


def prompts(path: Any, **asked: Any) -> list[str]:
    return [row["prompt"] for row in rows_of(path, **asked)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name, ROWS)
    assert rows_of(tmp_path / name) == ROWS
    assert rows_of(f"{tmp_path / name}@[1:3]") == ROWS[1:3]
    first, _ = next(iter(read_rows(tmp_path / name, ["meta.level"], "data.train.path")))
    assert first.startswith(str(tmp_path / name)), "where the row stands"


@pytest.mark.parametrize("name", [name for name in KINDS if "jsonl" not in name or name.count(".") > 1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    if name == "lines.json":
        return  # every line stands for itself
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
    assert rows_of(f"{tmp_path}{part}") == [ROWS[number] for number in expected], "of a folder alike"


@pytest.mark.parametrize("part", ["@[1]", "@[-3:]", "@[a:b]", "@[0:10:2]"])
def test_what_is_no_slice(tmp_path: Path, part: str) -> None:
    with pytest.raises(DataError, match=r"data.train.path: got '.*'; expected rows as @\[first:end\]"):
        rows_of(f"rows.jsonl{part}")


def write_folder(folder: Path, **files: str) -> Path:
    """Each file has one row, whose prompt is the given text."""
    for name, prompt in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jsonl").write_bytes(text([{"prompt": prompt}]))
    return folder


def test_lists_folders_and_patterns(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", b="2", a="1", sub__c="3")
    (tmp_path / "one/notes.md").write_text("no rows")
    (tmp_path / "one/.hidden.jsonl").write_text("{}")
    assert prompts(tmp_path / "one") == ["1", "2", "3"]
    assert prompts(f"{tmp_path}/one/[ab].jsonl") == ["1", "2"]
    assert prompts(f"{tmp_path}/**/*.jsonl") == ["1", "2", "3"]
    assert prompts([f"{tmp_path}/one/b.jsonl", f"{tmp_path}/one/a.jsonl", f"{tmp_path}/one@[1:2]"]) == ["2", "1", "2"]
    for wrong, match in (
        ("nothing/*.jsonl", "no file fits"),
        ("gone.jsonl", "there is no file"),
        ("one/notes.md", "of"),
    ):
        with pytest.raises(DataError, match=f"data.train.path: .*{match}"):
            rows_of(f"{tmp_path}/{wrong}")


def test_a_folder_with_several_splits_needs_the_one_that_is_meant(tmp_path: Path) -> None:
    write_folder(tmp_path, train__part_0="a", train__part_1="b", test__part_0="c")
    assert prompts(tmp_path, split="train") == ["a", "b"]
    assert prompts(tmp_path, split="test") == ["c"]
    with pytest.raises(DataError, match=r"data.train.split: got nothing; expected one of those .* has: test, train"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match=r"has no file of rows for the split 'dev'"):
        rows_of(tmp_path, split="dev")
    named = write_folder(tmp_path / "by name", **{"train-00000": "d", "train-00001": "e", "test-00000": "f"})
    assert prompts(named, split="train") == ["d", "e"]


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    """The form of save_to_disk: of one data set, and of several splits of one."""
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
    with pytest.raises(DataError, match=r"data.train.split: got 'dev'; expected one of those .* has: train, test"):
        rows_of(tmp_path, split="dev")
    (tmp_path / "train/state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}')
    with pytest.raises(DataError, match="chooses rows by an index"):
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
    assert prompts(tmp_path, subset="easy") == ["0"]
    assert prompts(tmp_path, subset="hard", split="train") == ["1", "2"]
    with pytest.raises(DataError, match=r"data.train.subset: got nothing; expected one of .*: easy, hard"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match=r"data.train.split: got nothing; expected one of .*: train, test"):
        rows_of(tmp_path, subset="hard")
    (tmp_path / "README.md").write_text(README.replace("- config_name: easy", "- config_name: easy\n  default: true"))
    assert prompts(tmp_path) == ["0"], "its default"
    (tmp_path / "README.md").write_text("# No head\n")
    assert prompts(tmp_path, subset="easy") == ["0"]


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
