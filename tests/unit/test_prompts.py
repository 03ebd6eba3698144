"""Rows become prompts, from one source or several."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rltrain.config import schema
from rltrain.data.columns import read_columns
from rltrain.data.prompt_order import PromptOrder, prompt_order
from rltrain.data.prompts import PromptDataset, load_prompts, repeated_within_a_step, report_dropped
from rltrain.data.tokenizer import PromptEncoder, end_token_ids, load_tokenizer
from rltrain.errors import CheckpointError, ConfigError, DataError
from rltrain.roles.inputs import read_prompts
from tests.support.chat_families import ADD, SEARCH, tokenizer_of

GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per UTF-8 byte. Lengths can then be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=chat_template)


def load(
    path: Path,
    *,
    chat_template: str | None = None,
    needs: Any = "label",
    columns: dict[str, Any] | None = None,
    **data: Any,
) -> PromptDataset:
    file = schema.PromptFile(path=str(path), **(columns or {}))
    settings = schema.Data(train=file, **data)
    encoder = PromptEncoder(byte_tokenizer(chat_template), settings)
    return load_prompts(file, settings, encoder, needs=needs, config_key="data.train")


def jsonl(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def decoded(dataset: PromptDataset, row: int) -> str:
    return str(dataset.encoder.tokenizer.decode(dataset.prompt_tokens(row)))


def test_plain_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "1+1=", "label": "2"}, "", {"prompt": "é", "label": "x", "other": [1]})
    dataset = load(path)
    assert [(row.prompt, row.label) for row in dataset.rows] == [("1+1=", "2"), ("é", "x")]
    assert dataset[1].origin == f"{path}:3"
    assert dataset.prompt_text(0) == decoded(dataset, 0) == "1+1="
    assert (dataset.dropped.num_bad, dataset.dropped.num_too_long) == (0, 0)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("72", "72"), ("", ""), (72, "72"), (-0.5, "-0.5"), (72.0, "72.0"), (True, "true"),
        (["a", 1], '["a", 1]'), ({"tests": "é"}, '{"tests": "é"}'),
    ],
)  # fmt: skip
def test_labels_become_text(tmp_path: Path, label: Any, text: str) -> None:
    assert load(jsonl(tmp_path, {"prompt": "p", "label": label}))[0].label == text


@pytest.mark.parametrize("label", [{"answer": 5}, ["a"], {}])
def test_a_plain_label_is_no_json(tmp_path: Path, label: Any) -> None:
    """A reward function for texts would compare with JSON's spelling of such a label."""
    path = jsonl(tmp_path, {"prompt": "p", "label": 5}, {"prompt": "p", "label": label})
    with pytest.raises(DataError) as refusal:
        load(path, needs="plain label")
    assert str(refusal.value).startswith(
        f"{path}:2: the row has {label} under 'label', which the reward function would"
    )
    assert "(a field of an object: label_key label.FIELD)" in str(refusal.value)
    assert len(load(path, needs="plain label", on_bad_row="skip")) == 1


@pytest.mark.parametrize(("function", "accepted"), [("exact_match", False), ("math", True), ("module:function", True)])
def test_exact_match_compares_plain_labels(tmp_path: Path, function: str, accepted: bool) -> None:
    path = jsonl(tmp_path, {"prompt": "p", "label": {"answer": 5}})
    byte_tokenizer().save_pretrained(tmp_path)
    config = schema.Config(
        steps=1,
        placement={"actor": 0},
        model=schema.Model(path=str(tmp_path)),
        data=schema.Data(train=schema.PromptFile(path=str(path))),
        reward=schema.Reward(function=function),
    )
    if accepted:
        assert read_prompts(config).train[0].label == '{"answer": 5}'
    else:
        with pytest.raises(DataError, match="would compare as JSON text"):
            read_prompts(config)


