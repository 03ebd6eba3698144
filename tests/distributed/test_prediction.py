"""The layer that predicts a further token trains alike in every layout.

Its loss and all gradients equal those of plain torch, one sample at a time, and of transformers' layers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.cases_prediction import LAYOUTS, WAYS
from tests.support.checkpoint_files import stored_tensors
from tests.support.prediction_checkpoints import make_mimo, make_with_further, write_reference
from tests.support.worlds import Ranks, made_once, reports, run_case

CLOSE = 2e-5
OF_FAMILY = {
    "deepseek_v3": ["one_rank", "tp2_ep2", "pp2_ep2"],
    "qwen3_5": ["one_rank", "pp2"],
    "qwen3_next": ["one_rank", "tp2_ep2"],
}
"""Layouts of each family."""


class Trained:
    def __init__(self, folder: Path) -> None:
        self.path = make_mimo(folder / "mimo")
        gradients = {way: folder / f"gradients_{way}" for way in WAYS}
        self.losses = {way: write_reference(self.path, gradients[way], trains=way) for way in WAYS}
        paths = {way: str(one) for way, one in gradients.items()}
        self.ranks = run_case("cases_prediction:trained", path=self.path, gradients=paths)

    def of(self, layout: str, way: str) -> list[dict[str, Any]]:
        return [self.ranks[rank][layout][way] for rank in LAYOUTS[layout].grid.ranks]

    def exported(self, layout: str, way: str) -> dict[str, Tensor]:
        return stored_tensors(self.path / way / layout)


def test_two_stages_have_the_losses_and_gradients_of_plain_torch(tmp_path: Path) -> None:
    path, gradients = make_mimo(tmp_path / "mimo"), tmp_path / "gradients"
    likelihood, further = write_reference(path, gradients, trains="model")
    for found in run_case("cases_prediction:in_two_stages", 2, path=path, gradients=gradients):
        assert found["steps"][0]["loss"] == pytest.approx(likelihood, rel=CLOSE)
        assert found["steps"][0]["mtp_loss"] == pytest.approx(further, rel=CLOSE)
        assert found["differences"] and max(found["differences"].values()) < CLOSE, found["differences"]
        assert found["steps"][-1]["mtp_loss"] < further, "it learns"


trained = made_once(Trained)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_are_those_of_plain_torch(trained: Trained, way: str) -> None:
    """No prediction crosses the end of a sample. The first tokens of a response without a predicting row do not
    count."""
    likelihood, further = trained.losses[way]
    for layout in LAYOUTS:
        for found in trained.of(layout, way):
            assert found["steps"][0]["loss"] == pytest.approx(likelihood, rel=CLOSE), layout
            assert found["steps"][0]["mtp_loss"] == pytest.approx(further, rel=CLOSE), layout
            assert max(found["differences"].values(), default=0) < CLOSE, (layout, found["differences"])
            assert found["differences"] or LAYOUTS[layout].grid.dp > 1


@pytest.mark.slow
def test_what_it_does_not_train_has_the_gradients_of_a_model_without_it(trained: Trained) -> None:
    """Gradients are equal bit for bit."""
    without, layer, head, model = (trained.ranks[0]["gradients"][way] for way in ("without", *WAYS))
    assert without.keys() == {name for name in layer if not name.startswith("mtp.")}
    assert len(layer) > len(without) > 0
    for name, gradient in without.items():
        assert layer[name] == gradient, name
        assert (head[name] == gradient) == (name != "output_layer.weight"), name
        assert model[name] != gradient, name


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_alike_in_every_layout(trained: Trained, way: str) -> None:
    """The gradient norm for clipping counts the embedding on both ends of a pipeline once."""
    first = trained.of("one_rank", way)[0]
    assert first["steps"][-1]["mtp_loss"] < first["steps"][0]["mtp_loss"]
    for layout in LAYOUTS:
        for found in trained.of(layout, way):
            for steps, of_one_rank in zip(found["steps"], first["steps"], strict=True):
                for name in ("loss", "mtp_loss", "grad_norm"):
                    assert steps[name] == pytest.approx(of_one_rank[name], rel=1e-5), (layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_has_the_layer_as_it_was_trained(trained: Trained, way: str) -> None:
    start, expected = load_file(trained.path / "model.safetensors"), trained.exported("one_rank", way)
    assert expected.keys() == start.keys()
    assert all((one != start[name]).any() for name, one in expected.items())
    for layout in LAYOUTS:
        found = trained.exported(layout, way)
        assert found.keys() == start.keys()
        for name, one in found.items():
            torch.testing.assert_close(one, expected[name], rtol=1e-4, atol=1e-5, msg=f"{layout}: {name}")


@pytest.mark.slow
def test_a_state_is_loaded_in_another_layout(trained: Trained) -> None:
    for way in WAYS:
        for name in ("loss", "mtp_loss", "grad_norm"):
            resumed, went_on = trained.ranks[0]["resumed"][way][name], trained.of("pp2", way)[0]["after"][name]
            assert resumed == pytest.approx(went_on, rel=1e-5), (way, name)


@made_once
def families(folder: Path) -> tuple[Path, Ranks]:
    for family in OF_FAMILY:
        make_with_further(family, folder / family)
    return folder, run_case("cases_prediction:families", folder=folder, layouts=OF_FAMILY)


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_FAMILY)
def test_other_families_learn_as_transformers_layers_do(families: tuple[Path, Ranks], family: str) -> None:
    folder, ranks = families
    likelihood, further = json.loads((folder / family / "losses.json").read_text())
    first = reports(ranks, f"{family}/one_rank")[0]["steps"]
    assert first[1]["mtp_loss"] != first[0]["mtp_loss"]
    for layout in OF_FAMILY[family]:
        for found in reports(ranks, f"{family}/{layout}"):
            assert found["steps"][0]["loss"] == pytest.approx(likelihood, rel=1e-5), layout
            assert found["steps"][0]["mtp_loss"] == pytest.approx(further, rel=1e-5), layout
            assert max(found["differences"].values(), default=0) < 2e-4, (layout, found["differences"])
            for steps, of_one_rank in zip(found["steps"], first, strict=True):
                for metric in ("loss", "mtp_loss", "grad_norm"):
                    assert steps[metric] == pytest.approx(of_one_rank[metric], rel=5e-4), (layout, metric)
