"""The reward role: inputs of its functions, gathering of scores, and metrics."""

import json
import logging
import re
import statistics
import threading
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rltrain.config import schema
from rltrain.data.columns import RowColumns, read_columns
from rltrain.data.experience import Experience
from rltrain.data.prompts import PromptDataset, load_prompts
from rltrain.data.tokenizer import PromptEncoder, TextDecoder
from rltrain.errors import ConfigError, DataError, RewardError
from rltrain.rewards.functions import load_rewards
from rltrain.rewards.scorer import Scores
from rltrain.roles.reward import WARN_AFTER_STEPS, FlatRewards, RewardRole
from rltrain.roles.reward_statistics import RewardStatistics, is_of_one_function
from rltrain.roles.scoring import FailureLimit, RankRecords, Scorables, sample_records
from rltrain.runtime.grid import Grid
from tests.support.packed_experience import packed_experience
from tests.support.shared_store import LIMIT_S, ShortPatience
from tests.unit.test_metrics import FakeBulletin
from tests.unit.test_prompts import CHAT_TEMPLATE, byte_tokenizer, jsonl

samples = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 9), st.booleans()), min_size=1, max_size=12)
Sample = tuple[float, int, bool]


def scored(
    part: list[Sample], errors: int = 0, timeouts: int = 0, failure: str | None = None
) -> tuple[Experience, Scores]:
    """Returns samples of (reward, response tokens, truncated), each with a prompt of three tokens, scored by one
    function."""
    rewards = [reward for reward, _, _ in part]
    experience = packed_experience([(3, length) for _, length, _ in part]).with_fields(
        rewards=torch.tensor(rewards), truncated=torch.tensor([cut for _, _, cut in part], dtype=torch.bool)
    )
    return experience, Scores(rewards, by_function={"": Scores(rewards, errors, timeouts, failure)})


def metrics_of(by_rank: list[list[list[Sample]]]) -> dict[str, float]:
    """Returns the metrics of all ranks from their chunks. Every rank counts an error in its first chunk."""
    records = []
    for chunks in by_rank:
        of_rank = RewardStatistics()
        for number, chunk in enumerate(chunks):
            of_rank.add(*scored(chunk, errors=int(number == 0)))
        records.append(of_rank.record())
    return RewardStatistics.metrics(records)


def test_the_metrics_are_what_they_are_called():
    part = [(1.0, 4, False), (0.0, 2, True), (0.5, 6, False)]
    of_rank = RewardStatistics()
    of_rank.add(*scored(part, errors=2, timeouts=1))
    assert RewardStatistics.metrics([of_rank.record()]) == pytest.approx(
        {
            "reward_mean": 0.5,
            "reward_std": statistics.pstdev([1.0, 0.0, 0.5]),
            "response_length_mean": 4.0,
            "response_length_max": 6.0,
            "truncated_ratio": 1 / 3,
            "reward_errors": 2,
            "reward_timeouts": 1,
            "reward_unscored": 0,
        }
    )


def test_what_each_source_got_and_earned():
    """One of the two ranks has no sample of the second source."""
    ranks = [RewardStatistics(), RewardStatistics()]
    for of_rank, sources, rewards in ((ranks[0], ["a", "b"], [1.0, 0.5]), (ranks[1], ["a", "a"], [0.0, 0.5])):
        experience, scores = scored([(reward, 1, False) for reward in rewards])
        of_rank.add(experience, scores)
        of_rank.add_sources(sources, scores.rewards)
    metrics = RewardStatistics.metrics([json.loads(json.dumps(of_rank.record())) for of_rank in ranks])
    of_sources = {name: value for name, value in metrics.items() if "/" in name}
    assert of_sources == {"reward_mean/a": 0.5, "reward_mean/b": 0.5, "share/a": 0.75, "share/b": 0.25}
    assert is_of_one_function("reward_mean/a") and not is_of_one_function("share/a"), (
        "only the first one is reported by evaluations"
    )


