"""A run resumed from a saved training state equals an unbroken one, in the same parallel layout or another."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_training_state import AFTER, BEFORE, CASES, QUICK, WITH_EXPERTS, WORLD_SIZE
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.tolerances import near
from tests.support.worlds import Ranks, made_once, run_case

SAME = [name for name, case in CASES.items() if case.other is None]
OTHER = [name for name, case in CASES.items() if case.other is not None]
ONE_TYPE = [name for name in OTHER if {CASES[name].way.dtype, CASES[name].goes_on.dtype} == {"float32"}]


def world_of(folder: Path, case: str, **options: Any) -> Ranks:
    checkpoints = make_checkpoints(folder, ("qwen3", "qwen2_tied"), num_hidden_layers=2)
    return run_case(f"cases_training_state:{case}", WORLD_SIZE, checkpoints=checkpoints, folder=folder, **options)


quick_world = made_once(partial(world_of, case="quick_cases"))
slow_world = made_once(partial(world_of, case="some_cases", names=[name for name in CASES if name not in QUICK]))


@pytest.mark.parametrize("name", slow_but([*SAME, "at_the_start"], *QUICK, "at_the_start"))
def test_it_goes_on_bit_for_bit_in_the_same_layout(ranks: Ranks, name: str) -> None:
    reports = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert reports
    for report in reports:
        assert report["resumed"] == report["undisturbed"]


@pytest.mark.parametrize("name", slow_but(ONE_TYPE, *QUICK))
def test_it_goes_on_in_another_layout(ranks: Ranks, name: str) -> None:
    expected = ranks[0][name]["undisturbed"]["updates"]
    for rank in range(len(CASES[name].goes_on.grid.ranks)):
        tokens, found = ranks[rank][name]["response_tokens"], ranks[rank][name]["resumed"]["updates"]
        assert len(found) == AFTER
        for one, other in zip(found, expected, strict=True):
            assert one == near(other, tokens=tokens, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_nothing_of_the_state_changes_on_the_way(ranks: Ranks, name: str) -> None:
    """Saved again from the other layout, the state is the same."""
    assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
    assert min(ranks[0][name]["distinct_values"].values()) > 10_000


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_updates_are_counted_on(ranks: Ranks, name: str) -> None:
    reports = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert {report["num_updates"] for report in reports} == {BEFORE}
    assert not any(report["shared_steps"] for report in reports)


def test_a_state_cannot_be_saved_within_a_mini_batch(ranks: Ranks) -> None:
    assert all("gradients wait for their optimizer step" in rank["within_a_mini_batch"] for rank in ranks)


@pytest.mark.slow
def test_experts_and_biases_of_routers_go_on_however_they_are_shared_out(tmp_path: Path) -> None:
    given = {"checkpoints": make_checkpoints(tmp_path, ["deepseek_v3"], num_hidden_layers=2), "folder": tmp_path}
    ranks = run_case("cases_training_state:some_cases", WORLD_SIZE, **given, names=list(WITH_EXPERTS))
    for name, case in WITH_EXPERTS.items():
        expected = ranks[0][name]["undisturbed"]
        assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
        for rank in range(len(case.goes_on.grid.ranks)):
            found = ranks[rank][name]
            assert found["num_updates"] == BEFORE
            if case.other is None:
                assert found["resumed"] == found["undisturbed"]
            for one, other in zip(found["resumed"]["updates"], expected["updates"], strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
