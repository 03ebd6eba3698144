"""Columns of a prompt file that reward functions ask for: whose rows they are of, and what is refused."""

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.tokenizer import PromptEncoder, TextDecoder
from rltrain.errors import ConfigError, DataError
from rltrain.rewards.functions import load_rewards
from rltrain.roles.scoring import Scorables, sample_records
from tests.unit.packed_experience import packed_experience
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

ROWS = [
    {"prompt": "a", "label": "1", "level": 1, "meta": {"x": [1, None]}},
    {"prompt": "b", "label": "2", "level": 2},
    {"prompt": "c", "label": "3", "meta": None},
]


def dataset_of(file: schema.PromptFile, chat_template: str | None = None, **data: Any) -> PromptDataset:
    section = schema.Data(train=file, **data)
    encoder = PromptEncoder(byte_tokenizer(chat_template), section)
    return load_prompts(file, section, encoder, needs="label", config_key="data.train")


def columns(path: Path, *, label_key: str = "label", data: dict[str, Any] | None = None, **wanted: Any) -> RowColumns:
    file = schema.PromptFile(path=str(path), label_key=label_key)
    return read_columns(dataset_of(file, **data or {}), file, config_key="data.train", **{"required": {}} | wanted)


def parquet_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *ROWS)
    of_rows = columns(path, required={"level": "f"}, optional={"meta", "nowhere"})
    assert [of_rows[index] for index in range(3)] == [
        {"level": 1, "meta": {"x": [1, None]}},
        {"level": 2},
        {"meta": None},
    ]
    assert [columns(path, every=True)[index] for index in range(3)] == ROWS


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    from_parquet = columns(parquet_file(tmp_path, *ROWS), required={"level": "f"}, optional={"meta"})
    assert from_parquet[0] == {"level": 1, "meta": {"x": [1, None]}}
    assert from_parquet[2] == {"level": None, "meta": None}


def test_columns_are_of_the_rows_that_are_used(tmp_path: Path) -> None:
    lines = ["{", {"prompt": "x" * 50, "label": "", "n": 0}, *({"prompt": "p", "label": "", "n": n} for n in (1, 2, 3))]
    of_rows = columns(
        jsonl(tmp_path, *lines), data={"on_bad_row": "skip", "max_prompt_tokens": 10}, required={"n": "f"}
    )
    assert [of_rows[index]["n"] for index in range(len(of_rows))] == [1, 2, 3]


@settings(max_examples=30)
@given(labels=st.lists(st.one_of(st.text(max_size=5), st.integers(), st.lists(st.integers())), min_size=1, max_size=5))
def test_labels_are_there_as_they_stand_in_the_file(tmp_path_factory: Any, labels: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("labels")
    path = jsonl(folder, *({"prompt": "p", "reward_model": {"truth": label, "style": "rule"}} for label in labels))
    of_rows = columns(path, label_key="reward_model.truth", label=True)
    assert [of_rows.label_value(index, of_rows[index]) for index in range(len(labels))] == labels


@pytest.mark.parametrize("write", [jsonl, parquet_file])
def test_a_column_that_no_row_has_is_refused(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path, {"prompt": "p", "label": "l", "level": 1})
    with pytest.raises(DataError) as refusal:
        columns(path, required={"level": "x", "solution": "reward.function 'own:score'"})
    assert str(refusal.value) == (
        f"data.train.path: {str(path)!r} has no column 'solution', which reward.function 'own:score' takes; its "
        "columns are prompt, label, level"
    )


@pytest.mark.parametrize(("value", "kind"), [(b"png", "bytes"), (date(2026, 1, 2), "date")])
def test_what_json_cannot_write_is_refused(tmp_path: Path, value: Any, kind: str) -> None:
    path = parquet_file(tmp_path, {"prompt": "p", "label": "l", "inside": [{"image": value}], "level": 1})
    with pytest.raises(DataError, match=r"rows.parquet row 1: the row has \[\{'image': .*\(list\) under 'inside'"):
        columns(path, every=True)
    assert columns(path, required={"level": "f"})[0] == {"level": 1}


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *ROWS)
    file = schema.PromptFile(path=str(path))
    dataset = dataset_of(file)
    jsonl(tmp_path, ROWS[0])
    with pytest.raises(DataError, match="has changed since its prompts were read"):
        read_columns(dataset, file, config_key="data.train", required={"prompt": "f"})


