"""Gradients that are reduced during backward and weights that are gathered during forward change no number.

Sums of two replicas are equal bit for bit in any order, and so are the weights made of them where nothing is clipped;
sums of four, and norms, as far as float32 goes: shards of buckets lie otherwise, and are added up in another order.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.cases_overlap import WAYS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # test_training.py has steps in every layout

Seen = Callable[[str], list[dict[str, Any]]]

USUAL = ["dp2/plain", "pp2_dp2/tied"]
SLOW = [way for way in WAYS if way not in USUAL]
EVERY = [*USUAL, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"), ["qwen3", "qwen2_tied"], num_hidden_layers=2)


@pytest.fixture(scope="module")
def seen(checkpoints: dict[str, str]) -> Seen:
    """What each rank saw, in a run of all usual ways, or of all slow ones."""

    @cache
    def ranks(usual: bool) -> list[dict[str, Any]]:
        arguments = {"checkpoints": checkpoints, "ways": USUAL if usual else SLOW}
        return run_distributed("tests.distributed.cases_overlap:all_cases", 4, arguments, timeout_s=120)

    return lambda way: ranks(way in USUAL)


def pairs(seen: Seen, way: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(with overlap, without) of every rank that takes part."""
    found = [(rank[f"{way}/True"], rank[f"{way}/False"]) for rank in seen(way) if f"{way}/True" in rank]
    assert found
    return found


@pytest.mark.parametrize("way", EVERY)
def test_steps_and_weights_are_the_same(seen: Seen, way: str) -> None:
    for overlapped, plain in pairs(seen, way):
        if way == "dp4":
            for one, other in zip(overlapped["steps"], plain["steps"], strict=True):
                assert one == pytest.approx(other, rel=1e-5)
            assert overlapped["weights"] == pytest.approx(plain["weights"], rel=2e-5, abs=2e-5)
        else:
            norms = [[step.pop("grad_norm") for step in run["steps"]] for run in (overlapped, plain)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-6)
            names = ("steps", "weights", "values")
            assert {name: overlapped[name] for name in names} == {name: plain[name] for name in names}
        assert overlapped["diverged"] == plain["diverged"]


@pytest.mark.parametrize("way", EVERY)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(seen: Seen, way: str) -> None:
    """Its advantages are infinite on one replica; steps around it change the weights as ever."""
    for runs in pairs(seen, way):
        for run in runs:
            skipped = run["skipped"]
            assert skipped["same"] and not math.isfinite(skipped["loss"])
            assert skipped["skipped"] == [1, 0, 1, 0] and skipped["finite"] == [True, False, True]
            assert all(math.isfinite(value) for value in skipped["weights"])
            assert "after 2 in a row that were skipped (on_divergence.max_skipped)" in run["diverged"]


@pytest.mark.parametrize("way", EVERY)
def test_weights_are_whole_when_an_update_is_over(seen: Seen, way: str) -> None:
    assert all(overlapped["whole_weights"] for overlapped, _ in pairs(seen, way))


@pytest.mark.parametrize("way", EVERY)
def test_all_buckets_begin_during_backward_of_a_replica_with_samples(seen: Seen, way: str) -> None:
    for number, (overlapped, plain) in enumerate(pairs(seen, way)):
        begun = [begun for begun, _ in overlapped["begun"]]
        num_buckets = overlapped["begun"][0][1]
        assert num_buckets > 1 and begun[0] == begun[3] == begun[-1] == num_buckets, (number, begun)
        assert begun[4] == 0, "a part may be followed by another"
        assert sorted(begun[1:3]) in ([0, num_buckets], [0, 0]), "who has no samples begins them in step()"
        assert {number for number, _ in plain["begun"]} == {0}