def test_nested_keys_and_keys_that_hold_dots(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {"in": {"text": "a"}, "reward_model": {"ground_truth": 7}},
        {"in.text": "b", "reward_model": {"ground_truth": "8"}},
    )
    dataset = load(path, columns={"prompt_key": "in.text", "label_key": "reward_model.ground_truth"})
    assert [(row.prompt, row.label) for row in dataset.rows] == [("a", "7"), ("b", "8")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "label": ', "is not JSON: Expecting value at column 25"),
        ('["a"]', "is a JSON list; expected one JSON object per line"),
        ('{"question": "a", "label": "1"}', "has no key 'prompt'; its keys are 'question', 'label'"),
        ('{"prompt": "a"}', "has no key 'label'; its keys are 'prompt'"),
        (
            r'{"prompt": "hi \ud83d there", "label": "1"}',
            r"has a text under 'prompt' with '\ud83d', half of a surrogate",
        ),
        (
            r'{"prompt": [{"role": "user", "content": "\udc00"}], "label": "1"}',
            r"has a text under 'prompt' with '\udc00', half of a surrogate pair",
        ),
        ('{"prompt": "a", "label": NaN}', "has nan under 'label'; expected a label: a text, a finite number"),
        ('{"prompt": "a", "label": [1e999]}', "has [inf] under 'label'; expected a label: a text, a finite number"),
        ('{"prompt": 5, "label": "1"}', "has 5 under 'prompt'; expected a text or a list of chat messages, not empty"),
        ('{"prompt": "", "label": "1"}', "has '' under 'prompt'"),
        ('{"prompt": [], "label": "1"}', "has [] under 'prompt'"),
        ('{"prompt": "a", "label": null}', "has None under 'label'; expected a label"),
        ('{"prompt": [{"role": "user"}], "label": "1"}', "has the chat message {'role': 'user'} under 'prompt'"),
        ('{"prompt": ["hello"], "label": "1"}', "has the chat message 'hello' under 'prompt'"),
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "cannot be read: it is nested too deeply"),
        ('{"prompt": "a", "label": ' + "9" * 5000 + "}", "cannot be read: it has a whole number of more than"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line_or_skipped_and_counted(tmp_path: Path, line: str, reason: str) -> None:
    good = {"prompt": "p", "label": "l"}
    path = jsonl(tmp_path, good, line, good)
    with pytest.raises(DataError) as refusal:
        load(path, chat_template=CHAT_TEMPLATE)
    assert f"{path}:2: the row {reason}" in str(refusal.value)
    assert "data.on_bad_row=skip" in str(refusal.value)
    dataset = load(path, chat_template=CHAT_TEMPLATE, on_bad_row="skip")
    assert (len(dataset), dataset.dropped.num_bad) == (2, 1)
    assert reason in dataset.dropped.problems[0]
    assert "1 bad rows skipped" in str(dataset.dropped)


@pytest.mark.parametrize(("template", "is_told"), [("hello", True), (CHAT_TEMPLATE, False)])
def test_different_prompts_of_the_same_tokens_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, is_told: bool
) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}], "label": "1"} for text in ("a", "a", "b")]
    path = jsonl(tmp_path, *rows)
    with caplog.at_level(logging.WARNING):
        report_dropped("data.train", load(path, chat_template=template))
    said = f"data.train: the prompts of {path}:1 and {path}:3 differ, but the model is shown the same "
    assert (said in caplog.text) == is_told
    assert bool(caplog.text) == is_told


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "label": "1"}\n{"prompt": "caf\xe9", "label": "1"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:2: the row is not UTF-8"):
        load(path)
    assert len(load(path, on_bad_row="skip")) == 1


def test_only_the_first_problems_are_kept(tmp_path: Path) -> None:
    dataset = load(jsonl(tmp_path, *["{"] * 50, {"prompt": "p", "label": "l"}), on_bad_row="skip")
    assert dataset.dropped.num_bad == 50
    assert len(dataset.dropped.problems) == 5


@pytest.mark.parametrize("content", ["", "\n\n", "{\n"])
def test_a_file_without_usable_rows_is_refused_even_when_skipping(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"data.train: '.*empty.jsonl' has no usable row"):
        load(path, on_bad_row="skip")


def test_missing_files_and_unknown_kinds(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.train.path: there is no file '.*nowhere.jsonl'"):
        load(tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.csv").write_text("prompt,label\n")
    with pytest.raises(DataError, match=r"unknown kind; expected a file that ends in .jsonl"):
        load(tmp_path / "rows.csv")


def test_prompts_over_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "label": str(n)} for n in (3, 10, 11, 50)]
    dataset = load(jsonl(tmp_path, *rows), max_prompt_tokens=10)
    assert [row.label for row in dataset.rows] == ["3", "10"]
    assert dataset.dropped.num_too_long == 2
    with pytest.raises(DataError, match="max_prompt_tokens: 2.*4 prompts too long"):
        load(jsonl(tmp_path, *rows), max_prompt_tokens=2)


def test_the_limit_counts_the_chat_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "xxxx", "label": "1"}, {"prompt": "xxxxx", "label": "2"})
    limit = len("[user]xxxx\n[bot]")
    dataset = load(path, chat_template=CHAT_TEMPLATE, max_prompt_tokens=limit)
    assert [row.label for row in dataset.rows] == ["1"]
    assert len(dataset.prompt_tokens(0)) == limit