def scorables(folder: Path, *functions: str, label_key: str | None = "label", rows: Any = ROWS) -> Scorables:
    file = schema.PromptFile(path=str(jsonl(folder, *rows)), label_key=label_key)
    parts = tuple(schema.RewardPart(function=function, name=f"f{n}") for n, function in enumerate(functions))
    decoder = TextDecoder(byte_tokenizer())
    dataset = dataset_of(file, CHAT_TEMPLATE)
    return Scorables(load_rewards(schema.Reward(functions=parts)), dataset, decoder, file, "data.train")


def drawn(folder: Path, *functions: str, **kwargs: Any) -> Any:
    """The second of two samples, of the second row: a prompt of 3 tokens, then "AB"."""
    experience = packed_experience([(3, 2), (3, 2)]).with_fields(
        prompt_ids=torch.tensor([0, 1]),
        tokens=torch.tensor([5, 6, 7, 33, 34] * 2),
        truncated=torch.tensor([False, True]),
    )
    return scorables(folder, *functions, **kwargs).of(experience, step=9)[1]


def test_records_of_samples_have_what_the_model_was_shown(tmp_path: Path) -> None:
    """The whole text with special tokens, where it differs from the row's; nothing of the response."""
    source, tokenizer = scorables(tmp_path, "math"), byte_tokenizer()
    texts = [("<eos>[user]a\n[bot]", "1"), ("b", "2"), ("", ""), ("c", "3")]
    ids = [(tokenizer(prompt)["input_ids"], tokenizer(response)["input_ids"]) for prompt, response in texts]
    ids[2] = [5, 6], []
    shape = [(len(prompt), len(response)) for prompt, response in ids]
    experience = packed_experience(shape).with_fields(
        prompt_ids=torch.tensor([0, 1, 1, 0]),
        tokens=torch.tensor([token for pair in ids for part in pair for token in part]),
    )
    records = [*sample_records(source, experience, 0, ())]
    assert [record.get("rendered_prompt") for record in records] == ["<eos>[user]a\n[bot]", None, None, "c"]
    assert [(record["prompt"], record["response"]) for record in records][:2] == [("a", "1"), ("b", "2")]


def test_functions_that_ask_for_nothing_get_nothing(tmp_path: Path) -> None:
    source = scorables(tmp_path, "math", "exact_match")
    assert source.columns is None and not source.fields
    sample = drawn(tmp_path, "math")
    assert (sample.prompt, sample.label, sample.step) == ("b", "2", 9)
    assert sample.row == {} and sample.response_ids == ()


def test_functions_get_what_any_of_them_asks_for(tmp_path: Path) -> None:
    sample = drawn(tmp_path, "tests.unit.peer_rewards.slime", "math")
    assert sample.response == byte_tokenizer().decode([33, 34])
    assert (sample.prompt_ids, sample.response_ids, sample.response_mask) == ([5, 6, 7], [33, 34], [True, True])
    assert (sample.label_value, sample.truncated, sample.sample_id, sample.messages) == ("2", True, 101, ())
    chat = {"prompt": [{"role": "user", "content": "b"}], "label": "2"}
    assert drawn(tmp_path, "tests.unit.peer_rewards.slime", rows=[chat, chat]).messages == chat["prompt"]
    assert drawn(tmp_path, "tests.unit.peer_rewards.ours").row == ROWS[1]


def test_a_file_without_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "solution": "1"}] * 2
    sample = drawn(tmp_path, "tests.unit.peer_rewards.trl", label_key=None, rows=rows)
    assert (sample.label, sample.row) == ("", rows[1])
    with pytest.raises(
        ConfigError, match="data.train.label_key: got null, but reward.functions.0.function 'math' takes"
    ):
        scorables(tmp_path, "math", label_key=None, rows=rows)
    with pytest.raises(DataError, match=r"has no key 'label'; .* \(rows without labels: label_key null\)"):
        scorables(tmp_path, "tests.unit.peer_rewards.trl", rows=rows)
