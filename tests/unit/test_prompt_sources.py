"""Several sources of prompts in one dataset: whose rows are whose, what is left out, tools, and their order."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rltrain.config import schema
from rltrain.data.columns import read_columns
from rltrain.data.prompt_order import prompt_order
from rltrain.data.prompts import PromptDataset, load_prompts, repeated_within_a_step, report_dropped
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import ConfigError, DataError
from tests.chat_families import ADD, SEARCH, tokenizer_of
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl


def source(path: Path, **keys: Any) -> schema.PromptSource:
    return schema.PromptSource(path=str(path), **keys)


def load(
    *sources: schema.PromptSource, tokenizer: Any = None, needs: Any = "label", shared: Any = None, **data: Any
) -> PromptDataset:
    settings = schema.Data(train=schema.PromptFile(sources=sources, **shared or {}), **data)
    encoder = PromptEncoder(tokenizer or byte_tokenizer(), settings)
    return load_prompts(settings.train, settings, encoder, needs=needs, config_key="data.train")


def config_of(dataset: PromptDataset, seed: int = 0, **data: Any) -> schema.Config:
    return schema.Config(
        steps=1,
        seed=seed,
        placement={"actor": 0},
        model=schema.Model(path="m"),
        data=schema.Data(train=schema.PromptFile(path="t"), **data),
        batch=schema.Batch(prompts_per_step=4),
    )


def numbered(folder: Path, name: str, count: int, **more: Any) -> Path:
    rows = [{"prompt": f"{name}{number}", "label": str(number)} | more for number in range(count)]
    return jsonl(folder, *rows, name=f"{name}.jsonl")


def test_sources_stand_one_after_the_other(tmp_path: Path) -> None:
    tests = jsonl(tmp_path, {"question": "c", "answer": {"value": 3}}, name="math.jsonl")
    dataset = load(
        source(numbered(tmp_path, "a", 3), max_rows=2), source(tests, prompt_key="question", label_key="answer.value")
    )
    assert [(row.prompt, row.label) for row in dataset.rows] == [("a0", "0"), ("a1", "1"), ("c", "3")]
    assert [dataset.source_of(index) for index in range(3)] == ["a", "a", "math"]


def test_columns_and_labels_of_each_source(tmp_path: Path) -> None:
    """Both slices are of one file, whose rows have the same places twice."""
    path = numbered(tmp_path, "a", 4, level=7)
    file = schema.PromptFile(
        sources=(source(Path(f"{path}@[0:2]"), name="x"), source(path, label_key="level", name="y"))
    )
    data = schema.Data(train=file)
    dataset = load_prompts(file, data, PromptEncoder(byte_tokenizer(), data), needs="label", config_key="data.train")
    columns = read_columns(dataset, file, config_key="data.train", required={"prompt": "f"}, label=True)
    read = [(columns[i]["prompt"], columns.label_value(i, columns[i])) for i in range(len(columns))]
    assert read == [("a0", "0"), ("a1", "1"), ("a0", 7), ("a1", 7), ("a2", 7), ("a3", 7)]


def test_what_is_left_out_is_counted_by_source_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = jsonl(
        tmp_path,
        {"prompt": "abc", "label": ""},
        {"prompt": "a", "label": ""},
        {"prompt": 3},
        {"prompt": "a" * 9, "label": ""},
    )
    good = numbered(tmp_path, "good", 2)
    dataset = load(source(good), source(rows), on_bad_row="skip", min_prompt_tokens=2, max_prompt_tokens=8)
    assert [row.prompt for row in dataset.rows] == ["good0", "good1", "abc"]
    report_dropped("data.train", dataset)
    (message,) = caplog.messages
    assert message.startswith(
        "data.train (rows): 1 bad rows skipped (unusable value: 1), 1 prompts too long, 1 prompts too short"
    )
    assert f"{rows}:3: the row has 3 under 'prompt'" in message
    with pytest.raises(
        DataError, match=r"data.train.sources.0: .* has no usable row \(data.max_prompt_tokens: 2, data.min"
    ):
        load(
            source(jsonl(tmp_path, {"prompt": "a", "label": ""}, name="s.jsonl")),
            source(rows),
            on_bad_row="skip",
            max_prompt_tokens=2,
            min_prompt_tokens=2,
        )


def test_without_weights_all_rows_are_one_set(tmp_path: Path) -> None:
    """In the order that one file with the same rows would have."""
    parts = [numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 5)]
    whole = load(schema.PromptSource(path=tuple(map(str, parts))))
    apart = load(*map(source, parts))
    orders = [prompt_order(dataset, config_of(dataset)) for dataset in (whole, apart)]
    streams = [[order.row(position) for position in range(20)] for order in orders]
    assert streams[0] == streams[1] and sorted(streams[0][:8]) == [*range(8)]


def test_weights_decide_how_often_a_source_comes(tmp_path: Path) -> None:
    dataset = load(source(numbered(tmp_path, "a", 3), weight=3.0), source(numbered(tmp_path, "b", 50), weight=1.0))
    order = prompt_order(dataset, config_of(dataset))
    titles = [dataset.source_of(order.row(position)) for position in range(128)]
    assert titles.count("a") == 96 and titles[:64].count("a") == 48
    again = prompt_order(dataset, config_of(dataset))
    assert again.row(77) == order.row(77), "a resumed run asks for any position alone"


def test_a_curriculum_sorts_by_a_column_of_each_source(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{level}", "label": "", "meta": {"level": level}} for level in (3, 0.5, 2, True)]
    path = jsonl(tmp_path, *rows)
    curriculum = schema.Curriculum(key="meta.level", steps=4)
    dataset = load(source(path), curriculum=curriculum)
    settings = config_of(dataset, curriculum=curriculum).model_copy(update={"batch": schema.Batch(prompts_per_step=1)})
    order = prompt_order(dataset, settings)
    assert [dataset[order.row(position)].prompt for position in range(4)] == ["p0.5", "pTrue", "p2", "p3"]
    backwards = {"curriculum": curriculum.model_copy(update={"easy": "high"})}
    order = prompt_order(dataset, settings.model_copy(update={"data": settings.data.model_copy(update=backwards)}))
    assert [dataset[order.row(position)].prompt for position in range(4)] == ["p3", "p2", "pTrue", "p0.5"]
    with pytest.raises(DataError, match=r"the row has 'hard' under 'level'; expected a number \(data.curriculum.key\)"):
        load(source(numbered(tmp_path, "a", 1, level="hard")), curriculum=schema.Curriculum(key="level", steps=1))


def without_nulls(value: Any) -> Any:
    """Returns objects without the keys that only other rows have; a row keeps its own."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == "tools"}
    return value


