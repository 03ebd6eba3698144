"""Reward functions: other frameworks' conventions, answers in mathematics, programs."""

import asyncio
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rltrain.config import schema
from rltrain.data.images import source_of
from rltrain.errors import ConfigError, DataError
from rltrain.rewards.answers import Answer, Scorable, as_answer
from rltrain.rewards.code import code, label_tests, last_python_block, same_words
from rltrain.rewards.functions import RewardFunction, await_calls, call, load_reward
from rltrain.rewards.math import marked_answer, math
from rltrain.rewards.scorer import Scores
from tests.support.one_function import OneFunction
from tests.support.sandboxes import PROTECTING, sandbox_by

MODULE = "tests.support.peer_rewards"
CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})


def reward(function: str, **options: Any) -> RewardFunction:
    return load_reward(schema.Reward(function=f"{MODULE}.{function}", options=options))


def answers(function: RewardFunction, samples: Sequence[Scorable]) -> list[Answer]:
    """Computes answers like a worker: samples arrive as JSON."""
    fields = function.convention.fields
    arrived = [Scorable(**json.loads(json.dumps(sample.message(fields)))) for sample in samples]
    batches = [[sample] for sample in arrived]
    if function.convention.batched:
        batches = [list(batch) for _, batch in groupby(arrived, key=lambda sample: sample.response_mask)]
    if function.asynchronous:
        return [a for batch in asyncio.run(await_calls(function, batches, limit_s=60)) for a in batch]
    return [a for batch in batches for a in call(function, batch)]


def values(function: RewardFunction, samples: Sequence[Scorable]) -> list[float | None]:
    return [answer.score for answer in answers(function, samples)]


def test_our_functions_take_as_much_as_they_name() -> None:
    function = reward("ours", scale=3.0)
    assert function.convention.columns.every and not function.convention.takes_label
    row = {"solution": "4", "source": "x"}
    assert values(function, [Scorable("p", text, "", row=row) for text in ("4", "5")]) == [3.0, 0.0]


def test_our_functions_may_use_verl_s_names() -> None:
    function = reward("ours_with_verl_s_names")
    assert values(function, [Scorable("p", "r", "pr"), Scorable("p", "r", "r")]) == [1.0, 0.0]
    assert not function.convention.columns.any


def test_our_functions_get_the_conversation_as_messages() -> None:
    function = reward("ours_with_messages")
    roles = ["system", "user", "assistant"]
    assert values(function, [Scorable("p", "r", json.dumps(roles), messages=CHAT)]) == [1.0]
    assert values(function, [Scorable("p", "r", json.dumps(roles[1:]))]) == [1.0]


def test_functions_see_the_images_of_the_prompt(tmp_path: Path) -> None:
    """A path and a data URL arrive as images in RGB. A file without an image is the error of its sample."""
    path = tmp_path / "red.png"
    Image.new("RGB", (4, 2), "red").save(path)
    inline = source_of(Image.new("L", (6, 2), 255)).reference
    samples = [Scorable("p", text, "", images=(str(path), inline)) for text in ("1", "2")]
    assert values(reward("ours_with_images"), samples) == [1.0, 0.0]
    assert values(reward("trl_with_images"), [Scorable("p", "r", "", images=(inline,))]) == [6.0]
    (broken,) = answers(reward("ours_with_images"), [Scorable("p", "1", "", images=(str(tmp_path / "none.png"),))])
    assert "none.png" in broken.error


def conversation(*rewards: float) -> Scorable:
    turns = [
        {"message": {"role": "assistant", "content": "a"}, "replies": [{"role": "user", "content": "ok"}], "reward": r}
        for r in rewards
    ]
    return Scorable("p", "a", "", turns=turns, env_reward=sum(rewards))  # type: ignore[arg-type]


def test_a_list_rewards_turn_by_turn() -> None:
    (answer,) = answers(reward("per_turn"), [conversation(0.0, 1.0, 4.0)])
    assert answer == Answer(5.5, turns=[1.0, 1.5, 3.0])


