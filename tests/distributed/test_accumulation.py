"""An optimizer step does not depend on how its samples are cut into parts. Actor and critic use the same code.

Results are equal bit for bit if micro-batches have equal shapes and order, otherwise to the precision of float32.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed.cases_accumulation import ALONE, FEW, LAYOUTS
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.tolerances import near
from tests.support.worlds import Ranks, made_once, reports, run_case

pytestmark = pytest.mark.slow  # test_training.py trains in parts too

EVERY = slow_but(["tp1", "tp2_sp", "pp2", "dp2", "pp2_dp2"], *LAYOUTS[False])
OF_REPLICAS = slow_but(["tp1", "dp2", "pp2_dp2"], "tp1", "pp2_dp2")


def world_of(folder: Path, slow: bool) -> Ranks:
    path = make_checkpoints(folder, ["qwen3"], num_hidden_layers=2)["qwen3"]
    return run_case("cases_accumulation:all_cases", path=path, slow=slow)


quick_world, slow_world = (made_once(partial(world_of, slow=slow)) for slow in (False, True))


@pytest.mark.parametrize("layout", EVERY)
def test_parts_of_the_same_micro_batches_give_the_same_bits(ranks: Ranks, layout: str) -> None:
    """Every sample is a micro-batch. In a pipeline all have one length, so none is padded."""
    assert reports(ranks, f"{layout}/three/{ALONE}") == reports(ranks, f"{layout}/whole/{ALONE}")


@pytest.mark.parametrize("layout", EVERY)
def test_parts_of_other_micro_batches_give_the_same_numbers(ranks: Ranks, layout: str) -> None:
    """Shapes and orders of sums differ: 1e-5 is some 80 units in the last place."""
    wanted = reports(ranks, f"{layout}/whole/{FEW}")
    for actual, expected in zip(reports(ranks, f"{layout}/three/{FEW}"), wanted, strict=True):
        for step, wanted in zip(actual["steps"], expected["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_replicas_without_a_sample_add_nothing(ranks: Ranks, layout: str) -> None:
    for step in ("one_share", "usual_step"):
        (single,) = reports(ranks, f"{step}/tp1")
        for metrics in reports(ranks, f"{step}/{layout}"):
            assert metrics == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_no_sample_anywhere_is_refused_on_all_ranks(ranks: Ranks, layout: str) -> None:
    for message in reports(ranks, f"no_share/{layout}"):
        assert message.startswith("ConfigError: optimizer step 2 of the actor has no sample on any of its")
        assert "batch.prompts_per_step" in message


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_samples_without_response_leave_the_weights(ranks: Ranks, layout: str) -> None:
    assert all(reports(ranks, f"no_response_weights_kept/{layout}"))
    for metrics in reports(ranks, f"no_response/{layout}"):
        assert metrics["lr"] > 0
        assert {metrics[name] for name in ("loss", "grad_norm", "entropy", "worst")} == {0}


def test_a_failed_step_leaves_nothing_behind(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["after_failure/pp2_dp2"]["same"]
        assert "the actor's loss is nan" in rank["diverged/pp2_dp2"]
        assert "without accumulate()" in rank["no_parts/pp2_dp2"]


@pytest.mark.parametrize("layout", EVERY)
def test_a_critic_trains_alike_in_every_layout(ranks: Ranks, layout: str) -> None:
    (single,) = reports(ranks, "critic/tp1")
    for name, value in single["expected"].items():
        assert single["steps"][0][name] == pytest.approx(value, rel=1e-5), name
    assert single["steps"][1]["loss"] < single["steps"][0]["loss"]
    for report in reports(ranks, f"critic/{layout}"):
        for actual, expected in zip(report["steps"], single["steps"], strict=True):
            assert actual == near(expected, tokens=single["response_tokens"], rel=2e-5)
        assert report["diverged"].startswith("the critic's loss is nan at optimizer step 3")
        assert "critic.optimizer.lr" in report["diverged"]
        assert report["values"] == pytest.approx(single["values"], rel=1e-5)