@given(samples, st.data())
def test_chunks_and_ranks_add_up_to_the_whole(whole, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=3, max_size=3)))
    parts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    together = metrics_of([[whole]])
    apart = metrics_of([parts[:2], parts[2:]])
    assert apart.pop("reward_errors") == 2 and together.pop("reward_errors") == 1
    assert apart == pytest.approx(together, abs=1e-6)
    assert together["reward_mean"] == pytest.approx(statistics.fmean(reward for reward, _, _ in whole), abs=1e-6)


def test_equal_rewards_have_no_spread():
    assert metrics_of([[[(0.1, 1, False)] * 3]])["reward_std"] == pytest.approx(0, abs=1e-6)


def of_two_functions(numbers: list[float], skipped: frozenset[int] = frozenset()) -> RewardStatistics:
    """Function "form" fails on one sample. Function "answer" counts steps and skips the samples in `skipped`."""
    experience = packed_experience([(3, 2)] * len(numbers)).with_fields(rewards=torch.tensor(numbers))
    form = Scores([0.0] * len(numbers), 1, 0, "no text")
    answer = Scores(numbers, 0, 0, skipped=skipped, metrics={"steps": (6.0, 2), "mean": (1.0, 1), "a/b c": (3.0, 3)})
    of_rank = RewardStatistics()
    of_rank.add(experience, Scores(numbers, by_function={"form": form, "answer": answer}))
    return of_rank


def test_every_function_has_metrics_of_its_own():
    ranks = [of_two_functions([1.0, 0.0]), of_two_functions([1.0, 1.0, 0.0], frozenset({2}))]
    metrics = RewardStatistics.metrics([of_rank.record() for of_rank in ranks])
    of_functions = {name: value for name, value in metrics.items() if is_of_one_function(name)}
    assert of_functions == pytest.approx(
        {
            "reward_form": 0.0,
            "reward_form_errors": 2,
            "reward_form_timeouts": 0,
            "reward_answer": 3 / 4,
            "reward_answer_errors": 0,
            "reward_answer_timeouts": 0,
            "reward_answer_steps": 3.0,
            "reward_answer_mean_": 1.0,
            "reward_answer_a_b_c": 1.0,
        }
    )
    assert metrics["reward_errors"] == 2 and metrics["reward_mean"] == pytest.approx(3 / 5)
    assert ranks[0].first_failures == {"form": "no text"}


def test_greedy_samples_are_reported_apart():
    part = [(1.0, 4, False), (7.0, 9, True), (0.5, 2, False)]
    of_rank = RewardStatistics(is_greedy=lambda _: torch.tensor([False, True, False]))
    of_rank.add(*scored(part, errors=1))
    metrics = RewardStatistics.metrics([of_rank.record()])
    alone = RewardStatistics()
    alone.add(*scored([part[0], part[2]], errors=1))
    assert metrics.pop("greedy_reward_mean") == 7.0
    assert metrics == RewardStatistics.metrics([alone.record()])
    assert of_rank.sums["samples"] == 3, "the share of failures is of all scored samples"


def test_what_stands_in_a_record_can_be_sent_as_json():
    record = of_two_functions([1.0]).record()
    assert RewardStatistics.metrics([json.loads(json.dumps(record))]) == RewardStatistics.metrics([record])


def reward_role(rank: int, shared: dict[str, str], max_failures: float = 0.5, **reward: Any) -> RewardRole:
    """Returns a role on ranks 4 and 6 with only the parts used in gathering."""
    role = RewardRole.__new__(RewardRole)
    settings = schema.Reward(max_failures=max_failures, **reward)
    role.limit = FailureLimit(load_rewards(settings), settings)
    role.grid = Grid((4, 6))
    bulletin: Any = FakeBulletin(shared, rank)
    role.records = RankRecords(bulletin, ShortPatience(), "reward", role.grid.ranks)
    role.outcomes = SimpleNamespace(record=lambda: [], tell=lambda step, of_ranks: None)  # type: ignore[assignment]
    role.serve = None
    return role


