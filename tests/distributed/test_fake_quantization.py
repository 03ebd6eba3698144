"""Experts rounded in every pass train alike in every layout and with both backends.

The reference is transformers' model with the rounded weights, whose gradients move the unrounded ones.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rltrain.models import read_architecture
from rltrain.models.experts import is_expert
from rltrain.models.products import int4_rounded
from rltrain.planning.activation_memory import Activations
from tests.distributed.cases_experts import response_mask
from tests.distributed.cases_fake_quantization import GROUP_SIZE, LAYOUTS, MEASURED, WAYS
from tests.distributed.cases_lora import KEPT_ROWS
from tests.support.family_checkpoints import LENGTHS, make_family_checkpoint, model_logprobs, write_gradients
from tests.support.tiny_checkpoints import make_checkpoints
from tests.support.worlds import Ranks, made_once, reports, run_case
from tests.unit.test_estimated_memory import job_of

RELATIVE, IN_LAYOUTS, CLOSE = 1e-4, 1e-5, 1e-4
pytestmark = pytest.mark.slow  # tests/unit/test_megatron_layers.py has a quick part
OF_WAYS = [name for name in WAYS if not name.startswith("megatron")]


@made_once
def folder(path: Path) -> Path:
    make_family_checkpoint("qwen3_moe", path)
    made = path / "transformers"
    made.mkdir()
    shutil.copy(path / "config.json", made)
    shutil.copy(path / "expected.safetensors", made)
    save_file(of_rounded(weights_in(path)), made / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def told(folder: Path) -> list[list[float]]:
    """Returns transformers' log-probs of each sample, and writes the gradients next to the checkpoint."""
    from transformers import AutoModelForCausalLM

    write_gradients(folder / "transformers", response_mask())
    model = AutoModelForCausalLM.from_pretrained(folder / "transformers", dtype=torch.float32)
    tokens = load_file(folder / "expected.safetensors")["tokens"]
    with torch.no_grad():
        return [model_logprobs(model, sample).tolist() for sample in tokens.split(LENGTHS)]


@pytest.fixture(scope="module")
def ranks(folder: Path, told: list[list[float]], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    base = make_checkpoints(tmp_path_factory.mktemp("samples"), ["qwen3"], num_hidden_layers=1)["qwen3"]
    shutil.copy(Path(base) / "experience.safetensors", folder)
    return run_case("cases_fake_quantization:rounded", path=folder, gradients=folder / "transformers/gradients")


def weights_in(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def of_rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: int4_rounded(one, GROUP_SIZE, 7.0) if is_expert(name) else one for name, one in weights.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_the_rounded_weights(
    name: str, ranks: Ranks, told: list[list[float]]
) -> None:
    for report in reports(ranks, name):
        for sample, logprobs in report["start"].items():
            assert logprobs == pytest.approx(told[int(sample)], abs=CLOSE)
        assert max(report["differences"].values(), default=0) < RELATIVE, report["differences"]
        assert report["differences"] or LAYOUTS[name].distributed


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one_rank"])
def test_the_layout_changes_no_step(name: str, ranks: Ranks) -> None:
    (alone,) = reports(ranks, "one_rank")
    for report in reports(ranks, name):
        for step, wanted in zip(report["steps"], alone["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=IN_LAYOUTS)


@pytest.mark.parametrize("name", [*LAYOUTS, *WAYS])
def test_engines_get_the_rounded_weights_and_files_those_that_are_trained(
    name: str, ranks: Ranks, folder: Path
) -> None:
    """Untrained adapters add nothing."""
    reports(ranks, name)
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    start = {tensor: one.to(dtype) for tensor, one in weights_in(folder).items()}
    for kind, wanted in (("served", of_rounded(start)), ("kept", start)):
        found = weights_in(folder / kind / name)
        assert found.keys() == wanted.keys()
        assert [tensor for tensor, one in wanted.items() if not torch.equal(found[tensor], one)] == []


@pytest.mark.parametrize("name", OF_WAYS)
def test_backends_are_alike_and_go_on_from_each_others_states(name: str, ranks: Ranks) -> None:
    """Includes adapters on the rounded base."""
    kind = name.partition("/")[2]
    (wanted,) = reports(ranks, f"megatron1/{kind}")
    rel = 5e-2 if "bfloat16" in kind else 1e-4
    for report in reports(ranks, name):
        for step, of_megatron in zip(report["steps"], wanted["steps"], strict=True):
            for key in ("loss", "grad_norm"):
                assert step[key] == pytest.approx(of_megatron[key], rel=rel), key


def test_what_rounding_keeps_for_backward_is_foretold(ranks: Ranks, folder: Path) -> None:
    """The planned bytes are exact."""

    def foretold(rounded: dict[str, int] | None) -> int:
        model = {"path": "m", "dtype": "float32", "fake_quantization": rounded}
        job = job_of(read_architecture(folder), {"actor": 0, "rollout, reward": 1}, 2, model=model)
        return Activations(job, "actor", 0).training(KEPT_ROWS)

    (report,) = reports(ranks, MEASURED)
    found = report["kept"]["rounded"] - report["kept"]["plain"]
    assert found == foretold({"group_size": GROUP_SIZE}) - foretold(None) > 0
