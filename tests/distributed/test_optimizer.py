"""Optimizers whose states lie on the host or are kept in bf16, and Muon: equal updates in every layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases_optimizer import EQUAL, EXPERT_LAYOUTS, LAYOUTS, OFFLOADED, QUICK, SAVED
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # test_training_state.py has a quick part

OTHER = [name for name, case in SAVED.items() if case.other is not None]


@pytest.fixture(scope="module")
def quick_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world_of(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def slow_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world_of(tmp_path_factory.mktemp("slow"), [name for name in (*EQUAL, *SAVED) if name not in QUICK])


def world_of(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    checkpoints = make_checkpoints(folder, ("qwen3",), num_hidden_layers=2)
    arguments = {"checkpoints": checkpoints, "folder": str(folder), "names": list(names)}
    return run_distributed("tests.distributed.cases_optimizer:places", 4, arguments, timeout_s=300)


@pytest.mark.parametrize("name", slow_but(EQUAL, *QUICK))
def test_where_the_states_lie_changes_no_bit(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks[: len(EQUAL[name].grid.ranks)]:
        resident, offloaded, half = rank[name]
        for other in (offloaded, half):
            assert other["updates"] == resident["updates"]
            of_step = {kind: values for kind, values in other["digests"].items() if kind != "step"}
            assert of_step == {kind: resident["digests"][kind] for kind in of_step}


@pytest.mark.parametrize("name", slow_but(EQUAL, *QUICK))
def test_what_is_offloaded_is_not_on_the_device(ranks: list[dict[str, Any]], name: str) -> None:
    resident, offloaded, half = (run["bytes"] for run in ranks[0][name])
    for part in ("master_weights", "optimizer"):
        on_device = resident[part][0]
        assert offloaded[part][0] == 0
        assert 0.2 * on_device <= half[part][0] <= 0.6 * on_device
        assert offloaded[part][1] == pytest.approx(on_device, rel=0.01)
    assert resident["weights"] == offloaded["weights"] and resident["gradients"] == offloaded["gradients"]


@pytest.mark.parametrize("name", slow_but([name for name in SAVED if name not in OTHER], *QUICK))
def test_it_goes_on_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    reports = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert reports
    for report in reports:
        assert report["resumed"] == report["undisturbed"]


@pytest.mark.parametrize("name", slow_but(SAVED, *QUICK))
def test_the_state_is_the_same_in_another_place_and_layout(ranks: list[dict[str, Any]], name: str) -> None:
    assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
    assert min(ranks[0][name]["distinct_values"].values()) > 1000


@pytest.mark.parametrize("name", slow_but(OTHER, *QUICK))
def test_it_goes_on_with_states_elsewhere(ranks: list[dict[str, Any]], name: str) -> None:
    tolerance = 1e-3 if name.startswith("bf16_moments") else 1e-5
    expected = ranks[0][name]["undisturbed"]["updates"]
    for found in (rank[name]["resumed"]["updates"] for rank in ranks):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=1e-5)


def muon(folder: Path, kind: str, *, experts: bool) -> list[dict[str, Any]]:
    arguments = {
        "checkpoints": make_checkpoints(folder, (kind,), num_hidden_layers=2),
        "folder": str(folder),
        "kind": kind,
        "experts": experts,
    }
    return run_distributed("tests.distributed.cases_optimizer:matrices", 4, arguments, timeout_s=300)


def check_layouts(ranks: list[dict[str, Any]], layouts: dict[str, Any]) -> None:
    """Weights are equal to 1e-5 after a few updates of about 1e-3 each."""
    expected = ranks[0]["alone"]
    for name, way in layouts.items():
        for rank in range(len(way.grid.ranks)):
            for one, other in zip(ranks[rank][name], expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-5), name
        assert ranks[0]["apart"][name] < 1e-5, name
    for rank in ranks:
        assert "has the states of muon, and actor.optimizer.name is adamw" in rank["refusal"]
        for one, other in zip(rank["moved"], expected[-len(rank["moved"]) :], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_muon_is_equal_in_every_layout_and_to_a_reference(tmp_path: Path) -> None:
    ranks = muon(tmp_path, "qwen3", experts=False)
    check_layouts(ranks, LAYOUTS)
    assert max(ranks[0]["from_reference"].values()) < 1e-5
    assert min(ranks[0]["moved_by"].values()) > 1e-3


@pytest.mark.slow
def test_muon_moves_experts_and_latent_attention_alike_in_every_layout(tmp_path: Path) -> None:
    check_layouts(muon(tmp_path, "deepseek_v3", experts=True), EXPERT_LAYOUTS)


@pytest.mark.slow
def test_activations_on_the_host_change_no_bit(tmp_path: Path) -> None:
    arguments = {"checkpoints": make_checkpoints(tmp_path, ("qwen2_tied",))}
    ranks = run_distributed("tests.distributed.cases_optimizer:activations", 4, arguments, timeout_s=300)
    copied = dict[str, int]()
    for rank in ranks:
        for name, ((metrics, weights, none), (others, same, copies)) in rank.items():
            assert others == metrics and same == weights, name
            assert none == 0
            copied[name] = max(copied.get(name, 0), copies)
    assert len(copied) == len(OFFLOADED)
    # With a layer in every chunk there is none but the last.
    assert all((count > 0) != name.startswith("pp3_vpp2") for name, count in copied.items())