def of_rewards(*rewards: float) -> RewardStatistics:
    statistics = RewardStatistics()
    statistics.add(*scored([(reward, 2, False) for reward in rewards]))
    return statistics


def test_the_leader_has_the_metrics_of_all_ranks_and_the_others_go_on():
    shared: dict[str, str] = {}
    assert reward_role(6, shared)._gather("score", 3, of_rewards(1.0, 0.0)) == {}
    metrics = reward_role(4, shared)._gather("score", 3, of_rewards(1.0, 1.0))
    assert metrics["reward_mean"] == pytest.approx(0.75)
    assert not shared, "the store still has keys"


def test_steps_and_evaluations_are_told_apart():
    shared: dict[str, str] = {}
    other = reward_role(6, shared)
    other._gather("score", 4, of_rewards(9.0))
    other._gather("evaluation", 3, of_rewards(9.0))
    other._gather("score", 3, of_rewards(0.0))
    assert reward_role(4, shared)._gather("score", 3, of_rewards(1.0))["reward_mean"] == pytest.approx(0.5)


def test_the_leader_joins_weight_syncs_while_it_waits():
    """The other rank may be an engine inside a sync. It scores only after the sync."""
    shared: dict[str, str] = {}
    leader, other = reward_role(4, shared), reward_role(6, shared)
    joined = threading.Event()
    leader.serve = joined.set

    def score_after_the_sync() -> None:
        assert joined.wait(LIMIT_S / 2)
        other._gather("score", 0, of_rewards(0.0))

    thread = threading.Thread(target=score_after_the_sync)
    thread.start()
    assert leader._gather("score", 0, of_rewards(1.0))["reward_mean"] == pytest.approx(0.5)
    thread.join(LIMIT_S)


def of_failures(errors: int, timeouts: int, num_samples: int = 4, failure: str | None = None) -> RewardStatistics:
    statistics = RewardStatistics()
    statistics.add(*scored([(1.0, 2, False)] * num_samples, errors, timeouts, failure))
    return statistics


def failures_of_a_step(leader: RewardRole, *failures: tuple[int, int], step: int = 0) -> None:
    """Scores 4 samples on each of two ranks, with (errors, timeouts) per rank."""
    shared = leader.records.job_store.shared  # type: ignore[attr-defined]
    assert reward_role(6, shared)._gather("score", step, of_failures(*failures[1], failure="rank 6's")) == {}
    leader._gather("score", step, of_failures(*failures[0], failure="rank 4's" if any(failures[0]) else None))


@pytest.mark.parametrize(
    ("max_failures", "failures", "num_failed"),
    [
        (0.5, [(4, 0), (4, 0)], 8),
        (0.5, [(0, 0), (4, 1)], 5),
        (0.5, [(3, 0), (1, 0)], None),
        (0.0, [(0, 0), (0, 1)], 1),
        (1.0, [(4, 0), (0, 4)], 8),
        (1.0, [(4, 0), (3, 0)], None),
    ],
)
def test_too_many_failures_of_the_first_step_end_the_job(max_failures, failures, num_failed):
    """Failures are counted over all ranks. Even if any sample may fail, not all samples of the first step may."""
    leader = reward_role(4, {}, max_failures)
    if num_failed is None:
        failures_of_a_step(leader, *failures)
        return
    with pytest.raises(RewardError, match=rf"failed on {num_failed} of 8 samples of score\[0\]: \d by an error"):
        failures_of_a_step(leader, *failures)


def test_later_steps_are_held_to_the_share_alone():
    leader = reward_role(4, {}, max_failures=1.0)
    failures_of_a_step(leader, (0, 0), (0, 0))
    failures_of_a_step(leader, (4, 0), (4, 0), step=1)
    leader = reward_role(4, {})
    failures_of_a_step(leader, (0, 0), (0, 0))
    failures_of_a_step(leader, (2, 0), (2, 0), step=1)
    with pytest.raises(RewardError, match=r"failed on 5 of 8 samples of score\[2\]: 4 by an error, 1 by taking longer"):
        failures_of_a_step(leader, (2, 0), (2, 1), step=2)


