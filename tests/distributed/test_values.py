"""A value model gives transformers' scores and gradients in every parallel layout."""

from typing import Any

import pytest

from rltrain.reshard.megatron_layout import padded_vocab_size
from tests.distributed.cases_values import COMBINATIONS, make_critics
from tests.support.tiny_checkpoints import SHAPE, VOCAB_SIZE
from tests.support.torchrun import run_distributed

CASES = [f"{name}/{layout}" for name, layouts in COMBINATIONS.items() for layout in layouts]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    critics = make_critics(tmp_path_factory.mktemp("critics"))
    return run_distributed("tests.distributed.cases_values:all_cases", 2, {"critics": critics}, timeout_s=120)


def reports(ranks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [rank[name] for rank in ranks if name in rank]
    assert found, f"no rank reported {name}"
    return found


@pytest.mark.parametrize("name", [*CASES, "recompute"])
def test_scores_and_gradients_are_those_of_transformers(ranks: list[dict[str, Any]], name: str) -> None:
    for report in reports(ranks, name):
        assert report["scores"] < 1e-4
        assert report["of_texts"] < 1e-4, "a sample's score is what the classifier says of its text"
        assert abs(report["loss"]) < 1e-5
        for parameter, difference in report["gradients"].items():
            assert difference < 1e-4, parameter


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_layout(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(report["names"] for report in reports(ranks, name))


def test_the_head_is_on_the_last_stage(ranks: list[dict[str, Any]]) -> None:
    assert [report["head"] for report in reports(ranks, "qwen3/pp2")] == [False, True]
    assert [report["head"] for report in reports(ranks, "qwen2_tied/tp2")] == [True, True]


def test_no_vocabulary_projection_is_ever_made(ranks: list[dict[str, Any]]) -> None:
    first_stage, last_stage = (rank["rows_allocated"] for rank in ranks)
    vocabulary, hidden = padded_vocab_size(VOCAB_SIZE, tp=1), SHAPE["hidden_size"]
    assert vocabulary in first_stage and hidden in first_stage
    assert vocabulary not in last_stage and hidden in last_stage


def test_scores_of_bfloat16_weights_are_not_rounded(ranks: list[dict[str, Any]]) -> None:
    for report in reports(ranks, "bfloat16"):
        assert report["dtypes"] == ["torch.bfloat16"]
        assert report["scores"] < 0.5
        assert report["rounded_scores"] < 50


def test_no_samples_have_no_scores(ranks: list[dict[str, Any]]) -> None:
    assert [report["empty"] for report in reports(ranks, "qwen3/pp2")] == [[], []]
