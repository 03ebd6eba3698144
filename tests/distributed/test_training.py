"""One model trained in many parallel layouts gives the same numbers, equal to transformers'."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.cases_training import (
    MADE_AGAIN,
    MAX_RATIO,
    ONE_MICRO_BATCH,
    QUICK_LAYOUTS,
    RECOMPUTED,
    SEVERAL_MICRO_BATCHES,
    SLOW_LAYOUTS,
    SMALL_TILES,
)
from tests.support.marks import slow_but
from tests.support.tiny_checkpoints import CHECKPOINTS, make_checkpoints
from tests.support.worlds import Ranks, made_once, reports, run_case

TRAINED_MOST, TIED = "qwen3", "qwen2_tied"
"""The first has two layers; the others have four, two on each stage of a pipeline."""
BASE, *QUICK = QUICK_LAYOUTS[TRAINED_MOST]
LAYOUTS = [*QUICK, *(layout for layout in SLOW_LAYOUTS[TRAINED_MOST] if layout != BASE)]
BASELINE = f"{TRAINED_MOST}/tp1/{ONE_MICRO_BATCH}"
RELATIVE = 1e-5
OF_TRANSFORMERS = 2e-5


def world_of(folder: Path, slow: bool) -> Ranks:
    made = make_checkpoints(folder, [name for name in (CHECKPOINTS if slow else [TIED]) if name != TRAINED_MOST])
    made |= make_checkpoints(folder, [TRAINED_MOST], num_hidden_layers=2)
    return run_case("cases_training:all_cases", checkpoints=made, slow=slow)


quick_world, slow_world = (made_once(partial(world_of, slow=slow)) for slow in (False, True))


def assert_same_training(ranks: Ranks, name: str, baseline: str, relative: float = RELATIVE) -> None:
    (expected,) = reports(ranks, baseline)
    for actual in reports(ranks, name):
        for step, (values, wanted) in enumerate(zip(actual["steps"], expected["steps"], strict=True)):
            assert values == pytest.approx(wanted, rel=relative), f"{name}, step {step}"


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, *QUICK))
def test_loss_gradient_norm_and_metrics_do_not_depend_on_the_layout(ranks: Ranks, layout: str) -> None:
    assert_same_training(ranks, f"qwen3/{layout}/{SEVERAL_MICRO_BATCHES}", BASELINE)


@pytest.mark.parametrize("layout", slow_but(["tp1", "tp2"], "tp1"))
def test_micro_batches_do_not_change_the_result(ranks: Ranks, layout: str) -> None:
    for max_tokens in (ONE_MICRO_BATCH, SEVERAL_MICRO_BATCHES):
        assert_same_training(ranks, f"qwen3/{layout}/{max_tokens}", BASELINE)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied"])
def test_first_loss_and_gradient_norm_equal_those_of_transformers(ranks: Ranks, name: str) -> None:
    (report,) = reports(ranks, f"{name}/tp1/{SEVERAL_MICRO_BATCHES}")
    assert report["steps"][0]["loss"] == pytest.approx(report["expected_loss"], rel=OF_TRANSFORMERS)
    assert report["steps"][0]["grad_norm"] == pytest.approx(report["expected_grad_norm"], rel=OF_TRANSFORMERS)


# pp3_vpp2 has a middle stage without layers. There Megatron's HybridStack has wrong gradients (0.19).
@pytest.mark.parametrize("layout", slow_but(["tp2_pp2", "pp3_vpp2"], "pp3_vpp2"))
def test_tied_embeddings_train_alike_on_both_ends_of_a_pipeline(ranks: Ranks, layout: str) -> None:
    assert_same_training(ranks, f"qwen2_tied/{layout}/{SEVERAL_MICRO_BATCHES}", f"qwen2_tied/tp1/{ONE_MICRO_BATCH}")


@pytest.mark.slow
def test_interleaved_stages_have_micro_batches_of_padding_where_samples_are_too_few(ranks: Ranks) -> None:
    (expected,) = reports(ranks, "two_samples/tp1")
    for metrics in reports(ranks, "two_samples/pp3_vpp2"):
        assert metrics == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain_optimizer", *(f"recompute_{name}" for name in RECOMPUTED)])
def test_ways_of_computing_do_not_change_the_result(ranks: Ranks, variant: str) -> None:
    assert_same_training(ranks, variant, BASELINE)


@pytest.mark.parametrize("layout", MADE_AGAIN)
@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_outputs_that_backward_makes_again_change_no_gradient(ranks: Ranks, layout: str, by: str) -> None:
    for differences in reports(ranks, f"made_again/{layout}/{by}"):
        assert max(differences) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint", "layout"), SMALL_TILES)
def test_logits_that_are_never_whole_do_not_change_the_result(ranks: Ranks, checkpoint: str, layout: str) -> None:
    assert_same_training(ranks, f"small_tiles/{checkpoint}/{layout}", f"{checkpoint}/tp1/{ONE_MICRO_BATCH}")


def test_metrics_are_equal_on_all_ranks_and_training_learns(ranks: Ranks) -> None:
    for layout in QUICK:
        first, *others = reports(ranks, f"qwen3/{layout}/{SEVERAL_MICRO_BATCHES}")
        assert all(other["steps"] == first["steps"] for other in others), layout
        of_steps = {name: [step[name] for step in first["steps"]] for name in first["steps"][0]}
        assert of_steps["loss"][-1] < of_steps["loss"][0] - 0.1
        assert of_steps["samples_per_response_token"] == pytest.approx([12 / first["response_tokens"]] * 3)
        assert of_steps["lr"] == pytest.approx([0.005, 0.01, 0.01])
        assert all(math.isfinite(value) for values in of_steps.values() for value in values)


@pytest.mark.parametrize("layout", slow_but([BASE, *LAYOUTS], BASE, *QUICK))
def test_logprobs_equal_those_of_transformers_on_every_rank(ranks: Ranks, layout: str) -> None:
    assert all(
        report["start_difference"] < 1e-4 for report in reports(ranks, f"qwen3/{layout}/{SEVERAL_MICRO_BATCHES}")
    )


def test_logprobs_after_training_are_equal_across_the_replica(ranks: Ranks) -> None:
    for layout in ("tp4", "tp2_pp2"):
        first, *others = reports(ranks, f"qwen3/{layout}/{SEVERAL_MICRO_BATCHES}")
        assert all(other["end_logprobs"] == first["end_logprobs"] for other in others)
        (single,) = reports(ranks, BASELINE)
        assert first["end_logprobs"] == pytest.approx(single["end_logprobs"], abs=4e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_logits_equal_those_of_transformers_packed_or_not(ranks: Ranks, name: str) -> None:
    (differences,) = reports(ranks, f"family/{name}")
    assert max(differences) < 1e-4, differences


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "largest"), [("float32", 5e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_fused_layers_give_the_logits_and_gradients_of_plain_ones(
    ranks: Ranks, name: str, dtype: str, largest: float
) -> None:
    (differences,) = reports(ranks, f"fused/{name}/{dtype}")
    assert len(differences) > 10
    assert max(differences.values()) < largest, differences


HALF = {"bfloat16": ("tp2_dp2", "plain_optimizer", "wide_tp2_dp2_sp", "wide_tp2_pp2"), "float16": ("tp2_pp2",)}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "variant"), [(dtype, variant) for dtype, of in HALF.items() for variant in of])
def test_training_in_half_precision_follows_float32(ranks: Ranks, dtype: str, variant: str) -> None:
    (single,) = reports(ranks, BASELINE)
    loss, grad_norm = (0.02, 0.1) if dtype == "bfloat16" else (0.005, 0.02)
    for report in reports(ranks, f"{dtype}/{variant}"):
        assert report["dtypes"] == [f"torch.{dtype}"]
        for values, wanted in zip(report["steps"], single["steps"], strict=True):
            assert values["loss"] == pytest.approx(wanted["loss"], rel=loss)
            assert values["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=grad_norm)
            assert dtype == "bfloat16" or (values["loss_scale"], values["overflowed_updates"]) == (128, 0)


@pytest.mark.parametrize("layout", ["tp2_dp2", "pp2_dp2"])
def test_a_step_too_far_from_the_policy_of_the_samples_is_skipped_by_all_ranks(ranks: Ranks, layout: str) -> None:
    """Only the samples of one replica are. The mean is over the tokens of both."""
    found = reports(ranks, f"far/{layout}")
    of_replicas = {rank["above"]: rank["tokens"] for rank in found}
    mean = sum(math.exp(above) * tokens for above, tokens in of_replicas.items()) / sum(of_replicas.values())
    assert mean > MAX_RATIO
    for rank in found:
        assert rank["steps"] == found[0]["steps"] and rank["kept"] and rank["moved"]
        assert [step["far_updates"] for step in rank["steps"]] == [1, 1, 0]
        assert [step["skipped_updates"] for step in rank["steps"]] == [1, 1, 0], "more than max_skipped, which is 0"
        assert [step["ratio"] for step in rank["steps"]] == pytest.approx([mean, mean, 1], rel=1e-4)


def test_steps_that_overflow_halve_the_loss_scale_and_change_nothing_else(ranks: Ranks) -> None:
    first, *others = reports(ranks, "loss_scale")
    assert all(other["steps"] == first["steps"] for other in others)
    assert all(report["kept"] for report in (first, *others)), "the first three steps overflow"
    steps = first["steps"]
    overflowed = [step["overflowed_updates"] for step in steps]
    assert overflowed == [s["skipped_updates"] for s in steps] == [float(math.isinf(s["grad_norm"])) for s in steps]
    assert [s["loss_scale"] for s in steps[:5]] == [2.0 ** (16 - place) for place in range(5)], (
        "the resumed run continues the window"
    )
    assert not all(overflowed)
    made = overflowed.index(0)
    assert [s["loss_scale"] / steps[made]["loss_scale"] for s in steps[made : made + 2]] == [1, 2], "after a window"


def test_an_overflow_at_the_smallest_loss_scale_is_a_divergence(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["loss_scale_at_its_minimum"].startswith("DivergenceError: the actor's gradient norm is")


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, of in QUICK_LAYOUTS.items() for layout in of])
def test_parameters_are_those_of_the_layout(ranks: Ranks, name: str, layout: str) -> None:
    assert all(report["of_the_layout"] for report in reports(ranks, f"{name}/{layout}/{SEVERAL_MICRO_BATCHES}"))


@pytest.mark.parametrize("layout", ["tp2_dp2", "pp2_dp2"])
def test_divergence_on_one_rank_stops_all_before_the_weights_change(ranks: Ranks, layout: str) -> None:
    for rank in ranks:
        assert rank[f"nan/{layout}"].startswith("DivergenceError: the actor's loss is nan")
        assert rank[f"nan_gradient/{layout}"].startswith("DivergenceError: the actor's gradient norm is")
        assert rank[f"weights_kept/{layout}"]


def test_recomputing_latents_needs_transformer_engine(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["latents"].startswith("model.recompute.modules: got mla_up_proj, but Megatron needs Transformer")


def test_megatron_global_state_is_never_initialized(ranks: Ranks) -> None:
    assert [rank["parallel_state_initialized"] for rank in ranks] == [False] * 4


def test_ranks_compute_with_the_instructions_that_the_environment_names(ranks: Ranks) -> None:
    """They are forked from a process with torch loaded. tests/processors.sh relies on it."""
    named = os.environ.get("ATEN_CPU_CAPABILITY") or torch.backends.cpu.get_cpu_capability()
    assert {rank["instructions"] for rank in ranks} == {named.upper()}