def test_max_rows_counts_usable_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path, "{", *({"prompt": "p", "label": str(n)} for n in range(9)))
    dataset = load(path, columns={"max_rows": 3}, on_bad_row="skip")
    assert [row.label for row in dataset.rows] == ["0", "1", "2"]


def test_chat_template_on_texts_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi", "name": "x"}]
    path = jsonl(tmp_path, {"prompt": "Hi", "label": ""}, {"prompt": messages, "label": ""})
    dataset = load(path, chat_template=CHAT_TEMPLATE)
    assert decoded(dataset, 0) == "[user]Hi\n[bot]"
    assert decoded(dataset, 1) == "[system]Own.\n[user]Hi\n[bot]"
    assert dataset.prompt_text(1) == "Own.\n\nHi"
    with_system = load(path, chat_template=CHAT_TEMPLATE, system_prompt="Be brief.")
    assert decoded(with_system, 0) == "[system]Be brief.\n[user]Hi\n[bot]"
    assert decoded(with_system, 1) == "[system]Own.\n[user]Hi\n[bot]"


def test_without_a_chat_template(tmp_path: Path) -> None:
    plain = jsonl(tmp_path, {"prompt": "Hi", "label": ""}, name="plain.jsonl")
    assert decoded(load(plain), 0) == "Hi"
    never = schema.Data(train=schema.PromptFile(path=str(plain)), chat_template="never")
    assert not PromptEncoder(byte_tokenizer(CHAT_TEMPLATE), never).uses_template
    messages = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "Hi"}], "label": ""})
    with pytest.raises(
        DataError, match="chat messages under 'prompt', but the checkpoint's tokenizer has no chat templ"
    ):
        load(messages)
    with pytest.raises(ConfigError, match="data.system_prompt is set, but"):
        load(plain, system_prompt="Be brief.")


def test_variables_of_the_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "Hi", "label": ""}, {"prompt": "Hi", "label": "", "tools": [{"name": "t"}]})
    template = CHAT_TEMPLATE + "{{ tools[0].name if tools }}{{ '' if enable_thinking else '<think></think>' }}"
    told = load(path, chat_template=template, chat_template_args={"enable_thinking": False})
    assert decoded(told, 0) == "[user]Hi\n[bot]<think></think>"
    thinking = load(path, chat_template=template, chat_template_args={"enable_thinking": True})
    assert decoded(thinking, 0) == "[user]Hi\n[bot]"
    with pytest.raises(ConfigError, match="got enable_thought, but the checkpoint's chat template has no such"):
        load(path, chat_template=template, chat_template_args={"enable_thought": True})
    with pytest.raises(ConfigError, match="got enable_thinking, but the checkpoint's tokenizer has no chat template"):
        load(path, chat_template_args={"enable_thinking": True})


