"""The math reward on a table of answers, and on GSM8K's own solutions."""

import json
from pathlib import Path

import pytest

from rltrain.config import schema
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import load_reward
from rltrain.rewards.math import marked_answer, math
from rltrain.rewards.scorer import Scores
from tests.unit.one_function import OneFunction

GSM8K = Path(__file__).resolve().parents[3] / "shared/data/gsm8k/train.jsonl"

EQUAL = [
    ("\\boxed{72}", "72"),
    ("So \\boxed{1} or rather \\boxed{72}.", "72"),
    ("#### 72", "48/2 = <<48/2=24>>24 clips\n#### 72"),
    ("It is #### 72\nThat is all, 5 eggs.", "72"),
    ("The answer is 72.", "72"),
    ("She has 1,234 eggs.", "1234"),
    ("She earns $1,234.50.", "1234.5"),
    ("It costs $-3", "-3"),
    ("5-3", "3"),
    ("#### $10", "10"),
    ("\\boxed{10 \\text{ dollars}}", "10"),
    ("\\boxed{10\\text{ dollars}}", "#### 10"),
    ("\\boxed{x = 5}", "5"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\dfrac12}", "\\frac{1}{2}"),
    ("about 3/4", "\\frac{3}{4}"),
    ("\\boxed{50\\%}", "0.5"),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}"),
    ("\\boxed{x + 1}", "1 + x"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("\\boxed{(1,2)}", "(1, 2)"),
    ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}"),
    ("\\boxed{\\text{east}}", "east"),
    ("$\\boxed{[0, 1)}$", "[0,1)"),
    ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\fbox{72}", "\\boxed{72}"),
    ("007", "7"),
    ("#### 18 dollars", "18"),
    ("#### 18 dollars", "#### 18"),
    ("18", "#### 18 dollars"),
    ("\\boxed{18 dollars}", "#### 18 dollars"),
    ("#### $18 per hour.", "18"),
    ("#### -3.5 apples", "-3.5"),
    ("#### 1,234 miles", "1234"),
    ("#### 12 sq ft", "12"),
    ("#### $18", "18"),
    ("####18", "18"),
    ("\\boxed{\\emptyset}", "\\varnothing"),
    ("\\boxed{\\varnothing}", "\\emptyset"),
    ("\\boxed{\\varnothing}", "\\{\\}"),
    ("\\boxed{1 000}", "1000"),
    ("#### 1 000", "1000"),
    ("\\boxed{1000}", "1 000"),
    ("\\boxed{12\\,345\\,678.5}", "12345678.5"),
    ("\\boxed{1\\ 000}", "1,000"),
    ("#### -1\u202f000", "-1000"),
    ("It is 1{,}234 in all.", "1234"),
    ("\\boxed{(1,\\,200)}", "(1, 200)"),
    ("It is 10,\\!000 in all.", "10000"),
]
DIFFERENT = [
    ("\\boxed{71}", "72"),
    ("\\boxed{72} and \\boxed{1}", "72"),
    ("#### 5\n72", "72"),
    ("", "72"),
    ("no number at all", "72"),
    ("\\boxed{}", "72"),
    ("\\boxed{}", ""),
    ("\\boxed{72", "\\boxed{}"),
    ("\\boxed{-72}", "72"),
    ("\\boxed{7.2}", "72"),
    ("\\boxed{10x}", "10"),
    ("\\boxed{2\\pi}", "2"),
    ("\\boxed{(2,1)}", "(1,2)"),
    ("\\boxed{(0, 1)}", "[0, 1]"),
    ("\\boxed{0.33}", "1/3"),
    ("1/0", "0"),
    ("\\boxed{" + "9" * 5000 + "}", "9"),
    ("\\boxed{9}", "9" * 5000),
    ("\\boxed{9}", "1/" + "9" * 5000),
    ("\\boxed{10 or 12}", "10"),
    ("#### 18 or 20", "18"),
    ("#### 18 dollars and 50 cents", "18"),
    ("#### 3 million", "3"),
    ("#### 2 pi", "2"),
    ("#### 2 x", "2"),
    ("#### 3 squared", "3"),
    ("#### 18 dollars", "19"),
    ("#### two", "2"),
    ("####", "2"),
    ("####", ""),
    ("#### dollars", "18"),
    ("\\boxed{\\varnothing}", "0"),
    ("\\boxed{\\emptyset}", "\\{0\\}"),
    ("\\boxed{1 00}", "100"),
    ("\\boxed{1 0000}", "10000"),
    ("\\boxed{1234 567}", "1234567"),
    ("\\boxed{1 000, 2}", "10002"),
    ("She has 5 100 dollar bills", "5100"),
    ("\\boxed{(1\\,000, 2)}", "(1, 2)"),
]


@pytest.mark.parametrize(("response", "label"), EQUAL)
def test_equal_answers(response: str, label: str) -> None:
    assert math("", response, label) == 1.0


@pytest.mark.parametrize(("response", "label"), DIFFERENT)
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
