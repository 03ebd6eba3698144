"""A run that goes on notices other rows, reward functions and chat templates, and does what data.on_change says."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rltrain.checkpoint.run_files import RUN_FILE
from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.schema import Config
from rltrain.data.demonstrations import Demonstrations
from rltrain.data.prompt_order import PromptOrder
from rltrain.data.prompts import load_prompts
from rltrain.data.tokenizer import PromptEncoder
from rltrain.errors import CheckpointError
from rltrain.rewards.locating import source_file
from rltrain.roles.inputs import Inputs, data_changes, identity, other_changes
from rltrain.roles.resuming import remaining_order, with_present_inputs
from rltrain.rollout.rollout_state import FixedRows
from rltrain.schedule.iterations import build_order
from tests.unit.schedule_configs import make_config, place
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

NUM_ROWS = 1000


def numbered(folder: Path, count: int = NUM_ROWS, name: str = "train", **of_first: Any) -> Path:
    rows = [{"prompt": f"add {number}", "label": str(number), "level": number % 7} for number in range(count)]
    rows[0] |= of_first
    return jsonl(folder, *rows, name=f"{name}.jsonl")


def config_of(path: Path, *others: Path, reward: str = "exact_match", **data: Any) -> Config:
    train: dict[str, Any] = {"path": str(path)}
    if others:
        train = {"sources": [{"path": str(one), "weight": 1.0 + n} for n, one in enumerate((path, *others))]}
    return make_config(data={"train": train, **data}, reward={"function": reward})


def inputs_of(config: Config, template: str | None = None) -> Inputs:
    """Returns the inputs as run.json has them."""
    tokenizer = byte_tokenizer() if template is None else byte_tokenizer(chat_template=template)
    encoder = PromptEncoder(tokenizer, config.data)
    dataset = load_prompts(config.data.train, config.data, encoder, needs="label", config_key="data.train")
    found: Inputs = json.loads(json.dumps(identity(config, dataset)))
    return found


def test_the_content_decides_and_not_where_it_stands(tmp_path: Path) -> None:
    before = inputs_of(config_of(numbered(tmp_path)))
    (tmp_path / "moved").mkdir()
    moved = inputs_of(config_of(Path(shutil.copy(tmp_path / "train.jsonl", tmp_path / "moved/other.jsonl"))))
    assert moved["paths"] != before["paths"]
    assert [*data_changes(before, moved), *other_changes(before, moved)] == []


Change = Callable[[Path], Config]
CHANGES: Mapping[str, tuple[Change, str]] = {
    "grown": (
        lambda folder: config_of(numbered(folder, NUM_ROWS + 1)),
        r"was .*train\.jsonl \(1,000 usable rows\), and is .*train\.jsonl \(1,001 usable rows\)$",
    ),
    "of other content": (
        lambda folder: config_of(numbered(folder, prompt="another")),
        r"is .* \(1,000 usable rows\) with other content$",
    ),
    "with another label": (lambda folder: config_of(numbered(folder, label="x")), "with other content"),
    "of which fewer are usable": (lambda folder: config_of(folder / "train.jsonl", max_prompt_tokens=6), "100 usable"),
    "in another order": (
        lambda folder: config_of(folder / "train.jsonl", curriculum={"key": "level", "steps": 2}),
        r'data\.curriculum: was null, and is {"key": "level"',
    ),
    "by solved rate": (
        lambda folder: config_of(folder / "train.jsonl", solved_rate={}),
        r"data\.solved_rate: was null",
    ),
    "with a second source": (
        lambda folder: config_of(folder / "train.jsonl", numbered(folder, 5, "more")),
        r"is .*train\.jsonl \(1,000 usable rows\) and .*more\.jsonl \(5 usable rows\)",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_are_others_are_told_in_a_line(tmp_path: Path, name: str) -> None:
    before = inputs_of(config_of(numbered(tmp_path)))
    change, message = CHANGES[name]
    now = inputs_of(change(tmp_path))
    (first, *_) = data_changes(before, now)
    assert re.search(message, first), first
    assert [*other_changes(before, now)] == []


def test_so_are_the_weights_of_sources(tmp_path: Path) -> None:
    path, more = numbered(tmp_path), numbered(tmp_path, 5, "more")
    before, now = inputs_of(config_of(path, more)), inputs_of(config_of(path, more))
    now["order"]["weights"] = [1.0, 3.0]
    expected = "the weights in data.train.sources: was [1.0, 2.0], and is [1.0, 3.0]"
    assert [*data_changes(before, now)] == [expected]


def test_so_are_a_reward_function_and_a_chat_template(tmp_path: Path) -> None:
    own, path = tmp_path / "own.py", numbered(tmp_path)
    own.write_text("def score(prompt, response, label): return 0.0\n")
    before = inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE)
    assert not [*other_changes(before, inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE))]
    own.write_text("def score(prompt, response, label): return 1.0\n")
    edited = inputs_of(config_of(path, reward=f"{own}:score"), CHAT_TEMPLATE + " ")
    of_reward, of_template = other_changes(before, edited)
    assert of_reward.count(f"{own}:score (file ") == 2 and of_template.startswith("the chat template was ")
    (told,) = other_changes(edited, inputs_of(config_of(path), CHAT_TEMPLATE + " "))
    assert told.endswith(", and is exact_match")
    assert not [*data_changes(before, edited)]


@pytest.mark.parametrize(
    ("name", "is_found"),
    [
        ("tests.unit.user_rewards:anything", True),
        ("tests.unit.user_rewards.anything", True),
        ("rltrain.rewards:anything", False),
        ("exact_match", False),
        ("http://127.0.0.1:8000/score", False),
        ("nowhere.py:score", False),
    ],
)
def test_the_file_of_a_function_is_found_without_running_it(name: str, is_found: bool) -> None:
    path = source_file(name)
    assert (path is not None and path.name == "user_rewards.py") == is_found


def saved(folder: Path, config: Config, inputs: Inputs, **more: Any) -> Resumed:
    """A checkpoint after two steps."""
    order = build_order(config, place(config.placement))
    crossing = [list(entry.transfer) for entry in order.crossing(order.boundary(2)).values()]
    run = {"config": config.model_dump(mode="json"), "crossing": crossing, "inputs": inputs, **more}
    (folder / RUN_FILE).write_text(json.dumps(run))
    return Resumed(folder, 2)


def test_a_run_takes_other_rows_from_the_first_one_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path))
    checkpoint = saved(tmp_path, config, inputs_of(config), data_from=1)
    same = with_present_inputs(config, checkpoint, inputs_of(config))
    assert (same.data_from, same.has_new_data, caplog.text) == (1, False, "")
    assert remaining_order(config, place(config.placement), same)[1]
    other = config_of(numbered(tmp_path, 7, "other"))
    with caplog.at_level(logging.WARNING):
        changed = with_present_inputs(other, checkpoint, inputs_of(other))
    (record,) = caplog.records
    assert record.getMessage().endswith("other.jsonl (7 usable rows): step 2 takes the first of these rows")
    assert (changed.data_from, changed.has_new_data) == (2, True)
    assert not remaining_order(other, place(other.placement), changed)[1], "what was drawn ahead is of the old rows"


def test_a_run_may_refuse_other_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path), on_change="refuse")
    checkpoint = saved(tmp_path, config, inputs_of(config))
    assert with_present_inputs(config, checkpoint, inputs_of(config)) == checkpoint
    other = config_of(numbered(tmp_path, 7, "other"), on_change="refuse", reward="math")
    with pytest.raises(
        CheckpointError, match=r"data\.on_change: refuse, and .*other\.jsonl.*; the reward was exact_match"
    ):
        with_present_inputs(other, checkpoint, inputs_of(other))
    assert not caplog.text
    said = with_present_inputs(config_of(tmp_path / "train.jsonl", reward="math"), checkpoint, inputs_of(other))
    assert said.has_new_data


def test_other_settings_of_learning_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(numbered(tmp_path))
    checkpoint = saved(tmp_path, config, inputs_of(config))
    changes = {"actor": {"optimizer": {"lr": 3e-5}}, "logging": {"samples": 3}, "loss": {"kl": {"coef": 0.5}}}
    other = Config.model_validate({**config.model_dump(mode="json"), **changes})
    with caplog.at_level(logging.WARNING):
        assert not with_present_inputs(other, checkpoint, inputs_of(other)).has_new_data
    was = config.actor.optimizer.lr, config.loss.kl.coef
    assert [record.getMessage() for record in caplog.records] == [
        f"actor.optimizer.lr was {was[0]}, and is 3e-05",
        f"loss.kl.coef was {was[1]}, and is 0.5",
    ]


def test_a_checkpoint_that_records_no_inputs_goes_on(tmp_path: Path) -> None:
    config = config_of(numbered(tmp_path), on_change="refuse")
    checkpoint = saved(tmp_path, config, inputs_of(config))
    run = dict(checkpoint.run)
    del run["inputs"]
    (tmp_path / RUN_FILE).write_text(json.dumps(run))
    assert not with_present_inputs(config, checkpoint, inputs_of(config)).has_new_data


def test_streams_begin_with_the_step_that_takes_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = PromptOrder(NUM_ROWS, seed=0, shuffle=True)
    assert [FixedRows(order, first=12).row(12 + number) for number in range(3)] == [order.row(n) for n in range(3)]
    rows = [{"prompt": f"p{number}", "response": f"r{number}"} for number in range(9)]
    config = make_config(
        algorithm="sft",
        placement={"actor": 0},
        data={"train": {"path": str(jsonl(tmp_path, *rows))}},
        batch={"prompts_per_step": 2},
    )
    monkeypatch.setattr("rltrain.data.tokenizer.load_tokenizer", lambda path: byte_tokenizer())
    data = Demonstrations(config)
    first = data.for_step(0).prompt_ids.tolist()
    data.first_step = 3
    assert data.for_step(3).prompt_ids.tolist() == first
