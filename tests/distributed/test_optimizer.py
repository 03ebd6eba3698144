"""Optimizers with states on the host or in bf16, and Muon: equal updates in every layout."""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.cases_optimizer import EQUAL, OFFLOADED, QUICK_EQUAL, SAVED, WAYS
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, run_case

OTHER = [name for name, case in SAVED.items() if case.other is not None]


def world_of(folder: Path, case: str, num_ranks: int) -> Ranks:
    checkpoints = make_checkpoints(folder, ("qwen3",), num_hidden_layers=2)
    return run_case(f"cases_optimizer:{case}", num_ranks, checkpoints=checkpoints, folder=folder)


quick_world = made_once(partial(world_of, case="quick_cases", num_ranks=2))
slow_world = made_once(partial(world_of, case="places", num_ranks=4))


@pytest.mark.parametrize("name", slow_but(EQUAL, QUICK_EQUAL))
def test_where_the_states_lie_changes_no_bit(ranks: Ranks, name: str) -> None:
    for rank in ranks[: len(EQUAL[name].grid.ranks)]:
        resident, offloaded, half = rank[name]
        for other in (offloaded, half):
            assert other["updates"] == resident["updates"]
            of_step = {kind: values for kind, values in other["digests"].items() if kind != "step"}
            assert of_step == {kind: resident["digests"][kind] for kind in of_step}


@pytest.mark.parametrize("name", slow_but(EQUAL, QUICK_EQUAL))
def test_what_is_offloaded_is_not_on_the_device(ranks: Ranks, name: str) -> None:
    resident, offloaded, half = (run["bytes"] for run in ranks[0][name])
    for part in ("master_weights", "optimizer"):
        on_device = resident[part][0]
        assert offloaded[part][0] == 0
        assert 0.2 * on_device <= half[part][0] <= 0.6 * on_device
        assert offloaded[part][1] == pytest.approx(on_device, rel=0.01)
    assert resident["weights"] == offloaded["weights"] and resident["gradients"] == offloaded["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAVED if name not in OTHER])
def test_it_goes_on_bit_for_bit(ranks: Ranks, name: str) -> None:
    found = [rank[name] for rank in ranks if "resumed" in rank[name]]
    assert found and all(report["resumed"] == report["undisturbed"] for report in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_the_state_is_the_same_in_another_place_and_layout(ranks: Ranks, name: str) -> None:
    assert ranks[0][name]["equal_states"] == {"master": True, "exp_avg": True, "exp_avg_sq": True}
    assert min(ranks[0][name]["distinct_values"].values()) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER)
def test_it_goes_on_with_states_elsewhere(ranks: Ranks, name: str) -> None:
    tolerance = 1e-3 if name.startswith("bf16_moments") else 1e-5
    expected = ranks[0][name]["undisturbed"]["updates"]
    for found in (rank[name]["resumed"]["updates"] for rank in ranks):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=1e-5)


def test_muon_is_equal_in_two_layouts_and_to_a_reference(quick_world: Ranks) -> None:
    assert_muon([rank["muon"] for rank in quick_world], "quick")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layouts"), [("qwen3", "dense"), ("deepseek_v3", "experts")])
def test_muon_is_equal_in_every_layout_and_to_a_reference(tmp_path: Path, kind: str, layouts: str) -> None:
    given = {"checkpoints": make_checkpoints(tmp_path, (kind,), num_hidden_layers=2), "folder": tmp_path, "kind": kind}
    assert_muon(run_case("cases_optimizer:matrices", **given, layouts=layouts), layouts)


def assert_muon(ranks: Ranks, layouts: str) -> None:
    """Weights are equal to 1e-5 after a few updates of about 1e-3 each. Experts have no reference."""
    expected = ranks[0]["alone"]
    for name, way in WAYS[layouts].items():
        for rank in range(len(way.grid.ranks)):
            for one, other in zip(ranks[rank][name], expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-5), name
        assert ranks[0]["apart"][name] < 1e-5, name
    for rank in ranks:
        assert "has the states of muon, and actor.optimizer.name is adamw" in rank["refusal"]
        for one, other in zip(rank["moved"], expected[-len(rank["moved"]) :], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    if layouts != "experts":
        assert max(ranks[0]["from_reference"].values()) < 1e-5
        assert min(ranks[0]["moved_by"].values()) > 1e-3


@pytest.mark.slow
def test_activations_on_the_host_change_no_bit(tmp_path: Path) -> None:
    ranks = run_case("cases_optimizer:activations", checkpoints=make_checkpoints(tmp_path, ("qwen2_tied",)))
    copied = dict[str, int]()
    for rank in ranks:
        for name, ((metrics, weights, none), (others, same, copies)) in rank.items():
            assert others == metrics and same == weights, name
            assert none == 0
            copied[name] = max(copied.get(name, 0), copies)
    assert len(copied) == len(OFFLOADED)
    # The last layer of a chunk is not offloaded, and here a chunk has at most one layer.
    assert all((count > 0) != name.startswith("pp3_vpp2") for name, count in copied.items())
