"""Models that tell the reward what responses are worth: what they are asked, what counts, what a config may ask for."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.errors import CheckpointError, ConfigError
from rltrain.models.checkpoint_model import require_classifier
from rltrain.planning.validation import check_config
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import Wants
from rltrain.rewards.scorer import (
    NoVerdictError,
    Question,
    RewardingModel,
    Scorer,
    rewarding_models,
    verdict_parser,
)
from tests.unit.schedule_configs import NO_EVALUATION, make_config, order_of

PLACED = {"actor": 0, "rollout, reward": 1, "reward_model": 2, "judge": 3}
MODELS = {"reward_model": {"path": "rm"}, "judge": {"path": "j", "prompt": "{response}?"}}
SAMPLES = [Scorable("", text, "a") for text in ("a", "b", "a")]


def model(title: str = "model", weight: float = 1.0) -> RewardingModel:
    return RewardingModel("reward_model", title, weight, "a/path", Wants())


def test_the_reward_is_the_weighted_sum_of_functions_and_models() -> None:
    models = [model(weight=2.0), model("judge", -1.0)]
    with Scorer.of(schema.Reward(), models=models) as scorer:
        told = [models[0].scores([0.5, math.nan, -1.0]), models[1].scores([0.0, 3.0, math.inf])]
        scores = scorer.score(SAMPLES, told)
    assert scores.rewards == [2.0, -3.0, -1.0]
    assert list(scores.by_function) == ["exact_match", "model", "judge"], "beside models a function has a name too"
    assert [of.num_errors for of in scores.by_function.values()] == [0, 1, 1]
    assert scores.by_function["model"].rewards == [0.5, 0.0, -1.0], "what could not be scored is worth nothing"


def test_a_model_may_be_all_there_is() -> None:
    with Scorer.of(schema.Reward(functions=()), models=[model()]) as scorer:
        assert scorer.score(SAMPLES, [model().scores([1.0, 2.0, 3.0])]).rewards == [1.0, 2.0, 3.0]
        assert scorer.score([], [model().scores([])]).rewards == []


def names_of_functions(**reward: Any) -> tuple[str, ...]:
    return make_config(placement=PLACED, **MODELS, **({"reward": reward} if reward else {})).reward.names


def test_where_a_model_is_placed_functions_are_those_that_are_named() -> None:
    assert names_of_functions() == names_of_functions(timeout_s=3.0) == ()
    assert names_of_functions(function="math") == ("math",)
    assert make_config().reward.names == ("exact_match",)
    check_config(make_config(placement=PLACED, **MODELS))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward_model": {}}, "reward_model.path: got null, and placement has role reward_model"),
        ({"judge": {"path": "j"}}, "judge.prompt: got null; expected what the judge is asked"),
        ({"placement": {"actor, rollout, reward": 0}}, "no role judge is placed; expected judge: ranks in placement"),
        ({"reward_model": {"path": "m", "name": "judge"}}, "reward: 2 are called 'judge'"),
        (
            {"reward_model": {"path": "m", "name": "math"}, "reward": {"function": "math"}},
            "reward: 2 are called 'math'",
        ),
        ({"reward_model": {"path": "m", "name": "mean"}}, "reward_model.name: got 'mean'; expected letters"),
        ({f: MODELS[f] | {"weight": 0.0} for f in MODELS}, "reward: every weight is 0"),
        ({"judge": MODELS["judge"] | {"parallel": {"pp": 2}}}, "judge.parallel.pp: got 2; expected 1"),
        (
            {"judge": MODELS["judge"] | {"engine": "sglang", "kv_cache_gb": 3}},
            "judge.kv_cache_gb: got 3.0 with judge.engine sglang, whose server decides",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(make_config(**{"placement": PLACED, **MODELS, **sections}))


def test_a_reward_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.functions: got none, and no model tells what responses are worth"):
        check_config(make_config(reward={"functions": []}))


def test_models_say_what_they_have_to_before_the_reward_asks() -> None:
    order = order_of(steps=1, placement=PLACED, **MODELS, **NO_EVALUATION)
    tasks = [entry.name for entry in order if entry.kind == "task"]
    assert tasks[1:5] == ["generate", "model_scores", "verdicts", "score"]
    waits = [entry.name for entry in order if entry.kind == "wait" and entry.roles[1] == "reward"]
    assert waits == ["model_scores", "verdicts", "samples"]


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architectures is .* expected a classifier"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "id2label is absent; expected one label"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "and not 2"),
    ],
)
def test_a_reward_model_gives_one_score(tmp_path: Any, says: dict[str, Any], expected: str) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(says))
    with pytest.raises(CheckpointError, match=expected):
        require_classifier(tmp_path, "reward_model.path")


class TestQuestion:
    def test_it_shows_what_it_names(self) -> None:
        question = Question('{prompt} {response} {label} {source} {{response}} {"score": 1}')
        assert question.takes_label and question.columns.required == {"source"}
        asked = question.of(Scorable("1+1", "2 {label}", "two", row={"source": "sums"}))
        assert asked == '1+1 2 {label} two sums {response} {"score": 1}'

    def test_of_a_conversation_it_shows_all_turns(self) -> None:
        turns = [{"message": {"role": "assistant", "content": text}, "replies": [], "reward": 0.0} for text in "ab"]
        question = Question("{conversation}")
        assert {"messages", "turns"} <= question.fields and not question.takes_label
        assert question.of(Scorable("q", "ab", "", turns=turns)) == "user: q\n\nassistant: a\n\nassistant: b"

    def test_a_text_without_fields_is_a_file(self, tmp_path: Any) -> None:
        (tmp_path / "question.txt").write_text("Is {response} right?")
        assert Question(str(tmp_path / "question.txt")).of(Scorable("", "2", "")) == "Is 2 right?"
        with pytest.raises(ConfigError, match="is no file that can be read"):
            Question("Is it right?")
        with pytest.raises(ConfigError, match="would not see what it is to judge"):
            Question("Is {prompt} hard?")

    @given(st.text(), st.text())
    def test_nothing_in_a_sample_is_taken_for_a_field(self, prompt: str, response: str) -> None:
        assert Question("{prompt}|{response}").of(Scorable(prompt, response, "")) == f"{prompt}|{response}"


class TestVerdict:
    @pytest.mark.parametrize(
        ("answer", "number"),
        [("7", 7), ("It is 3 of 10.\nScore: 7/10", 10), ("-0.5 points", -0.5), ("none", None), ("", None)],
    )
    def test_by_default_it_is_the_last_number(self, answer: str, number: float | None) -> None:
        assert told(schema.Judge(), answer) == number

    def test_the_last_match_of_an_expression_counts(self) -> None:
        settings = schema.Judge(verdict=r"\[\[(\d+)\]\]")
        assert told(settings, "[[1]] or rather [[4]], 9") == 4
        assert told(settings, "9") is None

    def test_a_function_may_read_it(self) -> None:
        settings = schema.Judge(verdict="tests.unit.test_rewarding_models:length")
        assert told(settings, "abc") == 3
        for answer in ("raise", "none", "infinity"):
            assert told(settings, answer) is None

    @pytest.mark.parametrize("verdict", ["(", r"(\d)(\d)", "nowhere:function", "nothing"])
    def test_what_reads_nothing_is_refused(self, verdict: str) -> None:
        with pytest.raises(ConfigError, match="judge.verdict"):
            verdict_parser(schema.Judge(verdict=verdict))


def told(settings: schema.Judge, answer: str) -> float | None:
    try:
        return verdict_parser(settings)(answer)
    except NoVerdictError:
        return None


def length(answer: str) -> float | None:
    """A user's function."""
    if answer == "raise":
        raise KeyError(answer)
    return {"none": None, "infinity": math.inf}.get(answer, float(len(answer)))


def test_models_are_known_by_their_roles() -> None:
    config = make_config(placement=PLACED, **MODELS)
    found = rewarding_models(config, ("reward", "reward_model", "judge"))
    assert [(of.title, of.transfer("samples"), of.transfer("evaluation_samples")) for of in found] == [
        ("model", "model_scores", "evaluation_model_scores"),
        ("judge", "verdicts", "evaluation_verdicts"),
    ]