def test_a_score_beside_turns_is_the_last_one_s() -> None:
    (answer,) = answers(reward("per_turn_and_in_the_end"), [conversation(0.0, 0.0)])
    assert answer == Answer(12.0, turns=[1.0, 11.0], metrics={"length": 1.0})


def test_the_environment_s_own_reward() -> None:
    function = load_reward(schema.Reward(function="environment"))
    with OneFunction(function, timeout_s=1) as scorer:
        scores = scorer.score([Scorable("p", "r", ""), Scorable("p", "r", "", env_reward=0.25), conversation(1.0, 2.0)])
    assert scores == Scores([0.0, 0.25, 3.0], 0, 0, turn_rewards={2: [1.0, 2.0]})


def test_verl_s_compute_score() -> None:
    function = reward("verl", bonus=0.5)
    assert function.convention.columns.required == {"data_source"} and function.convention.columns.label
    row = {"data_source": "countdown", "extra_info": {"index": 7}}
    samples = [
        Scorable("p", "24", "", label_value={"target": ["24"]}, row=row),
        Scorable("p", "25", "", label_value={"target": ["24"]}, row={"data_source": "countdown", "extra_info": None}),
    ]
    assert answers(function, samples) == [
        Answer(1.5, metrics={"index": 7.0, "acc": 1.0}),
        Answer(0.5, metrics={"index": -1.0, "acc": 0.0}),
    ]


def test_options_may_take_the_place_of_a_column() -> None:
    assert reward("verl", data_source="countdown").convention.columns.required == set()
    assert reward("trl_scheduled", difficulty=3).convention.columns.required == set()


@pytest.mark.parametrize("name", ["verl_short", "verl_async"])
def test_other_forms_of_verl_s(name: str) -> None:
    row = {"data_source": "x"}
    samples = [Scorable("p", text, "", label_value="4", row=row) for text in ("4", "5")]
    assert values(reward(name), samples) == [1.0, 0.0]


def groups(*texts: Sequence[str], **fields: Any) -> list[Scorable]:
    """Returns samples of several prompts. The response mask identifies the group."""
    return [
        Scorable("p", text, "", response_mask=[bool(group % 2)], response_ids=[1, 2, 3], group=group, **fields)
        for group, of_group in enumerate(texts)
        for text in of_group
    ]


def scored_in_a_worker(function: RewardFunction, samples: Sequence[Scorable]) -> Scores:
    with OneFunction(function, timeout_s=60, num_workers=1, calls_in_flight=4) as scorer:
        return scorer.score(samples)


def test_batches_are_the_samples_of_a_prompt() -> None:
    samples = groups(["4", "5"], ["4", "4", "5"], label_value="4", row={})
    assert scored_in_a_worker(reward("verl_batch"), samples).rewards == [2.0, 0.0, 3.0, 3.0, 0.0]
    assert scored_in_a_worker(reward("trl_async"), samples).rewards == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_trl_s_functions_get_columns_and_may_say_none() -> None:
    function = reward("trl")
    columns = function.convention.columns
    assert (columns.required, columns.every, function.convention.takes_label) == ({"solution"}, True, False)
    samples = groups(["4", "5"], row={"solution": "4", "prompt": "p", "other": 1})
    samples += groups([], ["4"], row={"solution": None})
    scores = scored_in_a_worker(function, samples)
    assert scores == Scores([4.0, 3.0, 0.0], 0, 0, skipped=frozenset({2}), metrics={"group": (4.0, 2)})


def test_trl_s_functions_need_no_more_than_ids() -> None:
    assert values(reward("trl_by_ids"), groups(["a", "b"], ["c"], row={})) == [3.0, 3.0, 3.0]