def test_evaluations_are_judged_as_steps_are():
    shared: dict[str, str] = {}
    reward_role(6, shared)._gather("evaluation", 0, of_failures(4, 0))
    with pytest.raises(RewardError, match=r"failed on 8 of 8 samples of evaluation\[0\]"):
        reward_role(4, shared)._gather("evaluation", 0, of_failures(4, 0))


@pytest.mark.parametrize(("of_leader", "told"), [((4, 0), "rank 4's"), ((0, 0), "rank 6's")])
def test_the_message_has_the_first_failure_of_any_rank_and_the_function_s_place(of_leader, told):
    with pytest.raises(RewardError) as refusal:
        failures_of_a_step(reward_role(4, {}, max_failures=0.1), of_leader, (4, 0))
    message = str(refusal.value)
    assert message.endswith(f"The first failure was {told}")
    assert re.search(r"reward.function: 'exact_match' \(/.*/exact_match.py, line \d+\) failed", message)
    assert "reward.max_failures = 0.1" in message


def test_the_first_failure_of_a_step_is_that_of_its_first_chunk_with_one():
    statistics = of_failures(0, 0)
    for failure in ("first", "second"):
        statistics.add(*scored([(1.0, 2, False)], 1, failure=failure))
    assert statistics.first_failures == {"": "first"}


TWO = ({"function": "exact_match", "name": "form"}, {"function": "math"})


def statistics_of_two_functions(form: int, math: int, unscored: int = 0) -> RewardStatistics:
    """Returns the statistics of 4 samples, with numbers of failures per function and of samples without a function."""
    experience, _ = scored([(0.0, 2, False)] * 4)
    failed = {
        title: Scores([0.0] * 4, number, 0, f"that of {title}") for title, number in (("form", form), ("math", math))
    }
    statistics = RewardStatistics()
    statistics.add(experience, Scores([0.0] * 4, skipped=frozenset(range(unscored)), by_function=failed))
    return statistics


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ((2, 2), None),
        ((0, 3), "reward.functions.1.function: 'math' .* failed on 3 of 4 samples .* first failure was that of math"),
        ((3, 0), "reward.functions.0.function: 'exact_match' .* failed on 3 of 4 .* first failure was that of form"),
        ((0, 0, 3), r"reward: every function returned None for 3 of 4 samples of score\[0\]"),
    ],
)
def test_each_of_several_functions_is_judged_by_itself(failures, message):
    functions = tuple(schema.RewardPart(**part) for part in TWO)
    leader = reward_role(4, {}, functions=functions)
    leader.records.ranks = (4,)
    if message is None:
        assert leader._gather("score", 0, statistics_of_two_functions(*failures))["reward_errors"] == 4
        return
    with pytest.raises(RewardError, match=message):
        leader._gather("score", 0, statistics_of_two_functions(*failures))


def share_of(groups: dict[int, list[float]]) -> float | None:
    rewards = [reward for of_group in groups.values() for reward in of_group]
    ids = [number for number, of_group in groups.items() for _ in of_group]
    experience = packed_experience([(3, 2)] * len(rewards)).with_fields(
        rewards=torch.tensor(rewards),
        truncated=torch.zeros(len(rewards), dtype=torch.bool),
        group_ids=torch.tensor(ids),
    )
    statistics = RewardStatistics(counts_flat_groups=True)
    statistics.add(experience, Scores(rewards, by_function={"": Scores(rewards)}))
    return RewardStatistics.metrics([statistics.record()]).get("flat_groups")


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ({0: [0.0, 0.0], 5: [1.0, 1.0, 1.0]}, 1.0),
        ({0: [0.0, 0.0], 5: [1.0, 0.5, 1.0]}, 0.5),
        ({0: [-1.0, 1.0], 5: [0.0, -2.0]}, 0.0),
        ({0: [1.0], 5: [0.0, 0.0]}, 1.0),
        ({0: [1.0], 5: [0.0]}, None),
    ],
)
def test_groups_without_a_spread_are_counted(groups: dict[int, list[float]], share: float | None) -> None:
    """A single sample cannot be compared with others."""
    assert share_of(groups) == share


