"""An optimizer step is the same however its samples are cut into parts; actor and critic train by the same code.

Bit for bit where micro-batches come in equal shapes and equal order, else as far as float32 goes.
"""

from pathlib import Path
from typing import Any

import pytest

from rltrain.training.trainable import SKIPPED
from tests.distributed.cases_accumulation import LAYOUTS
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.tolerances import near
from tests.support.torchrun import run_distributed

pytestmark = pytest.mark.slow  # test_training.py trains in parts, too

EVERY = slow_but(["tp1", "tp2_sp", "pp2", "dp2", "pp2_dp2"], *LAYOUTS[False])
OF_REPLICAS = slow_but(["tp1", "dp2", "pp2_dp2"], "tp1", "pp2_dp2")
ALONE, FEW = 1, 60


def world_of(folder: Path, *, slow: bool) -> list[dict[str, Any]]:
    arguments = {"path": make_checkpoints(folder, ["qwen3"], num_hidden_layers=2)["qwen3"], "slow": slow}
    return run_distributed("tests.distributed.cases_accumulation:all_cases", 4, arguments, timeout_s=200)


@pytest.fixture(scope="module")
def quick_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world_of(tmp_path_factory.mktemp("quick"), slow=False)


@pytest.fixture(scope="module")
def slow_world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return world_of(tmp_path_factory.mktemp("slow"), slow=True)


def reports(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks if name in rank]
    assert found, f"no rank reported {name}"
    return found


@pytest.mark.parametrize("layout", EVERY)
def test_parts_of_the_same_micro_batches_give_the_same_bits(ranks: list[dict[str, Any]], layout: str) -> None:
    """Every sample is a micro-batch; in a pipeline all have one length, so that none is padded."""
    wanted = reports(ranks, f"{layout}/whole/{ALONE}")
    assert reports(ranks, f"{layout}/three/{ALONE}") == wanted


@pytest.mark.parametrize("layout", EVERY)
def test_parts_of_other_micro_batches_give_the_same_numbers(ranks: list[dict[str, Any]], layout: str) -> None:
    """Other shapes, sums in another order: 1e-5 is some 80 units in the last place."""
    wanted = reports(ranks, f"{layout}/whole/{FEW}")
    for actual, expected in zip(reports(ranks, f"{layout}/three/{FEW}"), wanted, strict=True):
        for step, wanted in zip(actual["steps"], expected["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_replicas_without_a_sample_add_nothing(ranks: list[dict[str, Any]], layout: str) -> None:
    (single,) = reports(ranks, "one_share/tp1")
    for metrics in reports(ranks, f"one_share/{layout}"):
        assert metrics == pytest.approx(single, rel=1e-5)
    (single,) = reports(ranks, "usual_step/tp1")
    for metrics in reports(ranks, f"usual_step/{layout}"):
        assert metrics == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_no_sample_anywhere_is_refused_on_all_ranks(ranks: list[dict[str, Any]], layout: str) -> None:
    for message in reports(ranks, f"no_share/{layout}"):
        assert message.startswith("optimizer step 2 of the actor has no sample on any of its")
        assert "batch.prompts_per_step" in message


@pytest.mark.parametrize("layout", OF_REPLICAS)
def test_samples_without_response_leave_the_weights(ranks: list[dict[str, Any]], layout: str) -> None:
    assert all(reports(ranks, f"no_response_weights_kept/{layout}"))
    for metrics in reports(ranks, f"no_response/{layout}"):
        assert metrics["lr"] > 0
        assert {metrics[name] for name in ("loss", "grad_norm", "entropy", "worst")} == {0}


def test_a_failed_step_leaves_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["after_failure/pp2_dp2"]["same"]
        assert "the actor's loss is nan" in rank["diverged/pp2_dp2"]
        assert "accumulate() before it" in rank["no_parts/pp2_dp2"]


@pytest.mark.parametrize("layout", EVERY)
def test_a_critic_trains_alike_in_every_layout(ranks: list[dict[str, Any]], layout: str) -> None:
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


def test_a_critic_reports_how_well_it_does(ranks: list[dict[str, Any]]) -> None:
    (single,) = reports(ranks, "critic/tp1")
    names = {"loss", "value_mean", "value_clipfrac", "return_mean", "explained_variance", "grad_norm", "lr"}
    assert set(single["steps"][0]) == names | {SKIPPED}