def test_completions_of_chats_are_messages() -> None:
    sample = Scorable("p", "4", "", messages=CHAT, row={"solution": "4"})
    prepared = reward("trl").call([sample]).named
    assert prepared["prompts"] == [CHAT] and prepared["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_trl_s_functions_may_name_what_they_want() -> None:
    function = reward("trl_scheduled")
    columns = function.convention.columns
    assert (columns.required, columns.optional, columns.every) == ({"difficulty"}, {"penalty"}, False)
    assert [a.score for a in call(function, [Scorable("p", "r", "", step=100, row={"difficulty": 20})])] == [127.0]
    row = {"difficulty": 20, "penalty": 1, "of_another_function": 5}
    assert [a.score for a in call(function, [Scorable("p", "r", "", step=100, row=row)])] == [121.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trl_too_few", "returned 1 rewards for 2 samples; expected a list with a number for each"),
        ("trl_raising", "ValueError: could not convert string to float: 'x'"),
    ],
)
def test_a_batch_fails_as_one(name: str, reason: str) -> None:
    failed = answers(reward(name), groups(["1", "x"], row={}))
    assert len(failed) == 2 and all(reason in str(answer.error) for answer in failed)


def test_slime_s_functions_get_arguments_and_a_sample() -> None:
    function = reward("slime", scale=2.0, reward_key="points", metadata_key="meta")
    sample = Scorable(
        "p", "4", "", label_value={"answer": "4"}, row={"meta": {"level": 3}}, prompt_ids=[1, 2],
        response_ids=[3, 4, 5], response_mask=[True, False, True], truncated=True,
    )  # fmt: skip
    (answer,) = answers(function, [sample])
    expected = {"length": 3, "cut": 1, "drawn": 2, "tokens": 5, "level": 3, "typed": 0, "absent": 5, "score": -1}
    assert answer == Answer(2.0, metrics=expected)


def test_what_slime_s_functions_read_of_args_stands_in_the_options() -> None:
    samples = [Scorable("p", "4", "")]
    (failed,) = answers(reward("slime_reading_what_is_not_there"), samples)
    assert "args has no 'threshold'; set it in reward.options" in str(failed.error)
    assert values(reward("slime_reading_what_is_not_there", threshold=4), samples) == [4.0]


def test_slime_s_functions_of_groups() -> None:
    first = [Scorable("p", "r", "", response_ids=[1] * length, response_mask=[True]) for length in (1, 3)]
    second = [Scorable("p", "r", "", response_ids=[1, 2], response_mask=[False])]
    assert values(reward("slime_group"), [*first, *second]) == [0.0, 1.0, 1.0]


def test_calls_of_an_asynchronous_function_are_in_flight_together() -> None:
    samples = [Scorable("p", str(n), "") for n in range(12)]
    with OneFunction(reward("together"), timeout_s=60, num_workers=1, calls_in_flight=4) as scorer:
        assert set(scorer.score(samples).rewards) == {4.0}


@pytest.mark.parametrize(
    ("response", "errors", "timeouts"), [("sleep", 0, 1), ("die", 1, 0), ("exit", 1, 0), ("block", 0, 1)]
)
def test_one_of_many_calls_in_flight_costs_its_own_sample(response: str, errors: int, timeouts: int) -> None:
    """This includes calls that end or block the process."""
    samples = [Scorable("p", text, "") for text in ("a", "b", response, "c")]
    with OneFunction(reward("together"), timeout_s=1, num_workers=1, calls_in_flight=4) as scorer:
        scorer.score(samples[:1])
        scores = scorer.score(samples)
    assert (scores.num_errors, scores.num_timeouts) == (errors, timeouts)
    assert [bool(number) for number in scores.rewards] == [True, True, False, True]


numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=6), st.none() | numbers, st.booleans())
def test_rewards_of_turns_add_up_to_the_reward(turns: list[float], score: float | None, as_tuple: bool) -> None:
    returned: Any = {"turns": tuple(turns) if as_tuple else turns} | ({} if score is None else {"score": score})
    answer = as_answer(returned, len(turns))
    assert answer.turns and sum(answer.turns) == pytest.approx(answer.score, abs=1e-6)
    assert answer.turns[:-1] == turns[:-1]
    assert as_answer(returned, len(turns) + 1).error


GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"

EQUAL = {
    "72": (
        *("\\boxed{72}", "So \\boxed{1} or rather \\boxed{72}."),
        *("It is #### 72\nThat is all, 5 eggs.", "The answer is 72."),
    ),
    "1234": ("She has 1,234 eggs.", "#### 1,234 miles", "It is 1{,}234 in all."),
    "10": ("#### $10", "\\boxed{10 \\text{ dollars}}"),
    "0.5": ("\\boxed{\\frac{1}{2}}", "\\boxed{50\\%}"),
    "18": ("#### 18 dollars", "#### $18 per hour.", "#### $18", "####18"),
    "#### 18 dollars": ("18", "\\boxed{18 dollars}"),
    "1000": ("\\boxed{1 000}", "#### 1 000"),
    "48/2 = <<48/2=24>>24 clips\n#### 72": ("#### 72",),
    "1234.5": ("She earns $1,234.50.",),
    "-3": ("It costs $-3",),
    "3": ("5-3",),
    "#### 10": ("\\boxed{10\\text{ dollars}}",),
    "5": ("\\boxed{x = 5}",),
    "\\frac{1}{2}": ("\\boxed{\\dfrac12}",),
    "\\frac{3}{4}": ("about 3/4",),
    "\\sqrt{8}": ("\\boxed{2\\sqrt{2}}",),
    "1 + x": ("\\boxed{x + 1}",),
    "x^2+2x+1": ("\\boxed{(x+1)^2}",),
    "(1, 2)": ("\\boxed{(1,2)}",),
    "\\{1, 2\\}": ("\\boxed{\\{2, 1\\}}",),
    "east": ("\\boxed{\\text{east}}",),
    "[0,1)": ("$\\boxed{[0, 1)}$",),
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}": ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}",),
    "\\boxed{72}": ("\\fbox{72}",),
    "7": ("007",),
    "#### 18": ("#### 18 dollars",),
    "-3.5": ("#### -3.5 apples",),
    "12": ("#### 12 sq ft",),
    "\\varnothing": ("\\boxed{\\emptyset}",),
    "\\emptyset": ("\\boxed{\\varnothing}",),
    "\\{\\}": ("\\boxed{\\varnothing}",),
    "1 000": ("\\boxed{1000}",),
    "12345678.5": ("\\boxed{12\\,345\\,678.5}",),
    "1,000": ("\\boxed{1\\ 000}",),
    "-1000": ("#### -1\u202f000",),
    "(1, 200)": ("\\boxed{(1,\\,200)}",),
    "10000": ("It is 10,\\!000 in all.",),
}
DIFFERENT = {
    "72": (
        *("\\boxed{71}", "\\boxed{72} and \\boxed{1}", "#### 5\n72", ""),
        *("no number at all", "\\boxed{}", "\\boxed{-72}", "\\boxed{7.2}"),
    ),
    "": ("\\boxed{}", "####"),
    "10": ("\\boxed{10x}", "\\boxed{10 or 12}"),
    "2": ("\\boxed{2\\pi}", "#### 2 pi", "#### 2 x", "#### two", "####"),
    "0": ("1/0", "\\boxed{\\varnothing}"),
    "18": ("#### 18 or 20", "#### 18 dollars and 50 cents", "#### dollars"),
    "3": ("#### 3 million", "#### 3 squared"),
    "\\boxed{}": ("\\boxed{72",),
    "(1,2)": ("\\boxed{(2,1)}",),
    "[0, 1]": ("\\boxed{(0, 1)}",),
    "1/3": ("\\boxed{0.33}",),
    "9": ("\\boxed{" + "9" * 5000 + "}",),
    "9" * 5000: ("\\boxed{9}",),
    "1/" + "9" * 5000: ("\\boxed{9}",),
    "19": ("#### 18 dollars",),
    "\\{0\\}": ("\\boxed{\\emptyset}",),
    "100": ("\\boxed{1 00}",),
    "10000": ("\\boxed{1 0000}",),
    "1234567": ("\\boxed{1234 567}",),
    "10002": ("\\boxed{1 000, 2}",),
    "5100": ("She has 5 100 dollar bills",),
    "(1, 2)": ("\\boxed{(1\\,000, 2)}",),
}


