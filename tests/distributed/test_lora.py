"""Adapters train alike in every layout and as PEFT's do, on a base that stays as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.cases_lora import FROM_PEFT, LORA, OF_EXPERTS, RESUMED, SAVED, TARGETS, TRAINED
from tests.distributed.family_checkpoints import make_family_checkpoint
from tests.distributed.tiny_checkpoints import ENTROPY_COEF, make_checkpoints
from tests.distributed.torchrun import run_distributed

RELATIVE = 1e-4
LAYER, OF_MEGATRON = "model.layers.1.", "decoder.layers.1."
FUSED = {
    f"{OF_MEGATRON}self_attention.linear_qkv.weight": [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"],
    f"{OF_MEGATRON}self_attention.linear_proj.weight": [f"{LAYER}self_attn.o_proj.weight"],
    f"{OF_MEGATRON}mlp.linear_fc1.weight": [f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")],
    f"{OF_MEGATRON}mlp.linear_fc2.weight": [f"{LAYER}mlp.down_proj.weight"],
}
"""The transformers' parameters in Megatron's."""
CLOSE = 1e-5
ADAPTERS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return Path(make_checkpoints(folder / "dense", ["qwen3"], num_hidden_layers=2)["qwen3"])


@pytest.fixture(scope="module")
def by_peft(base: Path, folder: Path) -> dict[str, Any]:
    """Adapters that PEFT made, without a zero in them, and what it makes of the samples with them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    settings = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=[*TARGETS], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "peft")
    columns = load_file(base / "experience.safetensors")
    mask, logprobs, entropies = columns["response_mask"].float(), [], []
    for tokens in columns["tokens"].split(columns["lengths"].tolist()):
        log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        logprobs += [torch.zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(log_softmax.exp() * log_softmax).sum(-1)]
    loss = -((torch.cat(logprobs) + ENTROPY_COEF * torch.cat(entropies)) * mask).sum() / mask.sum()
    loss.backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    merged = model.merge_and_unload().state_dict()
    return {"logprobs": torch.cat(logprobs).detach(), "gradients": gradients, "merged": merged}


