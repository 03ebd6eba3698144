"""A training state that was saved goes on as if nothing had happened, in the same parallel layout or another."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_training_state import AFTER, BEFORE, CASES, QUICK, WITH_EXPERTS, WORLD_SIZE
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.tolerances import near
from tests.support.torchrun import run_distributed

SAME = [name for name, case in CASES.items() if case.other is None]
OTHER = [name for name, case in CASES.items() if case.other is not None]
ONE_TYPE = [name for name in OTHER if {CASES[name].way.dtype, CASES[name].goes_on.dtype} == {"float32"}]


@pytest.fixture(scope="module")
def quick_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world_of(tmp_path_factory.mktemp("quick"), "quick_cases")


@pytest.fixture(scope="module")
def slow_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    names = [name for name in CASES if name not in QUICK]
    return world_of(tmp_path_factory.mktemp("slow"), "some_cases", names=names)


def world_of(folder: Path, case: str, **options: Any) -> list[dict[str, Any]]:
    checkpoints = make_checkpoints(folder, ("qwen3", "qwen2_tied"), num_hidden_layers=2)
    arguments = {"checkpoints": checkpoints, "folder": str(folder), **options}
    return run_distributed(f"tests.distributed.cases_training_state:{case}", WORLD_SIZE, arguments, timeout_s=300)


@pytest.mark.parametrize("name", slow_but([*SAME, "at_the_start"], *QUICK, "at_the_start"))
def test_it_goes_on_bit_for_bit_in_the_same_layout(ranks: list[dict[str, Any]], name: str) -> None:
    reports = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert reports
    for report in reports:
        assert report["resumed"] == report["undisturbed"]


@pytest.mark.parametrize("name", slow_but(ONE_TYPE, *QUICK))
def test_it_goes_on_in_another_layout(ranks: list[dict[str, Any]], name: str) -> None:
    expected = ranks[0][name]["undisturbed"]["updates"]
    for rank in range(len(CASES[name].goes_on.grid.ranks)):
        tokens, found = ranks[rank][name]["response_tokens"], ranks[rank][name]["resumed"]["updates"]
        assert len(found) == AFTER
        for one, other in zip(found, expected, strict=True):
            assert one == near(other, tokens=tokens, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_nothing_of_the_state_changes_on_the_way(ranks: list[dict[str, Any]], name: str) -> None:
    """Saved again from the other layout it is what it was."""
    assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
    assert min(ranks[0][name]["distinct_values"].values()) > 10_000


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_updates_are_counted_on(ranks: list[dict[str, Any]], name: str) -> None:
    reports = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert {report["num_updates"] for report in reports} == {BEFORE}
    assert not any(report["shared_steps"] for report in reports)


def test_a_state_cannot_be_saved_within_a_mini_batch(ranks: list[dict[str, Any]]) -> None:
    assert all("gradients wait for their optimizer step" in rank["within_a_mini_batch"] for rank in ranks)


def check_with_experts(ranks: list[dict[str, Any]], name: str) -> None:
    case, expected = WITH_EXPERTS[name], ranks[0][name]["undisturbed"]
    assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
    for rank in range(len(case.goes_on.grid.ranks)):
        found = ranks[rank][name]
        assert found["num_updates"] == BEFORE
        if case.other is None:
            assert found["resumed"] == found["undisturbed"]
        for one, other in zip(found["resumed"]["updates"], expected["updates"], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_experts_and_biases_of_routers_go_on_however_they_are_shared_out(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path, ["deepseek_v3"], num_hidden_layers=2)
    arguments = {"checkpoints": checkpoints, "folder": str(tmp_path), "names": list(WITH_EXPERTS)}
    case = "tests.distributed.cases_training_state:some_cases"
    ranks = run_distributed(case, WORLD_SIZE, arguments, timeout_s=300)
    for name in WITH_EXPERTS:
        check_with_experts(ranks, name)
