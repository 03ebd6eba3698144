"""Models with experts, latent attention, windows and further norms train alike in every layout, and as transformers'
do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cases_experts import EXPORTED, LAYOUTS, TOO_LARGE, response_mask
from tests.support.family_checkpoints import (
    LENGTHS,
    OTHER_DENSE,
    SPARSE,
    VARIANTS,
    WITH_BIASES,
    make_family_checkpoint,
    model_logprobs,
    write_gradients,
)
from tests.support.torchrun import run_distributed

BALANCED = {"aux_loss_coef": 0.05, "z_loss_coef": 0.01, "bias_update_rate": 0.01}
MODEL = "deepseek_v3"
SLICED = [name for name, layout in LAYOUTS.items() if layout.grid.cp > 1]
FEW = {MODEL: ["one_rank", EXPORTED, "pp2_ep2"]}
LATENT_SLICED, PLAIN_SLICED = SLICED[::2], SLICED[1::2]
MANY = {name: ["one_rank"] for name in SPARSE if name != MODEL} | {
    "qwen3_moe": [name for name in LAYOUTS if name not in (*FEW[MODEL][1:], *LATENT_SLICED)],
    "mixtral": ["one_rank", "tp2_ep2_plain"],
    "moonlight": ["one_rank", "pp4", "tp2_cp2_ep2_etp1"],
    MODEL: ["one_rank", *(name for name in LATENT_SLICED if name not in FEW[MODEL])],
    "qwen2_moe": ["one_rank", "tp2_ep2", "cp2_ep2"],
    "glm4_moe": ["one_rank", "tp2_pp2_ep2_etp1"],
    "glm4_moe_lite": ["one_rank", "tp2_ep2"],
    "minimax_m2": ["one_rank", "tp2_ep2", "cp2_ep2"],
    "hy_v3": ["one_rank", "tp2_pp2_ep2_etp1"],
    "gpt_oss": ["one_rank", "tp2_ep2", "tp2_pp2_ep2_etp1", "recomputed"],
    "qwen3_next": ["one_rank", "tp2_ep2", "tp2_pp2_ep2_etp1", "tp2_cp2_ep2"],
    **{name: ["one_rank", "tp2_sequence_parallel"] for name in OTHER_DENSE},
    "gemma": ["one_rank", "tp2_sequence_parallel", "pp4"],
    "gemma2": ["one_rank", "tp2_sequence_parallel", "pp4", "recomputed"],
    "gemma3_linear": ["one_rank", "pp4", "recomputed"],
    "seed_oss": ["one_rank", "tp2", "tp2_sequence_parallel"],
    "nemotron": ["one_rank", "tp2", "tp2_sequence_parallel", "recomputed"],
    **dict.fromkeys(VARIANTS, ["one_rank"]),
    WITH_BIASES: ["one_rank", "tp2_sequence_parallel", "cp2"],
    "llama_mlp_bias_dynamic": ["one_rank", "tp2_sequence_parallel"],
    "qwen2_yarn": ["one_rank", "cp2"],
    "qwen2_window": ["one_rank", "pp4"],
    "qwen3_window_bias": ["one_rank", "tp2_sequence_parallel"],
    "qwen2_moe_window_yarn": ["one_rank", "pp2_ep2"],
    "qwen3_moe_yarn_bias": ["one_rank", "tp2_cp2_ep2"],
    # tp2_plain: Megatron's own gated delta net does not sum the gradient of its norm over these ranks (0.19).
    "qwen3_5": ["one_rank", "tp2_plain", "tp2_sequence_parallel", "pp4", "recomputed", "cp2", "cp4_by_heads"],
}
"""Each family is trained in the layouts that cut what is special in it; variants in the one that cuts their feature.
Dense ones have what none of the others has: windows, rotary embeddings of their own, further norms."""
RELATIVE = 1e-4
IN_LAYOUTS = 5e-5

Reports = dict[str, list[dict[str, Any]]]
"""Of the ranks that took part, by checkpoint and layout."""


def train(folder: Path, layouts: dict[str, list[str]]) -> Reports:
    for name in layouts:
        write_gradients(make_family_checkpoint(name, folder / name), response_mask())
    arguments = {"checkpoints": layouts, "folder": str(folder), "moe": BALANCED}
    ranks = run_distributed("tests.distributed.cases_experts:trained", 4, arguments, timeout_s=300)
    cases = {case for rank in ranks for case in rank}
    return {case: [rank[case] for rank in ranks if case in rank] for case in sorted(cases)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("few")


@pytest.fixture(scope="module")
def few(folder: Path) -> Reports:
    return train(folder, FEW)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return train(tmp_path_factory.mktemp("many"), MANY)


def check_gradients(reports: Reports) -> None:
    found = {case: report["differences"] for case, of in reports.items() for report in of if report.get("differences")}
    assert found
    for case, differences in found.items():
        assert max(differences.values()) < RELATIVE, (case, differences)


def check_alike(reports: Reports) -> None:
    """Loss, gradient norm and loads of every step, biases and log-probs after them."""
    for case, of in reports.items():
        if case.endswith("/float16"):
            continue
        expected = reports[f"{case.split('/')[0]}/one_rank"][0]
        for report in of:
            for step, (found, wanted) in enumerate(zip(report["steps"], expected["steps"], strict=True)):
                assert found == pytest.approx(wanted, rel=IN_LAYOUTS), (case, step)
            for name, logprobs in report["after"].items():
                assert logprobs == pytest.approx(expected["after"][name], abs=3e-4), case


def test_gradients_are_those_of_transformers(few: Reports) -> None:
    check_gradients(few)


def test_the_layout_changes_nothing(few: Reports) -> None:
    check_alike(few)


@pytest.mark.slow
def test_every_familys_gradients_are_those_of_transformers(many: Reports) -> None:
    check_gradients(many)


@pytest.mark.slow
def test_no_layout_changes_anything(many: Reports) -> None:
    check_alike(many)


def test_biases_move_by_the_rate_on_every_rank(few: Reports) -> None:
    before, *after = few[f"{MODEL}/one_rank"][0]["biases"]
    assert before
    for earlier, later in zip([before, *after], after, strict=False):
        for name, values in later.items():
            moved = torch.tensor(values) - torch.tensor(earlier[name])
            at_rest = moved.abs() < 1e-6
            assert torch.allclose(moved[~at_rest].abs(), torch.tensor(BALANCED["bias_update_rate"]), atol=1e-6)
            assert moved.max() > 0 > moved.min()
    stages = few[f"{MODEL}/pp2_ep2"]
    assert {values for report in stages for values in map(str, report["biases"][-1].values())} == {
        *map(str, after[-1].values())
    }


def check_one_loss_scale(reports: Reports, name: str) -> None:
    """Whichever gradients overflow, of experts or of others: it halves once, and no weight or bias moves."""
    (expected,) = reports[f"{name.split('/')[0]}/one_rank"]
    found = reports[f"{name}/float16"]
    assert len(found) == 4 and all(report["steps"] == found[0]["steps"] for report in found)
    *overflowed, made = found[0]["steps"]
    assert overflowed
    scales = [step["loss_scale"] for step in found[0]["steps"]]
    assert scales == [TOO_LARGE.initial / 2 ** min(number + 1, len(overflowed)) for number in range(len(scales))]
    for key in ("loss", "grad_norm", "moe_aux_loss", "moe_z_loss"):
        assert made[key] == pytest.approx(expected["steps"][0][key], rel=0.03)
    assert all(report["biases_kept"] for report in found)
    assert any(report["biases_moved"] for report in found) == name.startswith(MODEL)


def test_in_float16_experts_have_the_loss_scale_of_the_others(few: Reports) -> None:
    check_one_loss_scale(few, f"{MODEL}/pp2_ep2")


@pytest.mark.slow
def test_in_float16_so_they_have_without_a_distributed_optimizer(many: Reports) -> None:
    check_one_loss_scale(many, "mixtral/tp2_ep2_plain")


def test_what_was_trained_is_in_transformers_what_it_was_in_training(few: Reports, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / MODEL / "trained", dtype=torch.float32)
    tokens = load_file(folder / MODEL / "expected.safetensors")["tokens"].split(LENGTHS)
    for report in few[f"{MODEL}/{EXPORTED}"]:
        for sample, logprobs in report["after"].items():
            with torch.no_grad():
                assert logprobs == pytest.approx(model_logprobs(model, tokens[int(sample)]).tolist(), abs=1e-4)