def test_the_first_flat_step_is_logged_and_a_row_of_them_warns(caplog: pytest.LogCaptureFixture) -> None:
    watch, shares = FlatRewards(), [0.5, 1.0, 0.9, *[1.0] * (WARN_AFTER_STEPS + 1), 0.2, *[1.0] * WARN_AFTER_STEPS]
    with caplog.at_level(logging.INFO):
        for step, share in enumerate(shares):
            watch.look(step, {"flat_groups": share, "reward_mean": 0.0})
    said = [(record.levelname, record.getMessage().partition(":")[0]) for record in caplog.records]
    row = f"in {WARN_AFTER_STEPS} steps in a row, since step {{}}, 100 % of the groups have no spread of rewards"
    assert said == [("INFO", "step 1"), ("WARNING", row.format(3)), ("WARNING", row.format(5 + WARN_AFTER_STEPS))]


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
    """Returns the second of two samples, of the second row: a prompt of 3 tokens, then "AB"."""
    experience = packed_experience([(3, 2), (3, 2)]).with_fields(
        prompt_ids=torch.tensor([0, 1]),
        tokens=torch.tensor([5, 6, 7, 33, 34] * 2),
        truncated=torch.tensor([False, True]),
    )
    return scorables(folder, *functions, **kwargs).of(experience, step=9)[1]


def test_records_of_samples_have_what_the_model_was_shown(tmp_path: Path) -> None:
    """A record has the whole text with special tokens if it differs from the row's, and nothing of the response."""
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


def test_an_image_is_one_placeholder_in_the_text_that_the_model_was_shown(tmp_path: Path) -> None:
    source, tokenizer = scorables(tmp_path, "math"), byte_tokenizer()
    ids = tokenizer("a<<<<b")["input_ids"]
    experience = packed_experience([(len(ids), 1)]).with_fields(
        tokens=torch.tensor([*ids, *tokenizer("1")["input_ids"]]),
        image_keys=torch.tensor([0, 7, 7, 8, 8, 0, 0]),
    )
    assert source.rendered_prompt(experience, 0) == "a<<b"


def test_functions_that_ask_for_nothing_get_nothing(tmp_path: Path) -> None:
    source = scorables(tmp_path, "math", "exact_match")
    assert source.columns is None and not source.fields
    sample = drawn(tmp_path, "math")
    assert (sample.prompt, sample.label, sample.step) == ("b", "2", 9)
    assert sample.row == {} and sample.response_ids == ()


def test_functions_get_what_any_of_them_asks_for(tmp_path: Path) -> None:
    sample = drawn(tmp_path, "tests.support.peer_rewards.slime", "math")
    assert sample.response == byte_tokenizer().decode([33, 34])
    assert (sample.prompt_ids, sample.response_ids, sample.response_mask) == ([5, 6, 7], [33, 34], [True, True])
    assert (sample.label_value, sample.truncated, sample.sample_id, sample.messages) == ("2", True, 101, ())
    chat = {"prompt": [{"role": "user", "content": "b"}], "label": "2"}
    assert drawn(tmp_path, "tests.support.peer_rewards.slime", rows=[chat, chat]).messages == chat["prompt"]
    assert drawn(tmp_path, "tests.support.peer_rewards.ours").row == ROWS[1]


def test_a_file_without_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "solution": "1"}] * 2
    sample = drawn(tmp_path, "tests.support.peer_rewards.trl", label_key=None, rows=rows)
    assert (sample.label, sample.row) == ("", rows[1])
    with pytest.raises(
        ConfigError, match="data.train.label_key: got null, but reward.functions.0.function 'math' takes"
    ):
        scorables(tmp_path, "math", label_key=None, rows=rows)
    with pytest.raises(DataError, match=r"has no key 'label'; .* \(rows without labels: label_key null\)"):
        scorables(tmp_path, "tests.support.peer_rewards.trl", rows=rows)
