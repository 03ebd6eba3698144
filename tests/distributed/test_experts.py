"""Models with experts, latent attention, windows and further norms train as transformers' models do, in every
layout."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cases_experts import EXPORTED, HALF, LAYOUTS, TOO_LARGE, response_mask
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
from tests.support.marks import slow_but
from tests.support.worlds import Ranks, made_once, reports, run_case

BALANCED = {"aux_loss_coef": 0.05, "z_loss_coef": 0.01, "bias_update_rate": 0.01, "log_loads": True}
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
"""Each family is trained in the layouts that cut its special parts; variants in one layout that cuts their feature.

Dense families have windows, their own rotary embeddings, and further norms.
"""
RELATIVE = 1e-4
IN_LAYOUTS = 5e-5


def train(folder: Path, layouts: dict[str, list[str]]) -> Ranks:
    for name in layouts:
        write_gradients(make_family_checkpoint(name, folder / name), response_mask())
    return run_case("cases_experts:trained", checkpoints=layouts, folder=folder, moe=BALANCED)


folder, slow_world = made_once(lambda folder: folder), made_once(partial(train, layouts=MANY))


@pytest.fixture(scope="module")
def quick_world(folder: Path) -> Ranks:
    return train(folder, FEW)


QUICK_AND_SLOW = pytest.mark.parametrize("layouts", slow_but((FEW, MANY), FEW), ids=["few", "many"])
Layouts = dict[str, list[str]]


@QUICK_AND_SLOW
def test_gradients_are_those_of_transformers(ranks: Ranks, layouts: Layouts) -> None:
    for name in layouts:
        found = [report["differences"] for report in reports(ranks, f"{name}/one_rank")]
        found += [report["differences"] for layout in layouts[name] for report in reports(ranks, f"{name}/{layout}")]
        assert found[0]
        for differences in found:
            assert max(differences.values(), default=0) < RELATIVE, (name, differences)


@QUICK_AND_SLOW
def test_the_layout_changes_nothing(ranks: Ranks, layouts: Layouts) -> None:
    """Compares loss, gradient norm and loads of every step, and biases and log-probs after them."""
    for name, layout in [(name, layout) for name, of in layouts.items() for layout in of]:
        (expected,) = reports(ranks, f"{name}/one_rank")
        for report in reports(ranks, f"{name}/{layout}"):
            for step, (found, wanted) in enumerate(zip(report["steps"], expected["steps"], strict=True)):
                assert found == pytest.approx(wanted, rel=IN_LAYOUTS), (name, layout, step)
            for sample, logprobs in report["after"].items():
                assert logprobs == pytest.approx(expected["after"][sample], abs=3e-4), (name, layout)


def test_the_load_of_every_expert_is_reported(ranks: Ranks) -> None:
    for step in reports(ranks, f"{MODEL}/one_rank")[0]["steps"]:
        layers: dict[str, list[float]] = {}
        for name, load in step.items():
            if name.startswith("moe_load/"):
                layers.setdefault(name.split("/")[1], []).append(load)
        assert layers and all(sum(loads) == pytest.approx(len(loads)) for loads in layers.values())
        assert max(map(max, layers.values())) == pytest.approx(step["moe_load_imbalance"])


def test_biases_move_by_the_rate_on_every_rank(ranks: Ranks) -> None:
    before, *after = reports(ranks, f"{MODEL}/one_rank")[0]["biases"]
    assert before
    for earlier, later in zip([before, *after], after, strict=False):
        for name, values in later.items():
            moved = torch.tensor(values) - torch.tensor(earlier[name])
            at_rest = moved.abs() < 1e-6
            assert torch.allclose(moved[~at_rest].abs(), torch.tensor(BALANCED["bias_update_rate"]), atol=1e-6)
            assert moved.max() > 0 > moved.min()
    stages = reports(ranks, f"{MODEL}/pp2_ep2")
    biases = {str(values) for report in stages for values in report["biases"][-1].values()}
    assert biases == {*map(str, after[-1].values())}


@pytest.mark.parametrize("name", slow_but(HALF, HALF[0]))
def test_in_float16_experts_have_the_loss_scale_of_the_others(ranks: Ranks, name: str) -> None:
    """Whichever gradients overflow, the scale halves once, and no weight or bias moves. One optimizer is
    distributed."""
    (expected,) = reports(ranks, f"{name.split('/')[0]}/one_rank")
    found = reports(ranks, f"{name}/float16")
    assert len(found) == 4 and all(report["steps"] == found[0]["steps"] for report in found)
    *overflowed, made = found[0]["steps"]
    assert overflowed
    scales = [step["loss_scale"] for step in found[0]["steps"]]
    assert scales == [TOO_LARGE.initial / 2 ** min(number + 1, len(overflowed)) for number in range(len(scales))]
    for key in ("loss", "grad_norm", "moe_aux_loss", "moe_z_loss"):
        assert made[key] == pytest.approx(expected["steps"][0][key], rel=0.03)
    assert all(report["biases_kept"] for report in found)
    assert any(report["biases_moved"] for report in found) == name.startswith(MODEL)


def test_what_was_trained_is_in_transformers_what_it_was_in_training(ranks: Ranks, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / MODEL / "trained", dtype=torch.float32)
    tokens = load_file(folder / MODEL / "expected.safetensors")["tokens"].split(LENGTHS)
    for report in reports(ranks, f"{MODEL}/{EXPORTED}"):
        for sample, logprobs in report["after"].items():
            with torch.no_grad():
                assert logprobs == pytest.approx(model_logprobs(model, tokens[int(sample)]).tolist(), abs=1e-4)