def test_a_template_that_refuses_its_messages(tmp_path: Path) -> None:
    template = "{{ raise_exception('no system role') if messages[0].role == 'system' }}[user]"
    path = jsonl(tmp_path, {"prompt": "Hi", "label": ""})
    with pytest.raises(DataError, match="refuses messages of roles system, user: no system role"):
        load(path, chat_template=template, system_prompt="Be brief.")


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": f"q{n}"}], "reward_model": {"ground_truth": n}, "unused": "x"}
        for n in range(10)
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    columns = {"label_key": "reward_model.ground_truth"}
    from_parquet = load(path, chat_template=CHAT_TEMPLATE, columns=columns)
    from_jsonl = load(jsonl(tmp_path, *rows), chat_template=CHAT_TEMPLATE, columns=columns)
    assert [(r.prompt, r.label) for r in from_parquet.rows] == [(r.prompt, r.label) for r in from_jsonl.rows]
    assert from_parquet[9].label == "9"


def test_a_null_stays_where_somebody_wrote_it(tmp_path: Path) -> None:
    def row(arguments: Any, parameters: Any) -> dict[str, Any]:
        calls = [{"id": None, "function": {"name": "f", "arguments": arguments, "other": None}}]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        return {"prompt": messages, "label": "1", "tools": [{"name": "f", "strict": None, "parameters": parameters}]}

    def said(path: Path) -> Any:
        template = "{{ tools[0].name if tools }}" + CHAT_TEMPLATE
        loaded = load(path, chat_template=template, columns={"tools_key": "tools"})
        return [
            (row.prompt[1]["tool_calls"], json.loads(row.tools))
            for row in loaded.rows
            if not isinstance(row.prompt, str)
        ]

    written = row({"a": 1, "b": None, "c": [None, {"d": None}]}, {"x": {"default": None}})
    arguments, parameters = written["prompt"][1]["tool_calls"][0]["function"]["arguments"], {"x": {"default": None}}
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    assert said(jsonl(tmp_path, written)) == [(calls, [{"name": "f", "parameters": parameters}])]

    columns = pa.Table.from_pylist([row({"a": 1}, {"x": 1}), row({"b": 2}, {"y": 2})])  # structs of a and b, of x and y
    parquet.write_table(columns, tmp_path / "rows.parquet")
    assert said(tmp_path / "rows.parquet") == [
        ([{"function": {"name": "f", "arguments": {"a": 1}}}], [{"name": "f", "parameters": {"x": 1}}]),
        ([{"function": {"name": "f", "arguments": {"b": 2}}}], [{"name": "f", "parameters": {"y": 2}}]),
    ]


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["a", None, "c"], "label": ["1", "2", "3"]}), path)
    with pytest.raises(DataError, match=r"rows.parquet row 2: the row has None under 'prompt'"):
        load(path)
    assert [row.prompt for row in load(path, on_bad_row="skip").rows] == ["a", "c"]
    with pytest.raises(DataError, match="none of the columns answer, question; its columns are prompt, label"):
        load(path, columns={"prompt_key": "question", "label_key": "answer"})
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="no readable Parquet file"):
        load(path)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file lies outside the repository")
def test_gsm8k_loads_in_a_second() -> None:
    start = time.process_time()
    dataset = load(GSM8K, columns={"prompt_key": "question", "label_key": "answer"}, max_prompt_tokens=4096)
    assert time.process_time() - start < 1
    assert len(dataset) == 7473
    assert dataset[0].label.endswith("#### 72")