def by_label(responses: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(response, label) for label in responses for response in responses[label]]


@pytest.mark.parametrize(("response", "label"), by_label(EQUAL))
def test_equal_answers(response: str, label: str) -> None:
    assert math("", response, label) == 1.0


@pytest.mark.parametrize(("response", "label"), by_label(DIFFERENT))
def test_different_answers(response: str, label: str) -> None:
    assert math("", response, label) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{a} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} #### 2", "1"),
        ("#### 2 eggs\n3", "2 eggs"),
        ("\\boxed{1} \\boxed{never closed", "1"),
        ("3", None),
    ],
)
def test_marked_answers(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


def test_an_answer_may_have_to_follow_a_mark() -> None:
    marks = ["</think>", "###Response"]
    assert math("", r"\boxed{1} </think> \boxed{2}", "2", after=marks) == 1.0
    assert math("", r"\boxed{2} </think> none", "2", after=marks, last_number=False) == 0.0
    assert math("", r"###Response \boxed{2}", "2", after=marks) == 1.0
    assert math("", r"\boxed{2}", "2", after=marks) == 0.0


def test_the_last_number_counts_only_if_allowed() -> None:
    assert math("", "The answer is 72", "72", last_number=False) == 0.0
    assert math("", "#### 72", "72", last_number=False) == 1.0


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file lies outside the repository")
def test_gsm8k_solutions_score_one_and_wrong_ones_zero() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()[:1000]]
    labels = [row["answer"] for row in rows]
    finals = [label.rpartition("#### ")[2] for label in labels]
    for label, final in zip(labels, finals, strict=True):
        assert math("", label, label) == 1.0
        assert math("", f"Adding up gives {final}.", label) == 1.0
        assert math("", f"\\boxed{{{final}.00}}", label) == 1.0
        assert math("", f"\\boxed{{{final}1}}", label) == 0.0
    wrong = [math("", other, label) for label, other in zip(labels, labels[1:], strict=False)]
    truth = [float(a.replace(",", "") == b.replace(",", "")) for a, b in zip(finals, finals[1:], strict=False)]
    assert wrong == truth


def test_a_hostile_answer_costs_its_sample_only(caplog: pytest.LogCaptureFixture) -> None:
    tower = "9^{" * 6 + "9" + "}" * 6
    with OneFunction(load_reward(schema.Reward(function="math")), timeout_s=3, num_workers=1) as scorer:
        scores = scorer.score([Scorable("", f"\\boxed{{{answer}}}", "72") for answer in ("72", tower, "72")])
    assert scores == Scores([1.0, 0.0, 1.0], num_errors=0, num_timeouts=1)
    assert "took longer than reward.timeout_s = 3" in caplog.text


ADDS = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = {"stdin": ["1 2\n", "3 4\n"], "stdout": ["3\n", "7\n"]}


def fenced(program: str) -> str:
    return f"This is it:\n```python\n{program}\n```\nDone."


def code_reward(program: str, tests: Any, **options: Any) -> float:
    sandbox_by("kernel")
    return code("prompt", fenced(program), json.dumps(tests), sandbox="kernel", **options)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\nfirst\n```\n```python\nlast\n```", "last"),
        ("```py\nit\n```\n```bash\nls\n```", "it"),
        ("```\nunmarked\n```", "unmarked"),
        ("- so:\n  ```Python\n  if x:\n    y\n  ```", "if x:\n  y"),
        ("```json\n{}\n```", None),
        ("```python\nnot closed", None),
        ("print(1)", None),
    ],
)
def test_the_last_python_block_counts(response: str, expected: str | None) -> None:
    assert last_python_block(response) == expected


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.text(alphabet="ab \n", max_size=20), min_size=1, max_size=4))
def test_blocks_are_taken_apart_as_they_were_put_together(texts: list[str]) -> None:
    response = "\n".join(f"words\n```python\n|{text}|\n```" for text in texts)
    assert last_python_block(response) == f"|{texts[-1]}|"


