"""Megatron's vision-language models have transformers' log-probs and gradients in every parallel layout."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.cases_vision import TRAININGS, WAYS
from tests.support.marks import slow_but
from tests.support.vision_checkpoints import write_checkpoint, write_gradients
from tests.support.vision_samples import SAMPLES, for_transformers
from tests.support.worlds import Ranks, made_once, reports, run_case

DENSE = [name for name in WAYS if name not in ("pp2_even", "ep2", "tp2_ep2", "pp2_ep2")]
ASKED = {
    "qwen3_vl": [*DENSE, "tp2_sp x 2", "cp2 x 2"],
    "qwen2_5_vl": ["tp2_sp", "pp2_even", "pp2_even x 2"],
    "qwen3_vl_moe": ["ep2", "tp2_ep2", "pp2_ep2"],
    "qwen3_5": ["tp2_sp", "pp2_even", "cp2", "cp2 x 2"],
    "qwen3_5_moe": ["tp2_ep2"],
}
FEW = {"qwen3_vl": ["tp2_sp", "pp2", "tp2_sp x 2"]}
TOLERANCE = 1e-4
OF_DECAYS = 1e-3
"""Tolerance for the gradients of gated delta nets' decays. They are small differences of large sums."""


def compare(folder: Path, asked: dict[str, list[str]]) -> Ranks:
    for kind in asked:
        write_checkpoint(folder / kind, kind)
        logprobs = write_gradients(folder / kind, folder / kind / "gradients", for_transformers(SAMPLES))
        save_file({"logprobs": torch.cat(logprobs)}, folder / kind / "expected.safetensors")
    return run_case("cases_vision:differences", folder=folder, asked=asked)


quick_world, slow_world = (made_once(partial(compare, asked=asked)) for asked in (FEW, ASKED))


def cases(asked: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, name) for kind in asked for name in asked[kind]]


@pytest.mark.parametrize(("kind", "name"), slow_but(cases(ASKED), *cases(FEW)))
def test_log_probs_and_gradients_are_those_of_transformers(ranks: Ranks, kind: str, name: str) -> None:
    for found in reports(ranks, f"{kind}/{name}"):
        assert found["logprobs"] < TOLERANCE
        gradients = found["gradients"]
        assert gradients.keys() == {*found["parameters"]}
        decays = {name: gradients.pop(name) for name in [*gradients] if name.endswith(("A_log", "dt_bias"))}
        assert max(decays.values(), default=0) < OF_DECAYS
        assert max(gradients.values(), default=0) < TOLERANCE, max(gradients, key=lambda name: gradients[name])


@made_once
def trained(folder: Path) -> Ranks:
    for kind in ("qwen3_vl", "qwen3_vl_moe"):
        write_checkpoint(folder / kind, kind)
    return run_case("cases_vision:steps", folder=folder)


CHANGE_TOWERS = ("whole", "adapters of the tower", "experts")
OTHERS = [(what, name) for what, trainings in TRAININGS.items() for name in trainings if name != "one"]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), OTHERS)
def test_steps_are_those_of_one_rank(trained: Ranks, what: str, name: str) -> None:
    """Some replicas have no images or no samples in some steps."""
    (baseline,) = reports(trained, f"{what}/one")
    for found in reports(trained, f"{what}/{name}"):
        assert found["losses"] == pytest.approx(baseline["losses"], rel=1e-4)
        assert found["norms"] == pytest.approx(baseline["norms"], rel=1e-3)
        assert found["logprobs"] == pytest.approx(baseline["logprobs"], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), [(what, name) for what in TRAININGS for name in TRAININGS[what]])
def test_every_copy_of_a_tower_is_the_same(trained: Ranks, what: str, name: str) -> None:
    found = [one["tower"] for one in reports(trained, f"{what}/{name}") if one["tower"]["is_here"]]
    assert found and len({one["digest"] for one in found}) == 1
    assert {one["changed"] for one in found} == {what in CHANGE_TOWERS}