def test_tools_are_written_into_the_prompt(tmp_path: Path) -> None:
    """Given as objects or as JSON text; columns of Parquet fill up what other rows' tools have."""
    rows = [
        {"prompt": [{"role": "user", "content": "1+1"}], "tools": tools} for tools in ([ADD], [ADD, SEARCH], None, [])
    ]
    tokenizer = tokenizer_of("qwen2_5")
    as_text = [row | {"tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")

    def rendered(rows: list[dict]) -> list[list[int]]:
        return [
            tokenizer.apply_chat_template(
                row["prompt"], tools=row["tools"] or None, add_generation_prompt=True, return_dict=False
            )
            for row in rows
        ]

    expected = rendered(rows)
    for path, ids in (
        (jsonl(tmp_path, *rows), expected),
        (jsonl(tmp_path, *as_text, name="texts.jsonl"), expected),
        # The release of pyarrow decides in which order columns have the keys of objects.
        (tmp_path / "rows.parquet", rendered(without_nulls(table.to_pylist()))),
    ):
        dataset = load(source(path, tools_key="tools", label_key=None), tokenizer=tokenizer)
        assert [list(dataset.prompt_tokens(row)) for row in range(len(rows))] == ids, path.name
    objects = source(jsonl(tmp_path, *rows), tools_key="tools", label_key=None)
    short = load(objects, tokenizer=tokenizer, max_prompt_tokens=len(expected[0]))
    assert len(short) == 3 and short.dropped.num_too_long == 1, "tools count"


def test_messages_with_tool_calls(tmp_path: Path) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},
    ]
    tokenizer = tokenizer_of("qwen2_5")
    dataset = load(source(jsonl(tmp_path, {"prompt": messages}), label_key=None), tokenizer=tokenizer)
    text = tokenizer.decode(dataset.prompt_tokens(0))
    assert '"name": "add", "arguments": {"a": 1}' in text and "<tool_response>\n2\n" in text
    assert dataset.prompt_text(0) == "1+1\n\n2"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p", "tool": [ADD]}, "data.train.sources.0.tools_key: no usable row has tools under 'tools'"),
        ({"prompt": "p", "tools": "["}, "has '[' under 'tools', which is not JSON"),
        ({"prompt": "p", "tools": [{"type": "function"}]}, "expected tools: a list of {type, function: {name, ...}}"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "has a part of type 'image'"),
        ({"prompt": [{"role": "assistant", "content": None}]}, "expected role and content, both texts"),
        ({"prompt": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "a list of {function: {name, arguments}}"),
    ],
)
def test_messages_and_tools_that_are_none(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    rows = source(jsonl(tmp_path, row), tools_key="tools", label_key=None)
    with pytest.raises(DataError) as refusal:
        load(rows, tokenizer=tokenizer_of("qwen2_5"))
    assert problem in str(refusal.value)


def test_tools_that_nobody_would_see(tmp_path: Path) -> None:
    rows = source(jsonl(tmp_path, {"prompt": "p", "tools": [ADD]}), tools_key="tools", label_key=None)
    with pytest.raises(DataError, match="has tools under 'tools', but the checkpoint's tokenizer has no chat template"):
        load(rows)
    with pytest.raises(ConfigError, match="does not write the tools that it is given"):
        load(rows, tokenizer=byte_tokenizer(CHAT_TEMPLATE))


def test_a_step_of_more_prompts_than_there_are_is_said() -> None:
    assert repeated_within_a_step(32, 32) is None
    said = repeated_within_a_step(5, 1000)
    assert said and said.startswith(
        "data.train: 5 usable rows, and a step takes batch.prompts_per_step = 1,000, so some"
    )