def test_every_epoch_shuffles_all_rows_anew() -> None:
    order = PromptOrder(10, seed=0, shuffle=True)
    rows = [row for step in range(15) for row in order.rows_for_step(step, 4)]
    epochs = [rows[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert (
        rows[:10]
        != [row for step in range(3) for row in PromptOrder(10, seed=1, shuffle=True).rows_for_step(step, 4)][:10]
    )


def test_without_shuffling_rows_come_in_the_file_s_order() -> None:
    order = PromptOrder(5, seed=0, shuffle=False)
    assert [order.rows_for_step(step, 3) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


@given(step=st.integers(0, 10**6), size=st.integers(1, 40), num_rows=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_a_step_s_rows_depend_on_nothing_but_seed_and_step(step: int, size: int, num_rows: int, seed: int) -> None:
    rows = PromptOrder(num_rows, seed=seed, shuffle=True).rows_for_step(step, size)
    other = PromptOrder(num_rows, seed=seed, shuffle=True)
    other.rows_for_step(step + 1, size)
    assert other.rows_for_step(step, size) == rows
    assert len(rows) == size and all(0 <= row < num_rows for row in rows)


def test_no_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model.path: there is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_checkpoint_may_name_more_tokens_that_end_a_turn(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path) == frozenset()
    for text, tokens in (("{}", set()), ('{"eos_token_id": 3}', {3}), ('{"eos_token_id": [3, 5]}', {3, 5})):
        (tmp_path / "generation_config.json").write_text(text)
        assert end_token_ids(tmp_path) == tokens
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    for text, tokens in (('{"eos_token_id": 7}', {7}), ('{"text_config": {"eos_token_id": [8]}}', {8})):
        (tmp_path / "config.json").write_text(text)
        assert end_token_ids(tmp_path) == tokens
    for text in ("{", "[]", '{"eos_token_id": "</s>"}'):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="generation_config.json"):
            end_token_ids(tmp_path)


def source(path: Path, **keys: Any) -> schema.PromptSource:
    return schema.PromptSource(path=str(path), **keys)


def load_sources(
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
    dataset = load_sources(
        source(numbered(tmp_path, "a", 3), max_rows=2), source(tests, prompt_key="question", label_key="answer.value")
    )
    assert [(row.prompt, row.label) for row in dataset.rows] == [("a0", "0"), ("a1", "1"), ("c", "3")]
    assert [dataset.source_of(index) for index in range(3)] == ["a", "a", "math"]


def test_columns_and_labels_of_each_source(tmp_path: Path) -> None:
    """Both slices are of one file, so their rows have equal places."""
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
        {"prompt": 3},
        {"prompt": "a" * 9, "label": ""},
    )
    good = numbered(tmp_path, "good", 2)
    dataset = load_sources(source(good), source(rows), on_bad_row="skip", max_prompt_tokens=8)
    assert [row.prompt for row in dataset.rows] == ["good0", "good1", "abc"]
    report_dropped("data.train", dataset)
    (message,) = caplog.messages
    assert message.startswith("data.train (rows): 1 bad rows skipped (unusable value: 1), 1 prompts too long")
    assert f"{rows}:2: the row has 3 under 'prompt'" in message
    with pytest.raises(DataError, match=r"data.train.sources.0: .* has no usable row \(data.max_prompt_tokens: 2\)"):
        load_sources(
            source(jsonl(tmp_path, {"prompt": "abc", "label": ""}, name="s.jsonl")),
            source(rows),
            on_bad_row="skip",
            max_prompt_tokens=2,
        )


def test_without_weights_all_rows_are_one_set(tmp_path: Path) -> None:
    """The order equals that of one file with the same rows."""
    parts = [numbered(tmp_path, "a", 3), numbered(tmp_path, "b", 5)]
    whole = load_sources(schema.PromptSource(path=tuple(map(str, parts))))
    apart = load_sources(*map(source, parts))
    orders = [prompt_order(dataset, config_of(dataset)) for dataset in (whole, apart)]
    streams = [[order.row(position) for position in range(20)] for order in orders]
    assert streams[0] == streams[1] and sorted(streams[0][:8]) == [*range(8)]


def test_weights_decide_how_often_a_source_comes(tmp_path: Path) -> None:
    dataset = load_sources(
        source(numbered(tmp_path, "a", 3), weight=3.0), source(numbered(tmp_path, "b", 50), weight=1.0)
    )
    order = prompt_order(dataset, config_of(dataset))
    titles = [dataset.source_of(order.row(position)) for position in range(128)]
    assert titles.count("a") == 96 and titles[:64].count("a") == 48
    again = prompt_order(dataset, config_of(dataset))
    assert again.row(77) == order.row(77), "any position can be computed alone"


def test_a_curriculum_sorts_by_a_column_of_each_source(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{level}", "label": "", "meta": {"level": level}} for level in (3, 0.5, 2, True)]
    path = jsonl(tmp_path, *rows)
    curriculum = schema.Curriculum(key="meta.level", steps=4)
    dataset = load_sources(source(path), curriculum=curriculum)
    settings = config_of(dataset, curriculum=curriculum).model_copy(update={"batch": schema.Batch(prompts_per_step=1)})
    order = prompt_order(dataset, settings)
    assert [dataset[order.row(position)].prompt for position in range(4)] == ["p0.5", "pTrue", "p2", "p3"]
    backwards = {"curriculum": curriculum.model_copy(update={"easy": "high"})}
    order = prompt_order(dataset, settings.model_copy(update={"data": settings.data.model_copy(update=backwards)}))
    assert [dataset[order.row(position)].prompt for position in range(4)] == ["p3", "p2", "pTrue", "p0.5"]
    with pytest.raises(DataError, match=r"the row has 'hard' under 'level'; expected a number \(data.curriculum.key\)"):
        load_sources(
            source(numbered(tmp_path, "a", 1, level="hard")), curriculum=schema.Curriculum(key="level", steps=1)
        )


def without_nulls(value: Any) -> Any:
    """Returns objects without the keys of other rows. A row keeps its own keys."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == "tools"}
    return value


def test_tools_are_written_into_the_prompt(tmp_path: Path) -> None:
    """Tools are objects or JSON text. Columns of Parquet add the keys of other rows' tools as nulls."""
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
        # The order of an object's keys in a column depends on the release of pyarrow.
        (tmp_path / "rows.parquet", rendered(without_nulls(table.to_pylist()))),
    ):
        dataset = load_sources(source(path, tools_key="tools", label_key=None), tokenizer=tokenizer)
        assert [list(dataset.prompt_tokens(row)) for row in range(len(rows))] == ids, path.name
    objects = source(jsonl(tmp_path, *rows), tools_key="tools", label_key=None)
    short = load_sources(objects, tokenizer=tokenizer, max_prompt_tokens=len(expected[0]))
    assert len(short) == 3 and short.dropped.num_too_long == 1, "tools count as prompt tokens"


def test_messages_with_tool_calls(tmp_path: Path) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},
    ]
    tokenizer = tokenizer_of("qwen2_5")
    dataset = load_sources(source(jsonl(tmp_path, {"prompt": messages}), label_key=None), tokenizer=tokenizer)
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
        load_sources(rows, tokenizer=tokenizer_of("qwen2_5"))
    assert problem in str(refusal.value)


def test_tools_that_nobody_would_see(tmp_path: Path) -> None:
    rows = source(jsonl(tmp_path, {"prompt": "p", "tools": [ADD]}), tools_key="tools", label_key=None)
    with pytest.raises(DataError, match="has tools under 'tools', but the checkpoint's tokenizer has no chat template"):
        load_sources(rows)
    with pytest.raises(ConfigError, match="does not write the tools that it is given"):
        load_sources(rows, tokenizer=byte_tokenizer(CHAT_TEMPLATE))


def test_a_step_of_more_prompts_than_there_are_is_said() -> None:
    assert repeated_within_a_step(32, 32) is None
    said = repeated_within_a_step(5, 1000)
    assert said and said.startswith(
        "data.train: 5 usable rows, and a step takes batch.prompts_per_step = 1,000, so some"
    )
