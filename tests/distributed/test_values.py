"""A value model gives transformers' scores and gradients in every parallel layout."""

import pytest

from rltrain.reshard.megatron_layout import padded_vocab_size
from tests.distributed.cases_values import COMBINATIONS, make_critics
from tests.support.tiny_checkpoints import SHAPE, VOCAB_SIZE
from tests.support.worlds import Ranks, made_once, reports, run_case

CASES = [f"{name}/{layout}" for name, layouts in COMBINATIONS.items() for layout in layouts]


ranks = made_once(lambda folder: run_case("cases_values:all_cases", 2, critics=make_critics(folder)))


@pytest.mark.parametrize("name", [*CASES, "recompute"])
def test_scores_and_gradients_are_those_of_transformers(ranks: Ranks, name: str) -> None:
    for report in reports(ranks, name):
        assert report["scores"] < 1e-4
        assert report["of_texts"] < 1e-4, "a sample's score is the classifier's score of its text"
        assert abs(report["loss"]) < 1e-5
        for parameter, difference in report["gradients"].items():
            assert difference < 1e-4, parameter


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_layout(ranks: Ranks, name: str) -> None:
    assert all(report["names"] for report in reports(ranks, name))


def test_the_head_is_on_the_last_stage(ranks: Ranks) -> None:
    assert [report["head"] for report in reports(ranks, "qwen3/pp2")] == [False, True]
    assert [report["head"] for report in reports(ranks, "qwen2_tied/tp2")] == [True, True]


def test_no_vocabulary_projection_is_ever_made(ranks: Ranks) -> None:
    first_stage, last_stage = (rank["rows_allocated"] for rank in ranks)
    vocabulary, hidden = padded_vocab_size(VOCAB_SIZE, tp=1), SHAPE["hidden_size"]
    assert vocabulary in first_stage and hidden in first_stage
    assert vocabulary not in last_stage and hidden in last_stage


def test_scores_of_bfloat16_weights_are_not_rounded(ranks: Ranks) -> None:
    for report in reports(ranks, "bfloat16"):
        assert report["dtypes"] == ["torch.bfloat16"]
        assert report["scores"] < 0.5
        assert report["rounded_scores"] < 50


def test_no_samples_have_no_scores(ranks: Ranks) -> None:
    assert [report["empty"] for report in reports(ranks, "qwen3/pp2")] == [[], []]
