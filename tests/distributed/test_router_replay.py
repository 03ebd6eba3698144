"""Given choices of experts are replayed alike in every layout, with transformers' gradients. Log-probs are then as
close to the engine's as for a dense model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rltrain.data.experience import Experience
from rltrain.models import read_architecture
from rltrain.models.routing_shape import NOT_RECORDED, RoutingShape
from tests.distributed.cases_experts import response_mask
from tests.distributed.cases_router_replay import LAYOUTS, given_experts
from tests.support.family_checkpoints import LENGTHS, make_family_checkpoint, write_gradients
from tests.support.rollout_models import write_checkpoint
from tests.support.worlds import Ranks, made_once, reports, run_case

pytestmark = pytest.mark.slow  # tests/unit/test_embedded_families.py has a quick part

RELATIVE = 1e-4
MODEL = "qwen3_moe"


def write_replayed_gradients(path: Path) -> None:
    """Writes gradients like `write_gradients`, of transformers' model with routers that make the given choices."""
    architecture = read_architecture(path)
    lengths, numbers = torch.tensor(LENGTHS), torch.arange(len(LENGTHS))
    experience = Experience(group_ids=numbers, sample_ids=numbers, lengths=lengths)
    given = given_experts(RoutingShape.of(architecture), experience, architecture.num_experts).long().split(LENGTHS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sparse = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for place, mlp in enumerate(sparse):
        samples = iter(given)

        def choose(gate: Any, inputs: Any, output: Any, samples: Any = samples, place: int = place) -> Any:
            wanted = next(samples)[:, place]
            experts = torch.where(wanted == NOT_RECORDED, output[2], wanted)
            scores = torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight).softmax(-1).gather(1, experts)
            return output[0], scores / scores.sum(-1, keepdim=True), experts

        mlp.gate.register_forward_hook(choose)
    write_gradients(path, response_mask(), model, path / "replayed")


SPREAD = {"float32": 1e-7, "bfloat16": 2e-2}


def close_scores(folder: Path, spread: float) -> Path:
    """Writes a checkpoint with two kinds of experts. Every token takes two of one kind, and rounding decides between
    them."""
    path = write_checkpoint(folder, MODEL, num_hidden_layers=4, mlp_only_layers=[])
    weights = load_file(path / "model.safetensors")
    for name, gate in weights.items():
        if name.endswith("mlp.gate.weight"):
            kinds = gate.view(2, -1, gate.shape[1])
            kinds[:, 1:] = kinds[:, :1] * (1 + spread * torch.randn_like(kinds[:, 1:]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@made_once
def ranks(folder: Path) -> Ranks:
    close = {dtype: str(close_scores(folder / dtype, spread)) for dtype, spread in SPREAD.items()}
    path = make_family_checkpoint(MODEL, folder / MODEL)
    write_replayed_gradients(path)
    return run_case("cases_router_replay:all_cases", folder=path, layouts=[*LAYOUTS], close=close)


def test_gradients_are_those_of_transformers_with_the_same_choices(ranks: Ranks) -> None:
    """Includes gradients of the gates, because weights are the routers' own scores."""
    differences = reports(ranks, "one_rank")[0]["differences"]
    assert sum(name.endswith("router.weight") for name in differences) == 3
    assert max(differences.values()) < RELATIVE, differences


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one_rank"])
def test_layouts_replay_alike(ranks: Ranks, layout: str) -> None:
    """Compares log-probs, the report of the optimizer step, and the routers' own choices in each rank's layers."""
    (expected,) = reports(ranks, "one_rank")
    assert expected["step"]["replayed_choices"] == pytest.approx(0.75, abs=0.1)
    assert expected["step"]["replayed_choices_differing"] > 0.5
    starts = dict(zip(expected["sample_ids"], torch.tensor(LENGTHS).cumsum(0).tolist(), strict=True))
    for report in reports(ranks, layout):
        assert report["step"] == pytest.approx(expected["step"], rel=RELATIVE)
        places = [range(starts[sample] - LENGTHS[sample], starts[sample]) for sample in report["sample_ids"]]
        index = [place for of_sample in places for place in of_sample]
        for name in ("own", "logprobs"):
            assert report[name] == pytest.approx([expected[name][place] for place in index], abs=RELATIVE)
        assert report["again"] == pytest.approx(report["own"], abs=1e-6)
        found, of_one = torch.tensor(report["found"]), torch.tensor(expected["found"])[index]
        if len(index):
            own_layers = (found != NOT_RECORDED).all(-1).all(0)
            assert torch.equal(found[:, own_layers].sort(-1).values, of_one[:, own_layers].sort(-1).values)
            assert ((found == NOT_RECORDED).all(-1).all(0) | own_layers).all()
    together = [torch.tensor(report["found"]).amax() for report in reports(ranks, layout) if report["found"]]
    assert max(together) >= 0


@pytest.mark.parametrize("dtype", SPREAD)
def test_close_scores_part_trainer_and_engine_unless_choices_are_replayed(ranks: Ranks, dtype: str) -> None:
    """In bfloat16 only rounding remains, as for a dense model."""
    found = ranks[0]["engine"][dtype]
    (mean, largest), (replayed_mean, replayed_largest) = found["without"], found["replayed"]
    assert found["step"]["replayed_choices_differing"] > 1e-3
    if dtype == "float32":
        assert mean > 0.01 and replayed_largest < 1e-4
    else:
        assert replayed_mean < mean / 1.5 and replayed_largest < largest / 5
