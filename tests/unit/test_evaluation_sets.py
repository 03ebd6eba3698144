"""What a config says of evaluation sets, and what it may not say."""

from typing import Any

import pytest

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.planning.validation import check_config
from tests.unit.schedule_configs import make_config

HARD = {"name": "hard", "data": {"path": "h"}, "sampling": {"temperature": 0.7}, "samples_per_prompt": 4}


def of_sets(*sets: dict[str, Any], **sections: Any) -> Config:
    return make_config(evaluation={"interval": 10, "sets": sets, **sections.pop("evaluation", {})}, **sections)


def test_the_short_form_is_a_greedy_set_with_the_run_s_limits():
    sampling = {"max_response_tokens": 77, "stop": ["END"], "stop_token_ids": [5]}
    short, hard = of_sets(HARD, rollout={"sampling": sampling}).evaluations
    assert (short.name, short.prefix, short.config_key, short.samples_per_prompt) == ("eval", "eval", "data.eval", 1)
    assert (short.sampling.temperature, short.sampling.max_response_tokens, short.interval) == (0, 77, 10)
    assert (hard.prefix, hard.config_key) == ("eval/hard", "evaluation.sets.0.data")
    assert (hard.sampling.temperature, hard.sampling.max_response_tokens) == (0.7, 77)
    assert short.sampling.stop == hard.sampling.stop == ("END",)
    assert short.sampling.stop_token_ids == hard.sampling.stop_token_ids == (5,)


def test_a_set_may_have_an_interval_a_limit_and_a_reward_of_its_own():
    own = {"interval": 0, "sampling": {"max_response_tokens": 5}, "reward": {"function": "math"}}
    plan = of_sets({**HARD, **own}).evaluations[1]
    assert [step for step in range(31) if plan.is_due(step, 30)] == [0, 30]
    assert plan.sampling.max_response_tokens == 5
    assert plan.reward is not None and plan.reward.function == "math"


def test_metrics_belong_to_the_set_that_their_prefix_names():
    short, hard = of_sets(HARD).evaluations
    assert short.reports("eval/score") and not short.reports("eval/hard/score")
    assert hard.reports("eval/hard/pass@4") and not hard.reports("eval/pass@4")
    assert short.own_name("eval/reward_mean/gsm8k") == hard.own_name("eval/hard/reward_mean/gsm8k")
    assert not short.reports("eval/hard/reward_mean/gsm8k")


def test_what_ends_a_run_is_the_first_set_s_score_unless_it_is_named():
    assert of_sets(HARD, evaluation={"stop_at": 0.9}).stop_metric == "eval/score"
    named = {"stop_at": 0.9, "stop_metric": "eval/hard/pass@2"}
    assert of_sets(HARD, evaluation=named).stop_metric == "eval/hard/pass@2"
    alone = of_sets(HARD, evaluation={"stop_at": 0.9}, data={"train": {"path": "t"}})
    assert alone.stop_metric == "eval/hard/score"
    assert of_sets(HARD).stop_metric is None


KEEP = {"keep_best": {"metric": "eval/hard/pass@4"}}


@pytest.mark.parametrize("evaluation", [{}, KEEP, {"keep_best": {"metric": "eval/hard/reward_form", "mode": "min"}}])
def test_sets_that_work_are_accepted(evaluation: dict[str, Any]):
    check_config(of_sets(HARD, evaluation=evaluation))


@pytest.mark.parametrize(
    ("sets", "sections", "expected"),
    [
        ([HARD, HARD], {}, "evaluation.sets: 2 sets are called 'hard'; expected a name for each"),
        ([{**HARD, "name": "eval"}], {}, "2 sets are called 'eval'; expected a name for each; eval is that of data"),
        ([{**HARD, "name": "a b"}], {}, "evaluation.sets: got the name 'a b'; expected letters, digits"),
        (
            [{**HARD, "data": {"sources": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]}}],
            {},
            "evaluation.sets.0.data.sources: got weights; expected none: an evaluation draws every row",
        ),
        ([{**HARD, "data": {}}], {}, "evaluation.sets.0.data: neither path nor sources is given"),
        (
            [{**HARD, "sampling": {}}],
            {},
            "evaluation.sets.0.samples_per_prompt: got 4 with sampling.temperature 0, at which all samples",
        ),
        (
            [{**HARD, "sampling": {"temperature": 1, "max_response_tokens": 4000}}],
            {},
            "rollout.max_context_tokens: got 4096; expected at least data.max_prompt_tokens 1024 + "
            "evaluation.sets.0.sampling.max_response_tokens 4000 = 5024",
        ),
        (
            [{**HARD, "data": {"path": "h", "label_key": None}}],
            {},
            "evaluation.sets.0.data.label_key: got null, but the reward exact_match compares with labels",
        ),
        (
            [{**HARD, "reward": {"function": "http://"}}],
            {},
            "evaluation.sets.0.reward.function: got 'http://'; expected an URL with a host",
        ),
        (
            [HARD],
            {"evaluation": {"keep_best": {"metric": "eval/hard/pass@3"}}},
            "evaluation.keep_best.metric: got 'eval/hard/pass@3'; expected a metric of an evaluation set: one of eval/",
        ),
        (
            [{**HARD, "name": "held"}],
            {"evaluation": {"stop_at": 1, "stop_metric": "eval/held/bset@4"}},
            r"eval/held/pass@4, eval/held/best@4 \(the nearest is eval/held/best@4\)",
        ),
        (
            [{**HARD, "name": f"set{number}"} for number in range(9)],
            {"evaluation": {"stop_at": 1, "stop_metric": "eval/set8/bset@4"}},
            r" and 60 more \(docs/evaluation.md has all; the nearest is eval/set8/best@4\)",
        ),
        (
            [HARD],
            {"evaluation": {"stop_at": 1, "stop_metric": "eval/easy/score"}},
            "evaluation.stop_metric: got 'eval/easy/score'; expected a metric of an evaluation set",
        ),
        ([HARD], {"evaluation": {"stop_metric": "eval/score"}}, "stop_metric: got 'eval/score' without evaluation.st"),
        (
            [],
            {"evaluation": KEEP, "data": {"train": {"path": "t"}}},
            "evaluation.keep_best.metric: got 'eval/hard/pass@4'; .*: there is no set",
        ),
        (
            [],
            {"algorithm": "evaluate", "data": {"train": {"path": "t"}}, "placement": {"rollout,reward": 0}},
            "evaluation.sets: got none, and no data.eval; expected either",
        ),
        (
            [HARD],
            {"algorithm": "dpo", "placement": {"actor,reference": 0}},
            "evaluation.sets: got 1 with algorithm dpo, which answers no prompts; expected none: held-out rows are",
        ),
        (
            [],
            {"algorithm": "sft", "placement": {"actor": 0}, "evaluation": {"stop_at": 1, "stop_metric": "eval/lss"}},
            r"got 'eval/lss'; expected a metric of an evaluation set: one of eval/loss \(the nearest is eval/loss\)",
        ),
        ([HARD], {"algorithm": "evaluate"}, "role actor has nothing to do in algorithm evaluate"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sets: list[dict[str, Any]], sections: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected.replace("+", r"\+")):
        check_config(of_sets(*sets, **sections))