@pytest.fixture(scope="module")
def ranks(base: Path, by_peft: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    experts = folder / "experts"
    make_family_checkpoint("qwen3_moe", experts)
    arguments = {"dense": str(base), "experts": str(experts), "peft": str(folder / "peft"), "folder": str(folder)}
    return run_distributed("tests.distributed.cases_lora:all_cases", 4, arguments, timeout_s=300)


def reports(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks if name in rank]
    assert found, f"no rank reported {name}"
    return found


def assert_equal_steps(ranks: list[dict[str, Any]], name: str, expected: list[dict[str, float]]) -> None:
    for report in reports(ranks, name):
        steps = report["steps"] if isinstance(report, dict) else report
        for step, (values, wanted) in enumerate(zip(steps, expected, strict=True)):
            assert values == pytest.approx(wanted, rel=RELATIVE, abs=1e-7), f"{name}, step {step}"


@pytest.mark.parametrize("layout", FROM_PEFT)
def test_log_probs_and_gradients_equal_those_of_peft(
    ranks: list[dict[str, Any]], by_peft: dict[str, Any], folder: Path, layout: str
) -> None:
    for report in reports(ranks, f"peft/{layout}"):
        assert (torch.tensor(report["logprobs"]) - by_peft["logprobs"]).abs().max() <= 2 * CLOSE
    gradients = load_file(folder / layout / "gradients" / ADAPTERS)
    assert gradients.keys() == by_peft["gradients"].keys()
    for name, gradient in gradients.items():
        assert (gradient - by_peft["gradients"][name]).abs().max() <= CLOSE, name


@pytest.mark.parametrize("layout", FROM_PEFT)
def test_files_of_peft_come_out_bit_for_bit_as_they_went_in(
    ranks: list[dict[str, Any]], folder: Path, layout: str
) -> None:
    went_in, came_out = load_file(folder / "peft" / ADAPTERS), load_file(folder / layout / "adapters" / ADAPTERS)
    assert went_in.keys() == came_out.keys()
    assert all(torch.equal(tensor, went_in[name]) for name, tensor in came_out.items())


def test_peft_loads_what_is_written(ranks: list[dict[str, Any]], base: Path, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder / "tp2_pp2" / "adapters")
    held = {name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if "lora" in name}
    went_in = load_file(folder / "peft" / ADAPTERS)
    assert held.keys() == went_in.keys()
    assert all(torch.equal(tensor, went_in[name]) for name, tensor in held.items())


@pytest.mark.parametrize("layout", FROM_PEFT)
def test_the_merged_checkpoint_equals_what_peft_merges(
    ranks: list[dict[str, Any]], by_peft: dict[str, Any], folder: Path, layout: str
) -> None:
    merged: dict[str, torch.Tensor] = {}
    for file in (folder / layout / "merged").glob("*.safetensors"):
        merged |= load_file(file)
    assert merged.keys() == by_peft["merged"].keys()
    for name, tensor in merged.items():
        assert (tensor - by_peft["merged"][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("layout", TRAINED)
def test_steps_do_not_depend_on_the_layout(ranks: list[dict[str, Any]], layout: str) -> None:
    (expected,) = reports(ranks, "trained/tp1")
    assert_equal_steps(ranks, f"trained/{layout}", expected["steps"])


@pytest.mark.parametrize("layout", TRAINED)
def test_the_base_stays_and_is_what_the_model_begins_as(ranks: list[dict[str, Any]], layout: str) -> None:
    for report in reports(ranks, f"trained/{layout}"):
        assert report["begins_as_base"] and report["base_stays"] and report["weights_stay"]
        first, *_, last = report["steps"]
        assert last["loss"] < first["loss"] - 0.01


def test_gradients_and_optimizer_are_of_the_adapters_alone(ranks: list[dict[str, Any]]) -> None:
    (report,) = reports(ranks, "trained/tp1")
    held = report["bytes"]
    assert held["weights"] == report["frozen"] + report["adapters"]
    assert held["gradients"] == report["adapters"]
    assert 2 * report["adapters"] <= held["optimizer"] < 2.1 * report["adapters"]


def test_a_run_goes_on_exactly_in_its_layout_and_to_rounding_in_another(ranks: list[dict[str, Any]]) -> None:
    for report in reports(ranks, "resumed"):
        assert report[SAVED] == report["went_on"]
        for found, wanted in zip(report[RESUMED], report["went_on"], strict=True):
            assert found == pytest.approx(wanted, rel=RELATIVE)
        assert report["others"] == ["pieces"], "only adapters are saved"


@pytest.mark.parametrize("way", ["fsdp1x1", "fsdp3x1", "fsdp4x2"])
def test_sharded_models_train_the_same_adapters_and_go_on_from_megatrons_state(
    ranks: list[dict[str, Any]], way: str
) -> None:
    (expected,) = reports(ranks, "backend/megatron1x1")
    assert_equal_steps(ranks, f"backend/{way}", expected["steps"])
    for report in reports(ranks, f"backend/{way}"):
        assert report["begins_as_base"] and report["base_stays"]
    if way == "fsdp1x1":
        (whole,) = reports(ranks, f"backend/{way}")
        merged = {name: sum(whole["merged"][part] for part in parts) for name, parts in FUSED.items()}
        assert merged == pytest.approx({name: expected["merged"][name] for name in FUSED}, abs=1e-3)


def test_what_is_dropped_repeats_also_where_layers_are_computed_anew(ranks: list[dict[str, Any]]) -> None:
    (without,) = reports(ranks, "trained/tp1")
    for (plain, again), (recomputed,) in zip(
        reports(ranks, "dropout/none"), reports(ranks, "dropout/full"), strict=True
    ):
        assert plain["steps"] == again["steps"]
        assert plain["undisturbed"] and again["undisturbed"] and recomputed["undisturbed"]
        for found, wanted in zip(recomputed["steps"], plain["steps"], strict=True):
            assert found == pytest.approx(wanted, rel=RELATIVE)
        assert plain["steps"][0]["grad_norm"] != pytest.approx(without["steps"][0]["grad_norm"], rel=RELATIVE)


@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_adapters_of_experts_train_alike_in_every_layout(ranks: list[dict[str, Any]], layout: str) -> None:
    (expected,) = reports(ranks, "experts/one_rank")
    assert expected[0]["grad_norm"] > 0
    assert_equal_steps(ranks, f"experts/{layout}", expected)


def test_adapters_of_another_shape_are_refused(by_peft: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    from rltrain.checkpoint.peft_files import load_adapters
    from rltrain.cluster.grid import Grid
    from rltrain.errors import CheckpointError
    from rltrain.models import read_architecture
    from rltrain.reshard.megatron_layout import megatron_layout

    architecture = read_architecture(folder / "dense" / "qwen3")

    def error(lora: Any, path: Path) -> str:
        layout = megatron_layout(architecture.adapted(lora.rank, lora.targets), Grid((0,)))
        parameters = {name: torch.empty(shape) for name, shape in layout.on(0).parameters}
        with pytest.raises(CheckpointError) as raised:
            load_adapters(path, layout, 0, parameters, lora)
        return str(raised.value)

    assert "set model.lora.rank, which is 8" in error(LORA.model_copy(update={"rank": 8}), folder / "peft")
    assert "set model.lora.targets" in error(LORA.model_copy(update={"targets": None}), folder / "peft")
    (tmp_path / "adapter_config.json").write_text((folder / "peft" / "adapter_config.json").read_text())
    tensors = load_file(folder / "peft" / ADAPTERS)
    first = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, tmp_path / ADAPTERS)
    assert f"such as {first} with shape None" in error(LORA, tmp_path)
