"""Overlap of gradient reduction with backward and of weight gathering with forward changes no number.

Sums of two replicas are equal bit for bit in any order. So are their weights if nothing is clipped. Sums of four
replicas and norms agree to the precision of float32, because shards of buckets differ and are summed in another order.
"""

import math

import pytest

from tests.distributed.cases_overlap import WAYS
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, reports, run_case

pytestmark = pytest.mark.slow  # test_offload.py has steps with overlap and without

EVERY = pytest.mark.parametrize("way", WAYS)


@made_once
def ranks(folder) -> Ranks:
    checkpoints = make_checkpoints(folder, ["qwen3", "qwen2_tied"], num_hidden_layers=2)
    return run_case("cases_overlap:all_cases", checkpoints=checkpoints)


@EVERY
def test_steps_and_weights_are_the_same(ranks: Ranks, way: str) -> None:
    for overlapped, plain in reports(ranks, way):
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


@EVERY
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(ranks: Ranks, way: str) -> None:
    """The advantages are infinite on one replica. Steps around it change the weights as usual."""
    for run in (run for runs in reports(ranks, way) for run in runs):
        skipped = run["skipped"]
        assert skipped["same"] and not math.isfinite(skipped["loss"])
        assert skipped["skipped"] == [1, 0, 1, 0] and skipped["finite"] == [True, False, True]
        assert all(math.isfinite(value) for value in skipped["weights"])
        assert "after 2 skipped steps in a row (on_divergence.max_skipped)" in run["diverged"]


@EVERY
def test_all_buckets_begin_during_backward_of_a_replica_with_samples(ranks: Ranks, way: str) -> None:
    for number, (overlapped, plain) in enumerate(reports(ranks, way)):
        begun = [begun for begun, _ in overlapped["begun"]]
        num_buckets = overlapped["begun"][0][1]
        assert num_buckets > 1 and begun[0] == begun[3] == begun[-1] == num_buckets, (number, begun)
        assert begun[4] == 0, "another part may follow"
        assert sorted(begun[1:3]) in ([0, num_buckets], [0, 0]), "a replica without samples begins them in step()"
        assert {number for number, _ in plain["begun"]} == {0}