@pytest.mark.parametrize("means", PROTECTING)
def test_the_share_of_outputs_that_are_right(means: str) -> None:
    sandbox_by(means)
    assert code("", fenced(ADDS), json.dumps(SUMS), sandbox=means) == 1.0


def test_a_share_or_all_or_nothing() -> None:
    assert code_reward("print(3)", SUMS) == 0.5
    assert code_reward("print(3)", SUMS, all_or_nothing=True) == 0.0
    assert code("", "no program", json.dumps(SUMS)) == 0.0


def test_names_of_other_data_sets() -> None:
    assert code_reward(ADDS, {"inputs": ["1 2"], "outputs": ["3"]}) == 1.0
    assert code_reward("print(input(), input())", {"inputs": [["a", "b"]], "outputs": [["a b"]]}) == 1.0


def test_functions_are_called() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], "[3]\n[4]", [1, 1]], "outputs": [3, "[3, 4]", [2]]}
    assert code_reward("def add(a, b):\n  print('noise')\n  return a + b", tests) == 1.0
    one = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert code_reward("class Solution:\n  def add(self, a: List[int], b):\n    return a + b", one) == 1.0
    assert code_reward("def add(a, b):\n  return 4", one) == 0.0


def test_statements_are_asserted() -> None:
    statements = ["assert double(2) == 4", "assert double(0) == 1", "assert double('a') == 'aa'"]
    assert code_reward("def double(x):\n  return 2 * x", statements) == pytest.approx(2 / 3)
    assert (
        code_reward(
            "def double(x):\n  return math.prod([2, x])",
            {"test_list": statements[:1], "test_setup_code": "import math"},
        )
        == 1.0
    )


@pytest.mark.parametrize(
    "leaves", ["import os; os._exit(0)", "raise SystemExit", "print(input())", "1 +", "while True: pass"]
)
def test_a_program_that_never_comes_to_its_tests_passes_none(leaves: str) -> None:
    assert code_reward(leaves, ["assert True"], test_timeout_s=0.2) == 0.0


def test_tests_that_hang_cost_those_behind_them() -> None:
    assert code_reward(
        "def f(x):\n  while x: pass", ["assert f(0) is None", "f(1)", "f(0)"], test_timeout_s=0.2
    ) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        ("1  2 \n\n", "1 2", 0.0, True),
        ("1\n2", "1 2", 0.0, False),
        ("0.3333", "0.33333", 1e-3, True),
        ("0.3333", "0.33333", 0.0, False),
        ("yes 1", "no 1", 1e-3, False),
        ("1 2 3", "1 2", 1e-3, False),
        ("nan", "1", 1e-3, False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_words(printed, expected, tolerance) is same


LABELS_WITHOUT_TESTS = (
    *('{"fn_name": "f", "inputs": [1], "outputs": [1]}', '{"test_list": "assert x"}', "not json", "3", "[]", "{}"),
    *('{"stdin": ["1"], "stdout": []}', '{"stdin": [], "stdout": []}', '["a", 1]'),
)


@pytest.mark.parametrize("label", LABELS_WITHOUT_TESTS)
def test_labels_without_tests_are_refused(label: str) -> None:
    with pytest.raises(DataError, match="expected JSON: a list of assert statements"):
        label_tests(label)


def test_an_unknown_sandbox_names_the_option() -> None:
    with pytest.raises(ConfigError, match="reward.options.sandbox: 'docker' is unknown"):
        code("", fenced("1"), '["assert True"]', sandbox="docker")
